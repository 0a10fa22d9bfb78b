"""Plan a job on a profiled cluster: strategies propose, the event simulator ranks, the best one is chosen."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from spantrain.core.outer.groups import OuterPlan
from spantrain.core.plan import Plan
from spantrain.core.planned.report import Alternative, PlanReport
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.assembly.recompute import proposals_of, recomputing_all
from spantrain.planner.assembly.tuning import check_sequence, slicing
from spantrain.planner.engine import reasons as sentences
from spantrain.planner.engine.cheaper import with_cheaper
from spantrain.planner.engine.evaluate import Evaluator, check_kinds, check_prices
from spantrain.planner.engine.outcome import (
    PlanOptions,
    PlanOutcome,
    Prefer,
    Ranking,
    StrategyFigures,
    divides_unasked,
    is_plain,
    no_figures,
    plain_only,
    prediction_of,
)
from spantrain.planner.engine.outer import LocalPlans, join_groups, local_plans, pair_rates, slow_boundaries
from spantrain.planner.engine.predict import ORDER_MAY_GAIN, PlanOrders, Ranked, over_time
from spantrain.planner.request import Evaluation, JobSpec, Objective, PlanRequest, Proposal, Restriction
from spantrain.planner.strategies.interleaved import with_interleaved
from spantrain.planner.strategies.registry import DEFAULT_STRATEGY, strategies, strategies_named
from spantrain.planner.strategies.relaxation import Relaxation
from spantrain.planner.strategies.score import sites_of
from spantrain.schedule.at_once import check_samples_at_once, samples_at_once
from spantrain.schedule.registry import schedule_names

_RESCHEDULED = 3
"""How many of a strategy's best are tried with other schedules, where that is asked for."""
_COMPARED = ("single-site", "single-device")
"""What every plan is shown beside (DESIGN idea 6)."""
_COMPARED_UP_TO = 32
"""Devices, up to which the best site is searched for on its own."""
_BESIDE, _BESIDE_DIVIDED, _BESIDE_UP_TO = ("spantrain", "spantrain-dp"), ("zero2", "fsdp"), 8
"""Strategies whose answers compete with the default one's (where state may be divided), and devices up to which."""
_BESIDE_GAIN = 1.1
"""Plans over the best by more than that, of strategies that were not asked, have the plain rule's order."""
_TOLD = 32
"""Groups up to which the ways between all of them are told of."""
_PREFERRED_UP_TO, _PREFERRED_OF = 1.5, 200
"""How much a plan may be over the best, and how many there may be, of those that `prefer` chooses from."""


def make_plan(profile: Profile, job: JobSpec, options: PlanOptions | None = None) -> PlanOutcome:
    """Ask the strategies, evaluate what they propose, choose the best; without the second level, beside what it brings.

    Raises:
        UsageError: there is no such strategy.
        PlanError: constraints contradict each other or ask for what the cluster does not have.
        ProfileError: the profile lacks a kind of device, or a link.
        InfeasiblePlanError: nothing fits, or nothing keeps the constraints; the closest misses are in the message.
    """
    options = options or PlanOptions()
    outcome = _Planning(profile, job, options).run()
    if options.constraints.second_level:
        return outcome
    both = replace(options, constraints=replace(options.constraints, second_level=True))
    return outcome.beside_second_level(_Planning(profile, job, both).run())


class _Answer(Record):
    """What a strategy came up with: its best proposal, and the runners-up for the reasons."""

    figures: StrategyFigures
    ranked: Ranked = ()
    """Those that fit, best first."""

    @property
    def plan(self) -> Plan | None:
        return self.ranked[0][0].plan if self.ranked else None

    def alternative(self, name: str) -> tuple[Plan | None, Alternative]:
        """Return the plan as one of that name, and how it is shown beside the one that is chosen."""
        plan = None if self.plan is None else replace(self.plan, strategy=name)
        return plan, Alternative(
            name=f"best {name.replace('-', ' ')}",
            devices=() if plan is None else plan.devices,
            step_s=self.figures.step_s,
            samples_per_s=self.figures.samples_per_s,
            reason=self.figures.reason if plan is None else "; ".join(self.ranked[0][0].reasons),
        )


class _Planning:
    def __init__(self, profile: Profile, job: JobSpec, options: PlanOptions) -> None:
        self._started_s, self._profile = time.perf_counter(), profile
        fewest = profile.graph.fewest_samples(range(len(profile.graph.units)))
        self._options = options = replace(options, constraints=options.constraints.with_quotas_of(profile.cluster))
        self._job = job = replace(job, fewest_samples=fewest)
        self._evaluator = Evaluator(profile, job, options.heard)
        self._ranking = Ranking(profile.cluster, options)
        self._orders = PlanOrders(profile, self._evaluator, self._ranking)
        self._beside, self._unasked = tuple[str, ...](), frozenset[str]()
        self._request = PlanRequest(
            profile=profile,
            job=job,
            objective=options.objective,
            constraints=options.constraints,
            restriction=options.restriction,
            evaluate=self._evaluator,
        )

    def run(self) -> PlanOutcome:
        asked = strategies_named(self._options.strategies or (DEFAULT_STRATEGY,))
        check_kinds(self._profile, self._request.devices, self._job)
        adopts = DEFAULT_STRATEGY in asked and self._options.restriction is Restriction.NONE
        if adopts and len(self._request.devices) <= _BESIDE_UP_TO:
            self._beside = (*_BESIDE, *(_BESIDE_DIVIDED if self._options.constraints.sharded_state else ()))
            self._unasked = frozenset(self._beside) - {*asked}
        if self._options.counts_money:
            check_prices(self._profile.cluster, self._request.devices)
        if self._options.constraints.sequence_parallel:
            check_sequence(self._profile)
        small = len(self._request.devices) <= _COMPARED_UP_TO
        names = dict.fromkeys((*asked, *(_COMPARED if small else _COMPARED[1:]), *self._beside))
        answers = {name: self._answer(name) for name in names}
        # Groups that could train by themselves: the third way over slow boundaries.
        seen = [entry for entry in self._evaluator.seen() if not self._ranking.only_to_compare(entry[0])]
        local = local_plans(self._profile, self._job, self._options.constraints, seen, self._evaluator)
        free = not self._options.strategies and self._options.restriction is Restriction.NONE
        for step in (self._with_all_seen, self._with_orders, self._with_further_orders, self._with_all_seen):
            answers = step(answers) if adopts or step == self._with_orders else answers
        answers[_COMPARED[0]] = self._best_in_one_site(answers.get(_COMPARED[0]))
        competing = {name: answers[name] for name in ((*asked, *_COMPARED) if free else asked)}
        chosen, said = self._best(competing), tuple[str, ...]()
        if self._options.prefer is not None:
            answers[chosen], said = self._preferred(answers[chosen], self._options.prefer)
        return self._outcome(chosen, answers, tuple(competing), local, said)

    def _preferred(self, best: _Answer, prefer: Prefer) -> tuple[_Answer, tuple[str, ...]]:
        """Let another plan than the best by the objective be chosen, of those that are not far behind it."""
        started_s, first = time.perf_counter(), best.ranked[0]
        most = _PREFERRED_UP_TO * self._ranking.value(first[1])[0]
        rows = [
            entry
            for plan, evaluation in self._evaluator.seen()
            if evaluation.fits and self._ranking.value(evaluation)[0] <= most and plan.stages != first[0].plan.stages
            if samples_at_once(plan, range(len(self._profile.graph.units)))[0] >= self._job.fewest_samples
            if self._ranking.rank(entry := (Proposal(plan=plan, own_estimate_s=None), evaluation))[:2]
            == self._ranking.rank(first)[:2]
        ]
        near = [first, *sorted(rows, key=self._ranking.rank)[:_PREFERRED_OF]]
        index, said = prefer([(proposal.plan, evaluation) for proposal, evaluation in near])
        if index == 0:
            return best, said
        ranked = (self._orders.ordered(*near[index]), *best.ranked)
        return _Answer(figures=self._ranking.figures(ranked, best.figures.plans, started_s), ranked=ranked), said

    def _answer(self, name: str) -> _Answer:
        started_s = time.perf_counter()
        try:
            propose = strategies()[name].propose
            if name == DEFAULT_STRATEGY:
                propose = with_interleaved(with_cheaper(propose))
            propose = plain_only(propose) if name in self._unasked else propose
            propose = slicing(propose) if self._options.constraints.sequence_parallel else propose
            if self._options.constraints.recompute_all:
                proposals = recomputing_all(propose)(self._request)
            else:
                more = {"improves": name == DEFAULT_STRATEGY, "lightens": name in self._beside}
                proposals = proposals_of(propose, self._request, **more)
        except InfeasiblePlanError as error:
            return _Answer(figures=no_figures(str(error), started_s))
        ranked, refusals = list[tuple[Proposal, Evaluation]](), list[str]()
        for proposal in proposals:
            self._take(proposal, ranked, refusals)
        if not ranked:
            return _Answer(figures=no_figures("; ".join(dict.fromkeys(refusals)), started_s))
        if self._options.any_schedule:
            for proposal, _ in sorted(ranked, key=self._ranking.rank)[:_RESCHEDULED]:
                for other in self._other_schedules(proposal):
                    self._take(other, ranked, refusals)
        ranked.sort(key=self._ranking.rank)
        return _Answer(figures=self._ranking.figures(ranked, len(proposals), started_s), ranked=tuple(ranked))

    def _with_orders(self, answers: Mapping[str, _Answer]) -> dict[str, _Answer]:
        """Search the order of work of answers that it may make the best: those that are near it."""
        firsts = {name: self._ranking.rank(answer.ranked[0]) for name, answer in answers.items() if answer.ranked}
        least = min(firsts.values(), default=(False, False, 0.0, 0.0))
        found = dict(answers)
        for name, (broken, _, value, _) in firsts.items():
            if broken == least[0] and value <= least[2] * (_BESIDE_GAIN if name in self._unasked else ORDER_MAY_GAIN):
                started_s = time.perf_counter()
                best = min((one.ranked[0] for one in found.values() if one.ranked), key=self._ranking.rank)
                # Of what is not shown, nothing else matters than whether it is the best.
                below_s = self._ranking.below_s(best[1]) if name in self._unasked else math.inf
                ranked = self._orders.first_ordered(answers[name].ranked, below_s)
                found[name] = self._improved(answers[name], ranked, started_s)
        return found

    def _best_in_one_site(self, known: _Answer | None) -> _Answer:
        """Return the best plan inside one site, of the search for it (if there was one) and of all simulated ones."""
        started_s, limits = time.perf_counter(), self._options.constraints
        ranked = [
            (Proposal(plan=plan, own_estimate_s=None), evaluation)
            for plan, evaluation in self._evaluator.seen()
            if evaluation.fits and len(sites_of(plan)) == 1 and not divides_unasked(plan, limits)
        ]
        if not ranked:
            reason = f"not searched: over {_COMPARED_UP_TO} devices; --strategy single-site,NAME does"
            return _Answer(figures=no_figures(reason, started_s)) if known is None else known
        ranked.sort(key=self._ranking.rank)
        if known is not None and known.ranked and self._ranking.rank(known.ranked[0]) <= self._ranking.rank(ranked[0]):
            return known
        figures = self._ranking.figures(ranked, len(ranked), started_s)
        if known is not None:
            figures = replace(figures, search_s=known.figures.search_s)
        return _Answer(figures=figures, ranked=tuple(ranked))

    def _with_further_orders(self, answers: Mapping[str, _Answer]) -> dict[str, _Answer]:
        """Search the order of work of more of the plans that were simulated, for the default strategy."""
        started_s, answer = time.perf_counter(), answers[DEFAULT_STRATEGY]
        if not answer.ranked or len(self._request.devices) > _COMPARED_UP_TO:
            return dict(answers)
        more = self._orders.further(self._plain_seen(), answer.ranked[0])
        return {**answers, DEFAULT_STRATEGY: self._improved(answer, (*answer.ranked, *more), started_s)}

    def _improved(self, answer: _Answer, rows: Ranked, started_s: float) -> _Answer:
        """Return an answer with other rows, best first; the time since then counts as its search's."""
        ranked = tuple(sorted(rows, key=self._ranking.rank))
        figures = self._ranking.figures(ranked, answer.figures.plans, started_s - answer.figures.search_s)
        return _Answer(figures=figures, ranked=ranked)

    def _plain_seen(self) -> Iterator[tuple[Proposal, Evaluation]]:
        """Yield every plan that was simulated, fits, and has nothing that has to be asked for."""
        for plan, found in self._evaluator.seen():
            if found.fits and is_plain(plan, self._job, self._options.constraints):
                yield Proposal(plan=plan, own_estimate_s=None), found

    def _with_all_seen(self, answers: Mapping[str, _Answer]) -> dict[str, _Answer]:
        """Give the default strategy's answer the best plan that was simulated, whoever proposed it first."""
        started_s, answer = time.perf_counter(), answers[DEFAULT_STRATEGY]
        best = min(self._plain_seen(), key=self._ranking.rank, default=None)
        if best is None or (answer.ranked and self._ranking.rank(answer.ranked[0]) <= self._ranking.rank(best)):
            return dict(answers)
        reasons = ("Found beside the search: all plans that were simulated compete, whoever proposed them.",)
        rows = ((replace(best[0], reasons=reasons), best[1]), *answer.ranked)
        return {**answers, DEFAULT_STRATEGY: self._improved(answer, rows, started_s)}

    def _take(self, proposal: Proposal, ranked: list[tuple[Proposal, Evaluation]], refusals: list[str]) -> None:
        """Evaluate a proposal; add it to those that fit, or why it does not to the refusals."""
        try:
            check_samples_at_once(proposal.plan, self._profile.graph)
            evaluation = self._evaluator(proposal.plan)
        except (PlanError, ScheduleError) as error:
            refusals.append(str(error))
            return
        if evaluation.fits:
            ranked.append((replace(proposal, plan=self._evaluator.bucketed(proposal.plan)), evaluation))
        else:
            refusals.append(f"over the memory of {', '.join(evaluation.over_memory)}")

    def _other_schedules(self, proposal: Proposal) -> Iterator[Proposal]:
        """Yield a plan made for the job's schedule with each other one; a paper's own schedule stays."""
        if proposal.plan.schedule == self._job.schedule:
            for name in schedule_names():
                if name != self._job.schedule:
                    yield replace(proposal, plan=replace(proposal.plan, schedule=name))

    def _best(self, answers: Mapping[str, _Answer]) -> str:
        """Return the name of the best answer that may be chosen."""
        possible = [name for name, answer in answers.items() if answer.ranked and not answer.figures.reason]
        if possible:
            return min(possible, key=lambda name: self._ranking.rank(answers[name].ranked[0]))
        misses = dict.fromkeys(f"{name}: {answer.figures.reason}" for name, answer in answers.items())
        if any(answer.ranked for answer in answers.values()):
            raise InfeasiblePlanError(
                f"no plan keeps the constraints; the closest: {'; '.join(misses)}. Loosen one of them, or ask more "
                "strategies (--strategy all)"
            )
        if len(answers) > 1 and not self._options.strategies:
            # The default strategy's refusal is about all devices; those of one site or device add nothing to it.
            raise InfeasiblePlanError(next(iter(answers.values())).figures.reason)
        raise InfeasiblePlanError("; ".join(misses))

    def _outcome(
        self, chosen: str, answers: Mapping[str, _Answer], shown: Sequence[str], local: Sequence[LocalPlans],
        said: tuple[str, ...],
    ) -> PlanOutcome:  # fmt: skip
        proposal, evaluation = answers[chosen].ranked[0]
        (site_plan, site), (_, device) = (answers[name].alternative(name) for name in _COMPARED)
        options, compared = self._options, self._ranking.only_to_compare(proposal.plan)
        joined = join_groups(
            self._profile, self._job, options.constraints, local,
            inner_steps=options.outer_every, allowed=options.allow_outer,
        )  # fmt: skip
        taken = joined if joined is not None and self._is_better(joined.outer, evaluation) else None
        reasons = self._reasons(chosen, answers[chosen], None if taken is None else taken.outer, local)
        reasons = (*((f"This plan is for comparison: {compared}.",) if compared else ()), *reasons)
        plan, samples_per_s = replace(proposal.plan, strategy=chosen), evaluation.samples_per_s
        if taken is not None:
            chosen, samples_per_s = "outer", taken.outer.samples_per_s
            # What is shown first is the plan of the group that does most samples in a step.
            plan, evaluation = max(taken.plans.values(), key=lambda entry: entry[0].global_batch)
            plan = replace(plan, strategy=chosen, outer=taken.outer)
        bound = Relaxation(self._request, offloads=proposal.plan.stages[0].offloads).bound()
        reasons += () if taken else (sentences.bounded(plan, evaluation, bound, len(self._request.devices)),)
        reasons += sentences.verdict(self._job.global_batch / samples_per_s, (site, device))
        reasons += over_time(plan, self._profile, self._job.optimizer) + said
        return PlanOutcome(
            plan=plan,
            chosen=chosen,
            strategies={name: answers[name].figures for name in shown},
            search_s=time.perf_counter() - self._started_s,
            step_s_predicted=evaluation.step_s,
            samples_per_s_predicted=samples_per_s,
            bound=bound,
            peak_bytes=evaluation.peak_bytes,
            links=self._evaluator.link_loads(plan),
            best_single_device=device,
            best_single_site=site,
            report=PlanReport(prediction=prediction_of(evaluation), alternatives=(device, site), reasons=reasons),
            outer=None if joined is None else joined.outer,
            single_site_plan=site_plan,
            outer_plans={
                name: (local_plan, PlanReport(prediction=prediction_of(figures)))
                for name, (local_plan, figures) in (taken.plans if taken is not None else {}).items()
            },
        )

    def _reasons(
        self, name: str, answer: _Answer, outer: OuterPlan | None, local: Sequence[LocalPlans]
    ) -> tuple[str, ...]:
        """Return why the answer, or the outer optimizer, is taken, and what each way over slow boundaries comes to."""
        proposal, evaluation = answer.ranked[0]
        constraints, objective, every = self._options.constraints, self._options.objective, self._options.outer_every
        groups = [entry.group for entry in local]
        seen = [
            entry
            for entry in self._evaluator.seen()
            if not self._ranking.broken(*entry) and not self._ranking.only_to_compare(entry[0])
        ]
        if outer is not None:
            why = sentences.outer_groups(groups, outer, name, evaluation.samples_per_s)
        else:
            why = (
                *sentences.choices([(entry.plan, figures) for entry, figures in answer.ranked], objective),
                *proposal.reasons,
                *sentences.sites_in_and_out(proposal, evaluation, seen, objective, constraints.keep),
            )
        group_of = {device: group.name for group in groups for device in group.devices}
        used = {group_of[name] for name in proposal.plan.devices if name in group_of}
        told = [entry.group for entry in local if entry.plans or entry.group.name in used or len(local) <= _TOLD]
        rates, ways = pair_rates(self._profile, self._job, local, every), slow_boundaries(self._profile, told[:_TOLD])
        return (
            *([f"Left out as asked: {', '.join(constraints.leave_out)}."] if constraints.leave_out else []),
            *why,
            *sentences.boundaries((proposal.plan, evaluation), seen, ways, group_of, rates, every, outer),
        )

    def _is_better(self, outer: OuterPlan, evaluation: Evaluation) -> bool:
        """Whether the outer optimizer is chosen: only where it may be, and by samples per second only."""
        may_be = outer.allowed and not outer.reason and self._options.objective is Objective.THROUGHPUT
        return may_be and outer.samples_per_s > evaluation.samples_per_s

"""The clusters and lines of Di-PS's experiments, at full size or scaled down with their ratios kept.

Full size: LLaMA 3.2 1B (1.24 billion parameters in float32, 16 blocks), 32,768 tokens a step, H = 64. How long a step
takes the paper does not say; here it is what an H800 takes for the operations at two fifths of its peak, 0.62 s. Three
clusters have lines of 10 Gbit/s, the fourth's is varied from 1 to 10 (5.1). Parameter servers are on four machines with
a line of 10 Gbit/s each.
"""

from dataclasses import dataclass

from spantrain.outer.policy.settings import OuterSettings
from spantrain_studies.outer.case import MemberLine, OuterCase, SimulatedCluster, SimulatedShard, equal_layers

MODEL_BYTES, BLOCKS, TOKENS_PER_STEP, INNER_STEPS = 4 * 1_240_000_000, 16, 32_768, 64
STEP_S = 6 * MODEL_BYTES / 4 * TOKENS_PER_STEP / (0.4 * 989e12)
GBIT = 1e9 / 8
FAST_LINE_GBIT, LATENCY_S = 10.0, 0.02
BANDWIDTHS_GBIT = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
SPEEDS: dict[str, tuple[float, ...]] = {
    "delays 0, 16, 33, 50 %": (1.0, 1.16, 1.33, 1.5),
    "one 5.2 times as slow": (1.0, 1.0, 1.0, 5.2),
}
"""What a step of each cluster takes, times `STEP_S`."""
SCALING_SPEEDS = (1.0, 0.6, 0.5, 0.2, 0.6 / 5.23, 0.1, 0.058)
"""Of 5.2's seven clusters, in this order: 2 A100, 4 RTX 3090, 1 A100, 8 RTX 2080 Ti, 8 RTX 2080, 4 RTX 2080 Ti,
4 RTX 2080. The paper tells the order, and that four of them are up to 5.23 apart; the rest is made up."""
SCALING_LINES_GBIT = (5.0, *(10.0,) * 6)
SHARDS = 4


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much smaller a live run is: bytes, seconds; bandwidths follow."""

    bytes_part: float = 1.0
    seconds_part: float = 1.0

    @property
    def bandwidth_part(self) -> float:
        """Of lines: so that a model takes as many steps to send as at full size."""
        return self.bytes_part / self.seconds_part


def case_of(
    step_parts: tuple[float, ...], lines_gbit: tuple[float, ...], *, steps: int | None = None,
    seconds: float | None = None, scale: Scale | None = None,
) -> OuterCase:  # fmt: skip
    """Return clusters with these steps and lines."""
    scale = scale or Scale()
    step_s = STEP_S * scale.seconds_part
    latency_s = LATENCY_S / 2 * scale.seconds_part
    lines = [
        MemberLine(bandwidth_bytes_per_s=gbit * GBIT * scale.bandwidth_part, latency_s=latency_s) for gbit in lines_gbit
    ]
    server = MemberLine(bandwidth_bytes_per_s=FAST_LINE_GBIT * GBIT * scale.bandwidth_part, latency_s=latency_s)
    clusters = [
        SimulatedCluster(name=f"c{k}", step_s=step_s * part, line=line)
        for k, (part, line) in enumerate(zip(step_parts, lines, strict=True))
    ]
    return OuterCase(
        clusters=tuple(clusters),
        shards=tuple(
            SimulatedShard(name=f"s{k}", line=server, command_s=0.5 * scale.seconds_part) for k in range(SHARDS)
        ),
        layers=equal_layers(BLOCKS, round(MODEL_BYTES * scale.bytes_part)),
        inner_steps=INNER_STEPS,
        tokens_per_step=TOKENS_PER_STEP,
        steps=steps,
        seconds=seconds,
        settings=OuterSettings(
            grace_s=3.0 * scale.seconds_part, lost_after_s=60.0 * scale.seconds_part, transfer_limit_s=600.0
        ),
        copy_s=0.02 * scale.seconds_part,
    )

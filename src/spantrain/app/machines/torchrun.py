"""Machines under torchrun: each of its processes knows its own, so one of each tells rank 0 through torchrun's store.

The store has no authentication: what comes out of it is read like any answer from elsewhere, within bounds.
"""

import datetime
import os
import sys

from spantrain.app.machines.describe import FoundMachine
from spantrain.app.machines.init import InitOutcome, described_cluster
from spantrain.app.reporter import Reporter
from spantrain.errors import PeerLostError, UsageError
from spantrain.reach.allocations import named_machines
from spantrain.reach.facts import program, read_facts
from spantrain.reach.machines import MAX_ANSWER_BYTES, run_python, this_machine
from spantrain.runtime.launch.environment import Environment

_PROBE_S, _GATHER_S = 60.0, 120.0


def gathered_cluster(*, name: str, reporter: Reporter) -> InitOutcome | None:
    """Tell of this machine; rank 0 returns the cluster of all, in the order of ranks, the others None.

    Nothing is measured between machines: the processes come and go together, and their ports are torchrun's.

    Raises:
        UsageError: this is not under torchrun.
        PeerLostError: the others are not heard of.
    """
    environment = Environment.read(os.environ)
    launch = environment.launch
    if launch is None or launch.local_rank is None:
        raise UsageError(
            "--torchrun: RANK or LOCAL_RANK is not set; run it as `torchrun ... --no-python spantrain init --torchrun`"
        )
    from torch.distributed import DistError, TCPStore

    here = this_machine("here")
    said = run_python(here, program("probe"), timeout_s=_PROBE_S).strip() if launch.local_rank == 0 else ""
    try:
        store = TCPStore(
            launch.master_address,
            launch.master_port,
            launch.world_size,
            is_master=launch.rank == 0 and not environment.agent_has_store,
            timeout=datetime.timedelta(seconds=_GATHER_S),
        )
        keys = [f"spantrain-init/{rank}" for rank in range(launch.world_size)]
        store.set(keys[launch.rank], said)
        if launch.rank != 0:
            return None
        store.wait(keys)
        texts = [store.get(key)[:MAX_ANSWER_BYTES].decode(errors="replace") for key in keys]
    except (DistError, RuntimeError, OSError) as error:
        raise PeerLostError(f"torchrun's store at {launch.master_address}: {str(error)[:300]}") from None
    facts = [read_facts(text, f"answer of rank {rank}") for rank, text in enumerate(texts) if text]
    machines = named_machines((one.hostname for one in facts), "ssh", python=sys.executable)
    found = [FoundMachine(machine=machine, facts=one) for machine, one in zip(machines, facts, strict=True)]
    return described_cluster(found, name=name, measure=False, reporter=reporter)

"""How the stages of a pipeline are connected to the master and the shards, each under a name of its own."""

from collections.abc import Mapping
from contextlib import ExitStack

from spantrain.core.outer.layers import Layer
from spantrain.core.outer.stages import OuterCluster
from spantrain.outer.client.connect import NetworkConnector
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.link.link import MasterLink, MemberFacts
from spantrain.outer.pipeline.leader import LeaderSession, StageLeader
from spantrain.outer.pipeline.worker import StageWorker
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.layers.transport import LayerWire


def worker_name(cluster: str, stage: int) -> str:
    """Return the name of a stage that does not lead.

    >>> worker_name("a", 2)
    'a/w2'
    """
    return f"{cluster}/w{stage}"


def lead_stages(
    cluster: OuterCluster, layers: tuple[Layer, ...], copy: ClusterCopy, *, own: tuple[int, ...],
    others: Mapping[str, tuple[str, tuple[int, ...]]],
) -> StageLeader:  # fmt: skip
    """Return the leader of a cluster; it joins when all others have.

    Args:
        cluster: where to join, and as whom
        layers: of the whole model
        copy: of this stage's parameters
        own: the layers that it moves
        others: worker's name and layers of the other stages, by device

    Raises:
        UsageError: address, token or name are none.
    """
    connector = NetworkConnector(master=cluster.master, token=cluster.token, encrypted=cluster.encrypted)
    workers = {device: name for device, (name, _) in others.items()}
    with ExitStack() as undo:
        session = LeaderSession(cluster.cluster, layers, workers={cluster.cluster: own, **dict(others.values())})
        undo.callback(session.close)
        session.connect(*connector.connect(session, cluster.cluster, layers))
        undo.pop_all()
    return StageLeader(session, copy, workers, inner_steps=cluster.inner_steps, start=connector.start)


def work_as_stage(
    cluster: OuterCluster, layers: tuple[Layer, ...], copy: ClusterCopy, *, name: str, own: tuple[int, ...]
) -> StageWorker:
    """Return a stage that does not lead; it joins at once, for ever."""
    keypair = KeyPair.generate() if cluster.encrypted else None
    with ExitStack() as undo:
        worker = StageWorker(name, layers, own, copy)
        undo.callback(worker.close)
        wire = LayerWire(name=name, bind="", keypair=keypair, listener=worker)
        facts = MemberFacts(kind="worker", public_key=wire.public_key)
        link = MasterLink(address=cluster.master, token=cluster.token, member=name, facts=facts, listener=worker)
        worker.connect(link, wire)
        undo.pop_all()
    link.start()
    return worker

"""Parts of each kind of cluster, in the order in which they are made; removal is the reverse."""

from collections.abc import Iterator

from shardyard.cluster.batch.environment import Environment, Network
from shardyard.cluster.eksctl import GROUP, SYSTEM_GROUP
from shardyard.cluster.existing_resources import ExistingCluster, added_parts, all_added
from shardyard.cluster.part import ClusterPart
from shardyard.cluster.resources import (
    Claim,
    ControlPlane,
    Driver,
    EfaPlugin,
    FileSystem,
    NodeGroup,
)
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec


def parts_of(spec: ClusterSpec) -> list[ClusterPart]:
    """The parts of a cluster, in the order in which they are made."""
    return list(_parts(spec))


def _parts(spec: ClusterSpec) -> Iterator[ClusterPart]:
    if spec.kind == "batch":
        yield from _parts_of_batch(spec)
        return
    if isinstance(spec, AdoptedCluster):
        yield from added_parts(spec)
        return
    yield ControlPlane()
    yield NodeGroup(SYSTEM_GROUP)
    if spec.storage.kind == "fsx":
        yield Driver()
    if spec.storage.kind != "none":
        yield FileSystem()
        yield Claim()
    yield NodeGroup(GROUP)  # late: they bill
    if spec.has_efa:
        yield EfaPlugin()  # behind the group, with which eksctl puts its own there


def plane_of(spec: ClusterSpec) -> ClusterPart:
    """Return the control plane of all other parts, made by us or there before."""
    if isinstance(spec, AdoptedCluster):
        return ExistingCluster()
    return ControlPlane()


def every_part(spec: ClusterSpec) -> list[ClusterPart]:
    """Each part that such a cluster may ever have had, in the order in which they are made."""
    if isinstance(spec, AdoptedCluster):
        return all_added(spec)
    return [Network(), ControlPlane(), NodeGroup(SYSTEM_GROUP), Driver(), FileSystem(), Claim(),
            Environment(), NodeGroup(GROUP), EfaPlugin()]  # fmt: skip


def _parts_of_batch(spec: ClusterSpec) -> Iterator[ClusterPart]:
    if spec.vpc.id is None:
        yield Network()
    if spec.storage.kind != "none":
        yield FileSystem()
    yield Environment()  # behind what its instances mount

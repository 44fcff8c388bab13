"""The device mesh: which rank is where on each axis, as ``config/layout.py`` numbers them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardyard.config.layout import Layout, Shape, context_shape, dense_shape, expert_shape


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The meshes of one layout, seen from this rank."""

    layout: Layout
    dense: DeviceMesh
    """Axes pp, dp_replicate, fsdp (= dp_shard x cp) and tp: where most parameters live."""
    experts: DeviceMesh | None
    """Axes pp, dp_replicate, expert_shard, ep and tp (expert_shard x ep = fsdp); for ep above 1."""
    context: DeviceMesh | None
    """Axes others, cp and tp; for cp above 1."""

    @property
    def data_rank(self) -> int:
        """Share of the samples that this rank reads, of ``layout.data_ranks``."""
        replica = self.dense.get_local_rank("dp_replicate")
        return replica * self.layout.dp_shard + self._fsdp_rank // self.layout.cp

    @property
    def stage_rank(self) -> int:
        """Place along pp; rank 0 has the embedding."""
        return self.dense.get_local_rank("pp")

    @property
    def context_rank(self) -> int:
        """Place along cp."""
        return self._fsdp_rank % self.layout.cp

    @property
    def tensor_rank(self) -> int:
        """Place along tp."""
        return self.dense.get_local_rank("tp")

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this is the one of all ranks that read the same samples that counts them."""
        return self.stage_rank == self.context_rank == self.tensor_rank == 0

    @property
    def _fsdp_rank(self) -> int:
        return self.dense.get_local_rank("fsdp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group along an axis; cp and ep have one where they are above 1."""
        mesh = {"cp": self.context, "ep": self.experts}.get(axis, self.dense)
        assert mesh is not None, f"{axis} is not split"
        return mesh.get_group(axis)

    def sharding(self, *, of_experts: bool = False) -> DeviceMesh:
        """Return the mesh that ``fully_shard`` splits over: one axis, or replicas x shards."""
        mesh, shards = self.dense, "fsdp"
        if of_experts and self.experts is not None:
            mesh, shards = self.experts, "expert_shard"
        # a second axis would cost an all-reduce over one rank
        return mesh[shards] if self.layout.dp_replicate == 1 else mesh["dp_replicate", shards]


def names_on_all_stages(names: Iterable[str], mesh: Mesh) -> set[str]:
    """Names that the ranks of a pipeline have, together. All ranks call it."""
    if mesh.layout.pp == 1:
        return set(names)
    by_stage: list[list[str]] = [[] for _ in range(mesh.layout.pp)]
    dist.all_gather_object(by_stage, list(names), group=mesh.group("pp"))
    return {name for found in by_stage for name in found}


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The meshes of a layout. All ranks call it together."""
    dense = _mesh(device_type, dense_shape(layout))
    experts = context = None
    if layout.ep > 1:
        experts = _mesh(device_type, expert_shape(layout))
    if layout.cp > 1:
        shape = context_shape(layout)
        ranks = torch.arange(layout.world_size).view(*shape.values())
        context = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(shape))
    return Mesh(layout=layout, dense=dense, experts=experts, context=context)


def _mesh(device_type: str, shape: Shape) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))

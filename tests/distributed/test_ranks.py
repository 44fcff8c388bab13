"""The ranks that a plan prints are those of the meshes that training builds."""

import torch.distributed as dist

from shardyard.config.layout import Layout
from shardyard.parallel.mesh import Mesh, build_mesh
from shardyard.planner.ranks import RankPlacement
from tests.distributed.ranks import run_on_ranks

LAYOUTS = {
    "shards": Layout(dp_replicate=1, dp_shard=4, zero=3),
    "hybrid": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "shards and tp": Layout(dp_replicate=1, dp_shard=2, tp=2, zero=3),
    "replicas and tp": Layout(dp_replicate=2, dp_shard=1, tp=2, zero=1),
    "stages and tp": Layout(dp_replicate=1, dp_shard=1, tp=2, pp=2, zero=3),
    "stages and shards": Layout(dp_replicate=1, dp_shard=2, pp=2, zero=3),
    "shards and cp": Layout(dp_replicate=1, dp_shard=2, cp=2, zero=3),
    "cp and tp": Layout(dp_replicate=1, dp_shard=1, cp=2, tp=2, zero=3),
    "experts": Layout(dp_replicate=1, dp_shard=4, ep=2, zero=3),
    "experts and cp": Layout(dp_replicate=1, dp_shard=2, cp=2, ep=4, zero=3),
}
_OF_MESH = {"dp_shard": "fsdp", "dp_shard x cp": "fsdp"}


def _groups_of_training(layout: Layout) -> dict[str, list[int]]:
    """Axis -> the ranks of this rank's group, as the meshes have them."""
    mesh = build_mesh(layout, "cpu")
    names = [axis.name for axis in RankPlacement(layout=layout, devices_per_node=4).axes]
    return {name: _ranks(mesh, _OF_MESH.get(name, name)) for name in names}


def _ranks(mesh: Mesh, name: str) -> list[int]:
    if name == "expert_shard":
        assert mesh.experts is not None
        return dist.get_process_group_ranks(mesh.experts.get_group(name))
    return dist.get_process_group_ranks(mesh.group(name))


def _all_groups() -> dict[str, dict[str, list[int]]]:
    return {name: _groups_of_training(layout) for name, layout in LAYOUTS.items()}


def test_the_printed_groups_are_the_process_groups_of_training() -> None:
    found = run_on_ranks(_all_groups, 4)
    for name, layout in LAYOUTS.items():
        axes = RankPlacement(layout=layout, devices_per_node=4).axes
        assert axes, name
        for rank in range(4):
            told = {axis.name: list(axis.ranks(axis.group(rank))) for axis in axes}
            assert found[rank][name] == told, f"{name}, rank {rank}"
            for axis in axes:
                assert found[rank][name][axis.name][axis.coordinate(rank)] == rank

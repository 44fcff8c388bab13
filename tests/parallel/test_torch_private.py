"""Parts of torch that differ between its versions: what we use is there, or refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardyard.errors import RequestError
from shardyard.parallel.torch_private import placed_over

IS_OLD = torch.__version__ < "2.12"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two replicas of two shards, seen from rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "expert_shard"))
    dist.destroy_process_group()


@pytest.mark.skipif(not IS_OLD, reason="this torch can split experts over ranks of their own")
def test_an_old_torch_refuses_experts_over_other_ranks_than_their_block(mesh: DeviceMesh) -> None:
    with pytest.raises(RequestError) as refused:
        placed_over(mesh)
    message = str(refused.value)
    assert message.startswith("parallel.ep above 1 needs torch 2.12 or newer, and this is 2.11.0")
    assert message.endswith("Install a newer torch, or set parallel.ep=1.")


@pytest.mark.skipif(IS_OLD, reason="this torch has one mesh for all parameters of a group")
def test_a_newer_torch_is_told_where_experts_are(mesh: DeviceMesh) -> None:
    placed = placed_over(mesh)(Shard(1))
    assert placed.placement == Shard(1)
    assert (placed.mesh_info.shard_mesh_dim, placed.mesh_info.replicate_mesh_dim) == (1, 0)
    assert placed_over(mesh["expert_shard"])(None).mesh_info.mesh.size() == 2

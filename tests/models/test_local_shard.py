"""Where parts lie that two axes cut out of one dimension, and that checkpoints agree."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardyard.checkpoint.load import load_tensors
from shardyard.checkpoint.save import Saver
from shardyard.models.local_shard import local_shard
from shardyard.parallel.tensor import share_of
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

WIDTH = 3


def _table(rows: int, *, shards: int, tp: int) -> Tensor:
    """A table whose elements are their indices, split over tp and then sharded."""
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("fsdp", "tp"))
    module = nn.Embedding(rows, WIDTH, device="meta")
    if tp > 1:
        module.weight = share_of(nn.Parameter(module.weight), mesh["tp"], [Shard(0)])
    fully_shard(module, mesh=mesh["fsdp"])
    module.to_empty(device="cpu")
    shard = local_shard(module.weight)
    shard.tensor.copy_(shard.linear_index())
    return module.weight.detach()


def _saver(folder: Path) -> Saver:
    group = dist.group.WORLD
    assert group is not None
    return Saver(
        folder, group=group, rank=dist.get_rank(), world_size=dist.get_world_size(),
        keep_last=1,
    )  # fmt: skip


def _parts(rows: int, folder: Path) -> list[list[float]]:
    """Save the table of 4 x 2 ranks, load it into one of 2 x 4; this rank's part of each."""
    table = _table(rows, shards=4, tp=2)
    saver = _saver(folder)
    saver.save(1, {"model.table": table}, {})
    saver.wait()
    other = _table(rows, shards=2, tp=4)
    expected = local_shard(other).tensor.clone()
    local_shard(other).tensor.zero_()
    load_tensors(folder / "step-00000001", {"model.table": other})
    assert torch.equal(local_shard(other).tensor, expected)
    saver.close()
    return local_shard(table).tensor.tolist()


@pytest.mark.parametrize("rows", [64, 257, 514])
def test_parts_of_two_axes_make_the_whole(rows: int, tmp_path: Path) -> None:
    # torch's own arithmetic lets parts overlap where 2 does not divide the rows
    by_rank = run_on_ranks(_parts, 8, rows, tmp_path)
    held = [row for tp in range(2) for shard in range(4) for row in by_rank[2 * shard + tp]]
    assert held == torch.arange(rows * WIDTH).view(rows, WIDTH).tolist()

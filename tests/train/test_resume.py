"""A run continues from its newest state, in memory or on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.config.schema.recipe import Cluster, Elastic, Recipe
from shardyard.train.resume import find_saved
from tests.checkpoint.conftest import alone
from tests.checkpoint.kept_memory import FolderMemory

__all__ = ["alone"]

RECIPE = Recipe(cluster=Cluster(devices=1), elastic=Elastic(snapshot_every=1))


@pytest.mark.parametrize(
    ("snapshot", "checkpoints", "damaged", "expected"),
    [
        (3, [2], None, ("snapshot_restored", 3)),
        (2, [2], None, ("snapshot_restored", 2)),  # no file has to be read
        (2, [1, 3], None, ("checkpoint_loaded", 3)),
        (2, [1, 3], 3, ("snapshot_restored", 2)),
        (1, [2, 3], 3, ("checkpoint_loaded", 2)),
    ],
)
def test_the_newest_sound_state_is_taken_up(
    snapshot: int,
    checkpoints: list[int],
    damaged: int | None,
    expected: tuple[str, int],
    tmp_path: Path,
    alone: dist.ProcessGroup,
) -> None:
    def values(step: int) -> dict[str, Any]:
        return {"progress": {"step": step}, "fingerprint": {}}

    state, folder = {"model.w": torch.ones(3)}, tmp_path / "checkpoints"
    folder.mkdir()
    saver = Saver(folder, group=alone, rank=0, world_size=1, keep_last=9)
    for step in checkpoints:
        saver.save(step, state, values(step))
    saver.close()
    if damaged is not None:
        (folder / f"step-{damaged:08d}" / "rank-00000.safetensors").write_bytes(b"")
    memory = FolderMemory(tmp_path)
    snapshots = Snapshots(
        state, memory, local_rank=0, rank=0, world_size=1, generation=0, names=1, restored=None,
        interval=Interval(1),
    )  # fmt: skip
    snapshots.take(snapshot, state, values(snapshot))
    snapshots.close()
    found = find_saved(folder, memory, RECIPE, group=alone)
    assert found is not None and (found.event, found.progress.step) == expected

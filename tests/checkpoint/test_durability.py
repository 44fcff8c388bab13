"""What is on disk before a name is given: the order of flushes and renames of one save.

Killing a process cannot show it: what it wrote stays in the kernel's cache. Only a machine that
loses power would, so the calls themselves are recorded.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.checkpoint.save import Saver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what was flushed")

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(call, path below the run's folder) of all flushes, renames and new folders."""
    found: Calls = []
    real: dict[str, Callable[..., Any]] = {
        name: getattr(os, name) for name in ("fsync", "rename", "replace", "mkdir")
    }

    def below(path: Any) -> str:
        return os.path.relpath(path, tmp_path)

    def fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        found.append(("fsync", below(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def recorded(name: str) -> Callable[..., None]:
        def call(path: Any, *more: Any, **options: Any) -> None:
            real[name](path, *more, **options)
            is_move = name in ("rename", "replace")
            found.append((name, below(more[0] if is_move else path)))

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace", "mkdir"):
        monkeypatch.setattr(os, name, recorded(name))
    return found


def save(folder: Path, group: dist.ProcessGroup, *steps: int) -> None:
    saver = Saver(folder, group=group, rank=0, world_size=1, keep_last=1)
    for step in steps:
        saver.save(step, {"model.w": torch.ones(3)}, {}, is_best=True)
    saver.wait()
    saver.close()


def test_a_checkpoint_gets_its_name_after_all_of_it_is_on_disk(
    tmp_path: Path, alone: dist.ProcessGroup, calls: Calls
) -> None:
    save(tmp_path / "checkpoints", alone, 5)
    scratch, folder = "checkpoints/step-00000005.tmp", "checkpoints/step-00000005"
    order = [call for call in calls if ".latest" not in call[1] and ".best" not in call[1]]
    assert order == [
        ("mkdir", "checkpoints"),
        ("fsync", "."),
        ("mkdir", scratch),
        ("fsync", f"{scratch}/rank-00000.safetensors"),
        ("fsync", f"{scratch}/values.json"),
        ("fsync", f"{scratch}/manifest.json"),
        ("fsync", scratch),
        ("rename", folder),
        ("fsync", "checkpoints"),  # the name is on disk
        ("replace", "checkpoints/latest"),  # and only now is it pointed at
        ("fsync", "checkpoints"),
        ("replace", "checkpoints/best"),
        ("fsync", "checkpoints"),
    ]
    pointers = [call for call in calls if ".latest" in call[1] or "/latest" in call[1]]
    assert [call for call, _ in pointers] == ["fsync", "replace"], "flushed before it is named"


def test_an_old_checkpoint_is_removed_only_after_the_new_one_is_pointed_at(
    tmp_path: Path, alone: dist.ProcessGroup, calls: Calls
) -> None:
    save(tmp_path / "checkpoints", alone, 5, 6)
    pointed = [i for i, call in enumerate(calls) if call == ("replace", "checkpoints/latest")]
    removed = calls.index(("rename", "checkpoints/step-00000005.removed.tmp"))
    assert removed > pointed[1]

"""A save runs beside training and is whole or not there, however it ends."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from shardyard.checkpoint.load import find_sound, load_tensors, read_values
from shardyard.checkpoint.save import Abandoned, Durable, Saver
from shardyard.checkpoint.verify import verify_manifest
from shardyard.errors import CheckpointError, StorageError
from tests.distributed.ranks import run_on_ranks

Play = Callable[..., None]


@pytest.fixture
def saver(tmp_path: Path, alone: dist.ProcessGroup) -> Iterator[Saver]:
    saver = Saver(tmp_path, group=alone, rank=0, world_size=1, keep_last=2)
    yield saver
    saver.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_state_is_the_one_of_the_call(saver: Saver, tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    blocked_s = saver.save(4, {"model.w": weight}, {"step": 4})
    weight.zero_()  # training goes on
    saver.wait()
    (durable,) = saver.poll()
    assert isinstance(durable, Durable) and durable.step == 4
    assert durable.seconds >= blocked_s >= 0
    folder = tmp_path / "step-00000004"
    assert durable.bytes == sum(path.stat().st_size for path in folder.iterdir()) - (
        (folder / "manifest.json").stat().st_size
    )
    loaded = {"model.w": torch.zeros(2, 3)}
    load_tensors(folder, loaded)
    assert loaded["model.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read_values(folder) == {"step": 4}
    assert saver.poll() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_kind_of_tensor_comes_back(saver: Saver, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "column": torch.arange(12).reshape(3, 4).to(dtype).t()[1:],  # not contiguous
        "step": torch.tensor(7.0),
    }
    saver.save(1, tensors, {})
    saver.wait()
    loaded = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    load_tensors(tmp_path / "step-00000001", loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_the_files_are_those_of_the_library_formats(saver: Saver, tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    saver.save(1, {"model.w": weight}, {})
    saver.wait()
    folder = tmp_path / "step-00000001"
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("model.w"), weight)
    loaded = {"model.w": torch.zeros(5, 3)}
    dcp_load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert torch.equal(loaded["model.w"], weight)


def test_saves_follow_each_other_and_old_ones_go(saver: Saver, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saver.save(step, {"model.w": torch.full((3,), float(step))}, {}, is_best=step == 1)
    saver.wait()
    assert [durable.step for durable in saver.poll()] == [1, 2, 3, 4]
    assert names(tmp_path) == [
        "best", "latest", "step-00000001", "step-00000003", "step-00000004",
    ]  # fmt: skip
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    assert (tmp_path / "best").read_text() == "step-00000001\n"


def test_the_state_may_change_its_shape_between_saves(saver: Saver, tmp_path: Path) -> None:
    saver.save(1, {"model.w": torch.ones(3)}, {})
    saver.save(2, {"model.w": torch.ones(3), "optim.exp_avg.w": torch.ones(3)}, {})
    saver.wait()
    loaded = {"model.w": torch.zeros(3), "optim.exp_avg.w": torch.zeros(3)}
    load_tensors(tmp_path / "step-00000002", loaded)
    assert loaded["optim.exp_avg.w"].tolist() == [1, 1, 1]


def test_a_step_reached_again_replaces_the_older_one(saver: Saver, tmp_path: Path) -> None:
    saver.save(1, {"model.w": torch.zeros(3)}, {})
    saver.save(2, {"model.w": torch.zeros(3)}, {}, is_best=True)
    (tmp_path / "step-00000002.tmp").mkdir(exist_ok=True)
    saver.save(2, {"model.w": torch.ones(3)}, {"second": True})
    saver.wait()
    loaded = {"model.w": torch.zeros(3)}
    load_tensors(tmp_path / "step-00000002", loaded)
    assert loaded["model.w"].tolist() == [1, 1, 1]
    assert names(tmp_path) == ["best", "latest", "step-00000001", "step-00000002"]


def test_a_scratch_folder_of_a_killed_save_is_replaced(saver: Saver, tmp_path: Path) -> None:
    leftover = tmp_path / "step-00000001.tmp"
    leftover.mkdir()
    (leftover / "rank-00009.safetensors").write_bytes(b"torn")
    saver.save(1, {"model.w": torch.zeros(3)}, {})
    saver.wait()
    assert verify_manifest(tmp_path / "step-00000001") == []
    assert names(tmp_path / "step-00000001") == [
        "manifest.json", "rank-00000.safetensors", "values.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["model.w", "optim.exp_avg.w"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_state_that_is_not_finite_is_named_and_leaves_no_trace(
    saver: Saver, tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    broken = torch.zeros(7, 3)
    broken[6, 2] = value
    saver.save(1, {name: torch.zeros(7, 3)}, {})
    saver.save(2, {name: broken.to(dtype), "model.sound": torch.ones(2)}, {})
    saver.save(3, {name: torch.ones(7, 3)}, {})  # the saver goes on
    saver.wait()
    held = "NaN" if value != value else "an infinity"
    reports = saver.poll()
    assert reports[1] == Abandoned(2, f"rank 0: {name} holds {held}")
    assert [report.step for report in reports] == [1, 2, 3]
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]


def test_a_buffer_may_hold_infinities_but_no_nan(saver: Saver) -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)
    saver.save(1, {"buffer.mask": mask, "buffer.seen": torch.tensor(7)}, {})
    saver.save(2, {"buffer.mask": mask * 0}, {})
    saver.wait()
    assert saver.poll()[1] == Abandoned(2, "rank 0: buffer.mask holds NaN")


def test_a_save_that_keeps_what_is_older_removes_nothing(saver: Saver, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saver.save(step, {"model.w": torch.zeros(3)}, {}, keep_older=step == 3)
    saver.wait()
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


def test_a_dtype_that_cannot_be_stored_is_refused_by_name(saver: Saver) -> None:
    with pytest.raises(CheckpointError, match=r"tensor model\.c has dtype torch\.complex64.*one"):
        saver.save(1, {"model.c": torch.zeros(2, dtype=torch.complex64)}, {})


def test_an_unwritable_place_is_told_with_what_to_do(
    tmp_path: Path, alone: dist.ProcessGroup
) -> None:
    (tmp_path / "file").write_text("")
    saver = Saver(tmp_path / "file" / "x", group=alone, rank=0, world_size=1, keep_last=2)
    saver.save(1, {"model.w": torch.zeros(3)}, {})
    with pytest.raises(
        StorageError, match=r"Not a directory.*has not saved a checkpoint yet; resume"
    ):
        saver.wait()
    saver.close()


@pytest.mark.heavy
def test_training_collectives_beside_a_save_neither_hang_nor_change_it(trained: Path) -> None:
    for rank in (0, 1):
        assert json.loads((trained / f"reports-{rank}.json").read_text()) == [1, 2]
    for step in (1, 2):
        assert verify_manifest(trained / "checkpoints" / f"step-{step:08d}") == []


@pytest.mark.heavy
def test_after_a_kill_at_any_moment_latest_names_a_sound_checkpoint(
    play: Play, tmp_path: Path
) -> None:
    play("save_until_killed", tmp_path, world_size=1)
    kills = [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()]
    assert len(kills) == 8
    for number, kill in enumerate(kills):
        folder = tmp_path / f"checkpoints-{number}"
        assert verify_manifest(folder / kill["latest"]) == [], kill
        found = find_sound(folder)
        assert found is not None and found.damaged == (), kill
    # the kills were not all between saves: some left a half written folder
    assert any(name.endswith(".tmp") for kill in kills for name in kill["names"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.heavy
def test_a_full_disk_stops_all_ranks_at_one_step_and_leaves_the_earlier_checkpoint(
    play: Play, small_disk: Path, tmp_path: Path
) -> None:
    play("fill_the_disk", small_disk, str(tmp_path), world_size=2)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    message = told[0]["message"]
    # both write at once: either may be the one that finds no room
    who = r"step-00000002 cannot be saved: rank [01] got 'No space left on device'"
    assert re.search(who, message)
    assert "A checkpoint needs about 4.0 MiB in addition to those kept" in message
    assert "checkpoint.keep_last" in message
    assert "The checkpoint of step 1 is intact; resume the run" in message
    assert told[0]["left"] == ["latest", "step-00000001"]
    assert told[0]["after"] == [3]


def _save_copies_of_which_one_is_broken(folder: Path) -> list[str]:
    """As NO_SHARD has them: every rank holds all of it, and one of them writes it."""
    saver = Saver(
        folder,
        group=dist.new_group(backend="gloo"),
        rank=dist.get_rank(),
        world_size=2,
        keep_last=1,
    )
    reports = []
    for step in (1, 2):
        copies = {"model.w": torch.ones(3), "optim.exp_avg_sq.w": torch.ones(3)}
        if dist.get_rank() == step - 1:
            copies["optim.exp_avg_sq.w"][1] = torch.inf  # its updates would be 0, and no loss NaN
        saver.save(step, copies, {})
        saver.wait()
        reports += saver.poll()
    saver.close()
    return [report.reason for report in reports if isinstance(report, Abandoned)]


@pytest.mark.heavy
def test_a_copy_that_is_not_finite_is_found_though_another_rank_writes(tmp_path: Path) -> None:
    told = run_on_ranks(_save_copies_of_which_one_is_broken, 2, tmp_path)
    reasons = [f"rank {rank}: optim.exp_avg_sq.w holds an infinity" for rank in (0, 1)]
    assert told == [reasons, reasons]
    assert names(tmp_path) == []

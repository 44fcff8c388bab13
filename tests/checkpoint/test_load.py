"""Any checkpoint loads into any layout; a damaged or foreign one is named and never loaded."""

import errno
import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardyard.checkpoint.load import (
    SelectedCheckpoint,
    TensorsOnlyPlanner,
    find_sound,
    load_tensors,
    read_shapes,
    read_values,
    select_sound_checkpoint,
)
from shardyard.checkpoint.retention import mark_latest
from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.verify import FORMAT, verify_manifest
from shardyard.errors import CheckpointError, StorageError
from tests.mounts import mounted, needs_root

Play = Callable[..., None]


def save(folder: Path, group: dist.ProcessGroup, *steps: int) -> None:
    saver = Saver(folder, group=group, rank=0, world_size=1, keep_last=9)
    for step in steps:
        saver.save(step, {"model.w": torch.full((4, 2), float(step))}, {"step": step})
    saver.wait()
    saver.close()


def choose_alone(folder: Path, group: dist.ProcessGroup) -> SelectedCheckpoint | None:
    return select_sound_checkpoint(folder, group=group, rank=0, world_size=1, timeout_s=5)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def steps(tmp_path: Path, alone: dist.ProcessGroup) -> Path:
    """A folder with the checkpoints of steps 1, 2 and 3."""
    save(tmp_path, alone, 1, 2, 3)
    return tmp_path


@pytest.mark.heavy
def test_two_ranks_save_four_load_and_save_and_one_loads_equal_bytes(
    play: Play, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    play("reshard", tmp_path / "run", world_size=4)  # compares all tensors in three layouts
    wanted = np.load(trained / "state.npz")
    for step in (2, 3):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        loaded = {
            name: torch.full(shape, torch.nan) for name, (shape, _) in read_shapes(folder).items()
        }
        load_tensors(folder, loaded)
        assert set(loaded) == set(wanted.files)
        assert any(name.startswith("optim.exp_avg_sq.") for name in loaded)
        for name, tensor in loaded.items():
            assert tensor.numpy().tobytes() == wanted[name].tobytes(), name


def test_without_a_checkpoint_there_is_nothing_to_choose(
    tmp_path: Path, alone: dist.ProcessGroup
) -> None:
    assert choose_alone(tmp_path / "checkpoints", alone) is None


def test_the_newest_is_chosen_even_if_latest_lags_behind(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    mark_latest(steps, 2)  # killed between the folder's name and the pointer
    chosen = choose_alone(steps, alone)
    assert chosen is not None
    assert (chosen.step, chosen.damaged) == (3, ())
    assert (steps / "latest").read_text() == "step-00000003\n"


def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    flip_a_byte(steps / "step-00000003" / "rank-00000.safetensors")
    (steps / "step-00000002" / "values.json").unlink()
    chosen = choose_alone(steps, alone)
    assert chosen is not None and chosen.step == 1
    assert [damaged.step for damaged in chosen.damaged] == [3, 2]
    assert str(chosen.damaged[1]) == "step-00000002 is damaged: values.json: missing"
    assert json.loads(json.dumps(chosen.damaged))[1] == [2, ["values.json: missing"]]
    assert (steps / "latest").read_text() == "step-00000001\n"
    assert (steps / "step-00000003.damaged").is_dir()
    again = choose_alone(steps, alone)
    assert again is not None and (again.step, again.damaged) == (1, ())


def test_a_damaged_one_that_cannot_be_set_aside_stops_the_resume(
    steps: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (steps / "step-00000003" / "values.json").unlink()

    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("shardyard.checkpoint.retention.Path.rename", read_only)
    with pytest.raises(StorageError, match=r"cannot be renamed to step-00000003\.damaged.*resume"):
        choose_alone(steps, alone)


def test_values_that_are_no_json_are_an_error_with_the_next_step(steps: Path) -> None:
    (steps / "step-00000001" / "values.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"values\.json is not JSON.*use another"):
        read_values(steps / "step-00000001")


def test_looking_for_a_sound_one_changes_nothing(steps: Path) -> None:
    flip_a_byte(steps / "step-00000003" / "rank-00000.safetensors")
    found = find_sound(steps)
    assert found is not None and found.step == 2
    assert (steps / "latest").read_text() == "step-00000003\n"
    assert (steps / "step-00000003").is_dir()


def test_if_none_is_sound_all_are_named_and_none_is_touched(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    for step in (1, 2, 3):
        (steps / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no sound checkpoint") as caught:
        choose_alone(steps, alone)
    for step in (1, 2, 3):
        assert f"step-{step:08d} is damaged: manifest.json: missing" in str(caught.value)
    assert "start a new run" in str(caught.value)
    assert (steps / "step-00000003").is_dir()


@pytest.mark.heavy
def test_a_rank_that_stays_away_from_the_load_is_named_and_one_that_dies_is_noticed(
    play: Play, tmp_path: Path
) -> None:
    play("stay_away", tmp_path, world_size=2)
    told = (tmp_path / "told.txt").read_text()
    assert "rank 1 did not arrive within 2 s" in told
    assert "see its log, then resume the run" in told
    lost = (tmp_path / "lost.txt").read_text()
    assert "step-00000001 was not saved: the ranks lost contact during the save" in lost
    assert "you resume the run, it continues from the newest durable checkpoint" in lost


def test_names_and_shapes_are_compared_before_anything_is_read(steps: Path) -> None:
    folder = steps / "step-00000001"
    tensors = {"model.w": torch.zeros(4, 3), "model.x": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load_tensors(folder, tensors)
    assert "it lacks model.x" in str(caught.value)
    assert "model.w has shape [4, 2] there and [4, 3] here" in str(caught.value)
    assert "No tensor was loaded. Resume with the model" in str(caught.value)
    assert not tensors["model.w"].any()


def test_more_than_asked_for_is_refused_unless_allowed(steps: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it also holds model\.w"):
        load_tensors(steps / "step-00000001", {})
    load_tensors(steps / "step-00000001", {}, allow_extra=True)


def test_a_stage_reads_its_part_of_what_all_stages_hold(steps: Path) -> None:
    folder, names = steps / "step-00000001", {"model.w", "model.elsewhere"}
    with pytest.raises(CheckpointError, match=r"it lacks model\.elsewhere"):
        load_tensors(folder, {}, of_others=names)
    load_tensors(folder, {}, of_others={"model.w"})
    with pytest.raises(CheckpointError, match=r"it also holds model\.w"):
        load_tensors(folder, {}, of_others=set())


@pytest.mark.heavy
def test_a_missing_part_of_a_tensor_is_noticed_without_the_manifest(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(trained / "checkpoints" / "step-00000002", folder)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds [\d,]+ of the [\d,]+ elements of model\."):
        read_shapes(folder)


def test_a_torn_tensor_file_is_an_error_with_the_next_step(steps: Path) -> None:
    path = steps / "step-00000001" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"cannot be read.*checkpoint\.verify.*another"):
        load_tensors(path.parent, {"model.w": torch.zeros(4, 2)})


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


def test_a_planted_pickle_is_never_opened(
    steps: Path, tmp_path: Path, alone: dist.ProcessGroup
) -> None:
    touched = tmp_path / "touched"
    bomb = pickle.dumps(Bomb(touched))
    pickle.loads(bomb)  # it works
    touched.unlink()
    for name in (".metadata", "__0.metadata", "__0_0.distcp", "state.pt"):
        (steps / "step-00000003" / name).write_bytes(bomb)
    chosen = choose_alone(steps, alone)
    assert chosen is not None and chosen.step == 3
    loaded = {"model.w": torch.zeros(4, 2)}
    load_tensors(chosen.path, loaded)
    read_values(chosen.path)
    assert loaded["model.w"].tolist() == [[3, 3]] * 4
    assert not touched.exists()


def test_what_is_no_tensor_is_refused_by_the_planner() -> None:
    item = ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex("x"),
        dest_offsets=torch.Size([0]),
        storage_index=MetadataIndex("x"),
        storage_offsets=torch.Size([0]),
        lengths=torch.Size([0]),
    )
    with pytest.raises(CheckpointError, match=r"x is not a tensor.*could run code"):
        TensorsOnlyPlanner().load_bytes(item, io.BytesIO())


def set_format(folder: Path, version: int) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["format"] = version
    (folder / "manifest.json").write_text(json.dumps(content))


def test_a_newer_format_is_refused(steps: Path) -> None:
    set_format(steps / "step-00000001", FORMAT + 1)
    with pytest.raises(CheckpointError, match=r"format version 3, this.*up to 2.*install that"):
        read_values(steps / "step-00000001")


def test_an_older_format_goes_through_its_rule(steps: Path) -> None:
    set_format(steps / "step-00000001", 0)
    with pytest.raises(
        CheckpointError, match=r"cannot convert it from 0 to 1.*version of shardyard that"
    ):
        read_values(steps / "step-00000001")
    set_format(steps / "step-00000001", FORMAT - 1)
    rules = {FORMAT - 1: lambda values: {**values, "upgraded": True}}
    assert read_values(steps / "step-00000001", upgrades=rules) == {"step": 1, "upgraded": True}


def test_a_checkpoint_of_format_1_that_holds_nan_is_passed_over_loudly(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    poisoned = steps / "step-00000003"
    weight = torch.full((4, 2), 3.0)
    weight[3, 1] = torch.nan
    content = bytearray((poisoned / "rank-00000.safetensors").read_bytes())
    content[-32:] = weight.numpy().tobytes()
    (poisoned / "rank-00000.safetensors").write_bytes(content)
    manifest = json.loads((poisoned / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["rank-00000.safetensors"]["sha256"] = digest
    (poisoned / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    set_format(steps / "step-00000002", 1)
    chosen = choose_alone(steps, alone)
    assert chosen is not None and chosen.step == 2
    assert str(chosen.damaged[0]) == (
        "step-00000003 is damaged: rank-00000.safetensors: model.w holds NaN, so training cannot "
        "continue from it"
    )
    assert (steps / "step-00000003.damaged").is_dir()


def test_a_checkpoint_of_format_1_loads_and_names_the_buffers_that_it_lacks(steps: Path) -> None:
    folder = steps / "step-00000001"
    tensors = {"model.w": torch.zeros(4, 2), "buffer.mean": torch.full((2,), 5.0)}
    with pytest.raises(CheckpointError, match=r"it lacks buffer\.mean"):
        load_tensors(folder, dict(tensors))
    set_format(folder, 1)
    assert load_tensors(folder, tensors) == ["buffer.mean"]
    assert tensors["model.w"].tolist() == [[1, 1]] * 4
    assert tensors["buffer.mean"].tolist() == [5, 5]


def test_a_checkpoint_copied_to_another_steps_name_is_passed_over(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    shutil.copytree(steps / "step-00000001", steps / "step-00000009")
    chosen = choose_alone(steps, alone)
    assert chosen is not None and chosen.step == 3
    assert str(chosen.damaged[0]) == (
        "step-00000009 is damaged: manifest.json: is of step 1, the folder's name says 9: it was "
        "copied here"
    )
    assert (
        verify_manifest(steps / "step-00000009.damaged") == []
    )  # under no step's name it is sound


def test_a_latest_that_is_a_folder_is_kept_aside_and_the_newest_is_used(
    steps: Path, alone: dist.ProcessGroup
) -> None:
    for number in (1, 2):
        (steps / "latest").unlink()
        (steps / "latest").mkdir()
        (steps / "latest" / "mine.txt").write_text(f"{number}")
        chosen = choose_alone(steps, alone)
        assert chosen is not None and (chosen.step, chosen.damaged) == (3, ())
        assert chosen.note == "latest is a folder and no file that names a checkpoint"
        assert (steps / "latest").read_text() == "step-00000003\n"
        assert (steps / f"latest.damaged-{number}" / "mine.txt").read_text() == f"{number}"
    (steps / "latest").unlink()
    (steps / "latest").mkdir()
    save(steps, alone, 4)  # a save finds it too, in the middle of a run
    assert (steps / "latest").read_text() == "step-00000004\n"


@pytest.mark.heavy
@needs_root
def test_a_latest_that_cannot_be_moved_away_is_told_with_what_to_do(steps: Path) -> None:
    (steps / "latest").unlink()
    with (
        mounted(steps / "latest", "size=1m"),
        pytest.raises(
            StorageError, match=r"is a folder where a file belongs.*Move it away yourself"
        ),
    ):
        mark_latest(steps, 3)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (b"step-00000007\n", "step-00000007 is gone"),
        (b"\xff\x00garbage", "it holds '\ufffd?garbage'"),
        (b"", "it is empty"),
        (b"\0\0\0", "it is empty"),  # as a power cut may leave it
    ],
)
def test_a_latest_that_names_nothing_is_told_and_the_newest_is_used(
    steps: Path, alone: dist.ProcessGroup, held: bytes, words: str
) -> None:
    (steps / "latest").write_bytes(held)
    chosen = choose_alone(steps, alone)
    assert chosen is not None and chosen.step == 3
    assert chosen.note == f"latest names no checkpoint that is there: {words}"
    again = choose_alone(steps, alone)
    assert again is not None and again.note is None

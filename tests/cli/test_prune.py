"""`shardyard prepare --prune`: what no run reads, and nothing else, is deleted if agreed to."""

import fcntl
import json
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.schema import Recipe
from shardyard.control.prune import delete, unused_sets
from shardyard.data.in_use import InUse


def a_set(above: Path, number: int, name: str = "text") -> Path:
    """A folder of the form that `prepare` writes."""
    folder = above / f"{name}-{number:016x}"
    folder.mkdir(parents=True)
    files = ["train-00000.bin", "train-00000.idx.npy", "tokenizer.json"]
    for file in files:
        (folder / file).write_bytes(b"1234")
    listed = {file: {"bytes": 4} for file in files}
    manifest = {"format": 1, "request": {}, "fingerprint": "f", "splits": {}, "files": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / ".lock").touch()
    return folder


def a_run(runs: Path, folder: Path) -> None:
    path = runs / "a-run" / "attempts" / "0" / "resolved.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": {"dir": str(folder)}})[:-2])  # torn at its end


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return [
        "model.preset=llama-tiny", f"data.dir={tmp_path}/prepared", f"run.dir={tmp_path}/runs"
    ]  # fmt: skip


def test_sets_of_runs_stay_and_others_go(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    used, unused = (a_set(tmp_path / "prepared", number) for number in (1, 2))
    a_run(tmp_path / "runs", used)
    assert main(["prepare", *settings, "--prune", "--dry-run", "--json"]) == 0
    expected = {"unused": [str(unused)], "deleted": []}
    assert json.loads(capfd.readouterr().out) == expected
    assert main(["prepare", *settings, "--prune"]) == 2
    assert "nobody can be asked" in capfd.readouterr().err and unused.exists()
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert unused.name in capfd.readouterr().out
    assert used.exists() and not unused.exists()
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert "is read by a run" in capfd.readouterr().out


def recipe_of(folder: Path) -> Recipe:
    places = {"data": {"dir": str(folder / "prepared")}, "run": {"dir": str(folder / "runs")}}
    return Recipe.model_validate(places)


def test_only_what_prepare_wrote_is_deleted(tmp_path: Path) -> None:
    above = tmp_path / "prepared"
    mixture = a_set(above, 1, "mixture")
    (mixture / "manifest.json").unlink()
    (mixture / "mixture.json").write_text('{"format": 1, "parts": []}')
    for name in ("train-00000.bin", "train-00000.idx.npy"):
        (mixture / name).unlink()
    (a_set(above, 2) / "notes.md").write_text("mine")
    (a_set(above, 3) / "pieces").mkdir()
    (a_set(above, 4) / "manifest.json").write_text("{}")
    (a_set(above, 5) / "manifest.json").write_text("[")
    a_set(above, 6).rename(above / "by-hand")
    a_set(tmp_path / "elsewhere", 7)
    (above / f"link-{7:016x}").symlink_to(tmp_path / "elsewhere" / f"text-{7:016x}")
    (above / f"file-{8:016x}").write_text("no folder")
    assert [each.folder for each in unused_sets(recipe_of(tmp_path))] == [mixture]
    assert unused_sets(recipe_of(tmp_path / "nothing")) == []


def test_a_set_that_is_being_written_stays(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "prepared", 1)
    (unused,) = unused_sets(recipe_of(tmp_path))
    with (folder / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not delete(unused)
        assert (folder / "manifest.json").exists()
    assert delete(unused) and not folder.exists()


@pytest.mark.parametrize("option", ["--verify", "--also=h5", "--on=slurm"])
def test_pruning_goes_with_no_preparing(
    settings: list[str], option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *settings, "--prune", option]) == 2
    assert "--prune goes with --yes, --dry-run and --json alone" in capfd.readouterr().err


def test_what_a_training_of_another_folder_reads_stays_and_so_do_a_mixture_s_parts(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    above = tmp_path / "prepared"
    read, part, mixture = (a_set(above, number) for number in (1, 2, 3))
    for name in ("manifest.json", "train-00000.bin", "train-00000.idx.npy"):
        (mixture / name).unlink()
    parts = {"format": 1, "parts": [{"folder": f"../{part.name}"}]}
    (mixture / "mixture.json").write_text(json.dumps(parts))
    trainings = [InUse(read), InUse(mixture), InUse(tmp_path / "nowhere")]
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert capfd.readouterr().err.count("stays: a training reads it") == 3
    for training in trainings:
        training.close()
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert list(above.iterdir()) == []

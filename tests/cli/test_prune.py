"""`shardyard prepare --prune`: what no run reads, and nothing else, is deleted if agreed to."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.schema.recipe import Recipe
from shardyard.control.prune import delete, find_sets
from shardyard.data.in_use import InUse
from shardyard.launchers.ledger import Ledger
from shardyard.rundir.layout import RunDir


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
    kept = {"folder": str(used), "why": f"run {tmp_path}/runs/a-run reads it, and may be resumed"}
    expected = {"unused": [str(unused)], "deleted": [], "kept": [kept]}
    assert json.loads(capfd.readouterr().out) == expected
    assert main(["prepare", *settings, "--prune"]) == 2
    assert "this is not a terminal" in capfd.readouterr().err and unused.exists()
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
    assert [each.folder for each in find_sets(recipe_of(tmp_path)).unused] == [mixture]
    assert find_sets(recipe_of(tmp_path / "nothing")).unused == []


def test_a_set_that_is_being_written_stays(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "prepared", 1)
    (unused,) = find_sets(recipe_of(tmp_path)).unused
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
    assert "--prune goes only with --yes, --dry-run and --json" in capfd.readouterr().err


def test_what_a_training_of_another_folder_reads_stays_and_so_do_a_mixture_s_parts(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    above = tmp_path / "prepared"
    read, part, mixture = (a_set(above, number) for number in (1, 2, 3))
    run = tmp_path / "elsewhere" / "a-run"
    for name in ("manifest.json", "train-00000.bin", "train-00000.idx.npy"):
        (mixture / name).unlink()
    parts = {"format": 1, "parts": [{"folder": f"../{part.name}"}]}
    (mixture / "mixture.json").write_text(json.dumps(parts))
    trainings = [InUse(read, mixture, run=run), InUse(tmp_path / "nowhere", run=run)]
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    said = capfd.readouterr().err
    assert said.count("stays: a training reads it") == 3
    assert f"{read} was read by run {run}, whose folder is not on this machine" in said
    for training in trainings:
        training.close()
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert list(above.iterdir()) == []


def test_what_a_stopped_run_of_another_folder_read_stays_until_that_run_is_deleted(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    read = a_set(tmp_path / "prepared", 1)
    run = tmp_path / "elsewhere" / "a-run"
    a_run(tmp_path / "elsewhere", read)
    for _ in range(2):  # it was resumed
        InUse(read, run=run).close()
    assert len((read / "readers.jsonl").read_text().splitlines()) == 1
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    why = f"run {run} reads it, and may be resumed. To delete it, delete that run's folder first."
    assert f"{read} stays: {why}" in capfd.readouterr().out
    shutil.rmtree(run)
    assert main(["prepare", *settings, "--prune", "--yes"]) == 0
    assert not read.exists()


@pytest.mark.parametrize(
    ("recipe", "stay"),
    [
        ("data: {{dir: {0}, source: text}}", ["text"]),
        (
            "data: {{dir: {0}, mixture: [{{name: a, source: other, weight: 1}}]}}",
            ["mixture", "other"],
        ),
        ("data: {{dir: {0}/elsewhere, source: text}}", []),
        ("data: [", ["mixture", "other", "text"]),
    ],
    ids=["source", "mixture", "another data.dir", "damaged"],
)
def test_what_a_queued_run_will_read_stays(tmp_path: Path, recipe: str, stay: list[str]) -> None:
    above = tmp_path / "prepared"
    for number, name in enumerate(("mixture", "other", "text")):
        a_set(above, number, name)
    run = RunDir(tmp_path / "runs" / "queued")
    ledger = Ledger(run.ledger)
    ledger.confirm(ledger.intend("job", "sy-queued", launcher="slurm"), "7")
    run.recipe.write_text(recipe.format(above))
    kept = find_sets(recipe_of(tmp_path)).retained
    assert [each.folder.name[:-17] for each in kept] == stay
    assert {each.reason for each in kept} <= {
        f"run {run.path} was launched and has not begun; it may read it"
    }

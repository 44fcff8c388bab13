"""What a power cut leaves of a file in a run's folder hides no job that runs and costs money.

The reference is the launcher: it has one job that runs, whatever the folder holds.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardyard.launchers.base import JobState
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status
from tests.report.synthetic import RunWriter, resolved_run

Captured = pytest.CaptureFixture[str]


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "last-line-torn": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "NULs": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "NULs-at-the-end": lambda file: file.write_bytes(file.read_bytes()[:-9] + bytes(9)),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
    "a pipe": _pipe,
}
EXIT_CODES = {0, 1, 2, 3, 4}
"""Documented exit codes of a verb that ends by itself."""
READ_BY_PAGES = (
    "recipe.yaml", "events.jsonl", "metrics.jsonl", "attempts/0/manifest.json",
    "attempts/0/plan.json", "attempts/0/resolved.json", "telemetry/node-0.jsonl",
)  # fmt: skip
READ_BY_EXPORT = ("recipe.yaml", "attempts/0/resolved.json", "ledger.jsonl")
SLOWER_VERBS: dict[str, dict[str, tuple[str, ...]]] = {
    "torn": {"report first": READ_BY_PAGES},
    "NULs": {"compare second first": READ_BY_PAGES, "export first --dry-run": READ_BY_EXPORT},
    "missing": {"report first": READ_BY_PAGES, "compare second first": READ_BY_PAGES},
}
"""Damage -> verbs that take a second or more -> files that they read."""


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    """A launcher whose one job of run ``first`` runs, and a folder with all that a run writes."""
    launcher = FakeLauncher(statuses=[status(JobState.RUNNING)])
    assert launch(tmp_path, launcher, "--yes") == 0
    run = RunDir(tmp_path / "runs" / "first")
    asked = run.recipe.read_text()
    writer = RunWriter(run, resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 8)
    writer.write().recipe.write_text(asked)
    for path in (run.lease, run.latest, run.best, run.session("s"), run.profile_request,
                 run.attempt_recipe(0), run.answer("probe-1"), run.telemetry_of(0)):  # fmt: skip
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text('{"step": 8}\n')
    capsys.readouterr()
    return launcher


def damaged(folder: Path, damage: Callable[[Path], object]) -> Iterator[Path]:
    """Damage one file of a run's folder after the other; all else is whole each time."""
    whole = folder.parent.parent / "whole"
    shutil.copytree(folder, whole)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        damage(file)
        yield file.relative_to(folder)
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)


@pytest.mark.heavy
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_running_job_is_shown_and_ended_whatever_file_is_damaged(
    damage: Callable[[Path], object], tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    folder, there = tmp_path / "runs" / "first", set(fake.created)
    for file in damaged(folder, damage):
        for verb in ("status first", "runs", "cancel first --dry-run", "teardown first --dry-run"):
            code = shardyard(fake, *verb.split(), *runs_dir(tmp_path))
            said = "".join(capsys.readouterr())
            is_shown = code == 0 and ("running" in said or "fake job" in said)
            is_shown |= "may run: fake service" in said  # of an interrupted submission
            is_named = f"{folder}/ledger.jsonl" in said and (code != 0 or verb == "runs")
            assert is_shown or is_named or "(perhaps) what line" in said, (file, verb, said)
        code = shardyard(fake, "teardown", "first", "--yes", "--force", *runs_dir(tmp_path))
        said = "".join(capsys.readouterr())
        is_named = code != 0 and f"{folder}/ledger.jsonl" in said
        assert is_named or fake.created == set(), (file, said)
        fake.created = set(there)


@pytest.mark.heavy
def test_no_second_job_is_started_and_no_verb_crashes_whatever_file_is_damaged(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    there = set(fake.created)
    for file in damaged(tmp_path / "runs" / "first", DAMAGES["NULs"]):
        for verb in ("logs", "fetch", "resume"):
            code = shardyard(fake, verb, "first", *runs_dir(tmp_path))
            said = "".join(capsys.readouterr())
            assert "bug of shardyard" not in said, (file, verb, said)
            assert verb != "resume" or code != 0, (file, said)
        if file.name in ("recipe.yaml", "ledger.jsonl"):
            assert launch(tmp_path, fake, "--yes") != 0, file
        assert fake.created == there


@pytest.mark.heavy
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "a pipe"])
def test_verbs_that_read_a_run_end_with_an_answer_or_an_error_whatever_file_is_damaged(
    damage: str, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    folder, there = tmp_path / "runs" / "first", set(fake.created)
    shutil.copytree(folder, folder.with_name("second"))
    for file in damaged(folder, DAMAGES[damage]):
        slower = SLOWER_VERBS.get(damage, {}).items()
        verbs = [verb for verb, files in slower if str(file) in files]
        for verb in ("top first", "scale first 3 --dry-run", *verbs):
            to = ("--to", str(tmp_path / "out")) if verb.startswith("export") else ()
            code = shardyard(fake, *verb.split(), *to, *runs_dir(tmp_path))
            said = "".join(capsys.readouterr())
            assert code in EXIT_CODES, (file, verb, said)
            assert "bug of shardyard" not in said, (file, verb, said)
            assert "Traceback" not in said, (file, verb, said)
            assert "removed" not in said, (file, verb, said)
        assert fake.created == there, file


@pytest.mark.heavy
@pytest.mark.parametrize("damage", ["torn", "NULs", "NULs-at-the-end", "empty"])
def test_top_and_scale_name_a_job_that_a_damaged_ledger_hides(
    damage: str, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    ledger = tmp_path / "runs" / "first" / "ledger.jsonl"
    DAMAGES[damage](ledger)
    for verb in ("top first", "scale first 3 --dry-run"):
        code = shardyard(fake, *verb.split(), *runs_dir(tmp_path))
        said = "".join(capsys.readouterr())
        is_shown = "may run: fake service" in said or "(perhaps) what line" in said
        assert is_shown or (code != 0 and str(ledger) in said), (verb, code, said)


@pytest.mark.heavy
def test_no_verb_waits_for_a_process_to_write_to_a_pipe_in_a_run_s_folder(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    for file in damaged(tmp_path / "runs" / "first", _pipe):
        for verb in ("runs", "top first", "scale first 3 --dry-run", "teardown first --dry-run"):
            code = shardyard(fake, *verb.split(), *runs_dir(tmp_path))
            said = "".join(capsys.readouterr())
            assert code in EXIT_CODES and "bug of shardyard" not in said, (file, verb, said)
    assert fake.created

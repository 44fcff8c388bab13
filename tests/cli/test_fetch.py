"""`shardyard fetch`: what a run made where only its nodes look is here, held to its digests."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from shardyard.checkpoint import select
from shardyard.checkpoint.retention import mark_best, mark_latest
from shardyard.checkpoint.verify import FORMAT, Manifest, write_flushed, write_manifest
from shardyard.config.schema.recipe import Recipe
from shardyard.node.side_job import SideWork
from shardyard.node.side_jobs import has_reader, stay
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.far_launcher import FarLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard

Captured = pytest.CaptureFixture[str]
EVENTS = [
    {"t": 1.0, "kind": "run_started", "attempt": 0, "generation": 0},
    {"t": 2.0, "kind": "run_finished", "attempt": 0, "generation": 0},
]


def write_run(run: RunDir, *steps: int) -> None:
    """What nodes leave, as far as it is fetched."""
    files = {
        "attempts/0/resolved.json": "{}", "logs/attempt-0/rank-0.log": "said\n",
        "report.html": "<p>page", "report.md": "page", "ledger.jsonl": "theirs",
        "recipe.yaml": "theirs",
    }  # fmt: skip
    for name, text in files.items():
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(text)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    run.metrics.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    for step in steps:
        folder = run.checkpoint(step)
        folder.mkdir(parents=True)
        made = {"weights.bin": write_flushed(folder / "weights.bin", [memoryview(WEIGHTS)])}
        write_manifest(
            folder, Manifest(format=FORMAT, step=step, world_size=1, torch="2.13.0", files=made)
        )
    if steps:
        mark_latest(run.checkpoints, steps[-1])
        mark_best(run.checkpoints, steps[0])


WEIGHTS = bytes(range(256)) * 2000


def list_in_process(words: list[str]) -> bytes:
    """The listing without a process, which takes seconds to import torch."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        select.main(words)
    return output.getvalue().encode()


class Site:
    """A far run that has finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.far = FarLauncher(programs={"shardyard.checkpoint.select": list_in_process})
        where = f"launch.run_dir={folder / 'volume'}"
        assert launch(folder, self.far, "--yes", where) == 0
        self.here = RunDir(folder / "runs" / "first")
        self.there = RunDir(folder / "volume" / "first")
        write_run(self.there, 2, 4)

    def fetch(self, *words: str) -> int:
        return shardyard(self.far, "fetch", "first", *runs_dir(self.folder), "--yes", *words)


@pytest.fixture
def site(tmp_path: Path, capsys: Captured) -> Site:
    made = Site(tmp_path)
    capsys.readouterr()
    return made


@pytest.mark.heavy
def test_checkpoint_report_and_logs_come_into_the_runs_folder(site: Site, capsys: Captured) -> None:
    asked = site.here.recipe.read_bytes()
    ledger_before = site.here.ledger.read_text()
    assert site.fetch() == 0
    out, err = capsys.readouterr()
    assert "checkpoint of step 4; " in out and "each held to its SHA-256" in out
    assert " are not in " in err and " free" in err
    for name in ("report.html", "attempts/0/resolved.json", "logs/attempt-0/rank-0.log"):
        assert (site.here.path / name).read_bytes() == (site.there.path / name).read_bytes()
    assert (site.here.checkpoint(4) / "weights.bin").read_bytes() == WEIGHTS
    assert site.here.checkpoint_steps() == [4]
    assert site.here.latest.read_text() == "step-00000004\n"
    assert not site.here.best.exists(), "step 2 did not come"
    assert site.here.recipe.read_bytes() == asked
    assert site.here.ledger.read_text().startswith(ledger_before)
    assert "theirs" not in site.here.ledger.read_text()
    assert not list(site.here.path.rglob(".fetch*"))
    assert not site.far.lives, "the side job is gone"


@pytest.mark.heavy
def test_it_brings_only_what_is_missing(site: Site) -> None:
    assert site.fetch() == 0
    site.far.commands.clear()
    (site.here.checkpoint(4) / "weights.bin").write_bytes(b"rotten")
    assert site.fetch() == 0
    read = [command[4] for command in site.far.commands if command[0] == "tail"]
    assert sorted(Path(name).name for name in read) == [
        "events.jsonl", "metrics.jsonl", "weights.bin",
    ]  # fmt: skip
    assert (site.here.checkpoint(4) / "weights.bin").read_bytes() == WEIGHTS


@pytest.mark.heavy
def test_events_that_the_log_told_before_stand_once(site: Site) -> None:
    site.here.events.write_text(json.dumps(EVENTS[0]) + "\n")
    assert site.fetch() == 0
    assert site.fetch() == 0
    assert list(read_lines(site.here.events)) == EVENTS
    assert len(list(read_lines(site.here.metrics))) == 1


@pytest.mark.heavy
def test_all_and_best_come_when_they_are_asked_for(site: Site) -> None:
    assert site.fetch("--all") == 0
    assert site.here.checkpoint_steps() == [2, 4]
    assert site.here.best.read_text() == "step-00000002\n"
    assert site.fetch("--step", "best", "--to", str(site.folder / "copy")) == 0
    copy = RunDir(site.folder / "copy")
    assert copy.checkpoint_steps() == [2]
    assert copy.recipe.read_bytes() == site.here.recipe.read_bytes()


@pytest.mark.heavy
def test_an_answer_in_json_says_what_came(site: Site, capsys: Captured) -> None:
    assert site.fetch("--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["to"], told["steps"], told["files"]) == (str(site.here.path), [4], 8)


def test_a_dry_run_prints_the_side_job_and_creates_nothing(site: Site, capsys: Captured) -> None:
    before = sorted(site.folder.rglob("*"))
    assert site.fetch("--dry-run") == 0
    assert '"kind": "job"' in capsys.readouterr().out
    assert (sorted(site.folder.rglob("*")), site.far.lives) == (before, False)


@pytest.mark.heavy
def test_a_lost_connection_is_gone_on_with(site: Site) -> None:
    site.far.breaks = [0, 3, 1]
    assert site.fetch() == 0
    assert (site.here.checkpoint(4) / "weights.bin").read_bytes() == WEIGHTS


@pytest.mark.heavy
def test_the_newest_sound_checkpoint_comes_and_the_damaged_one_is_named(
    site: Site, capsys: Captured
) -> None:
    (site.there.checkpoint(4) / "weights.bin").write_bytes(b"rotten")
    assert site.fetch() == 0
    assert "step-00000004 is damaged" in capsys.readouterr().err
    assert site.here.checkpoint_steps() == [2]
    assert site.fetch("--step", "4") == 1
    assert "step-00000004 is damaged: weights.bin: 6 bytes long" in capsys.readouterr().err
    assert not site.far.lives


@pytest.mark.heavy
def test_a_run_without_a_checkpoint_brings_the_rest(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path)
    for step in (2, 4):
        for file in site.there.checkpoint(step).iterdir():
            file.unlink()
        site.there.checkpoint(step).rmdir()
    capsys.readouterr()
    assert site.fetch() == 0
    out, err = capsys.readouterr()
    assert "warning: the run has no checkpoint yet." in err and "no checkpoint; 6 files" in out
    assert site.here.report_html.exists() and not site.here.latest.exists()


@pytest.mark.heavy
def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    site: Site, capsys: Captured
) -> None:
    assert site.fetch("--step", "3") == 2
    assert "It has those of steps 2, 4" in capsys.readouterr().err
    assert not site.here.report_html.exists()


@pytest.mark.heavy
def test_a_folder_that_holds_something_else_is_refused(site: Site, capsys: Captured) -> None:
    mine = site.folder / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("")
    assert site.fetch("--to", str(mine)) == 2
    assert "is not an empty folder, nor an earlier fetch of this run" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


@pytest.mark.heavy
def test_a_copy_that_was_killed_as_it_wrote_its_first_file_is_gone_on_with(site: Site) -> None:
    copy = site.folder / "copy"
    copy.mkdir()
    (copy / ".recipe.yaml.4711").write_text("mod")
    assert site.fetch("--to", str(copy)) == 0
    assert (copy / "recipe.yaml").read_text() == site.here.recipe.read_text()
    assert not list(copy.glob(".*"))


def test_where_no_command_can_be_run_a_bucket_is_asked_for(
    tmp_path: Path, capsys: Captured
) -> None:
    kind = type("Batch", (FakeLauncher,), {"capabilities": FarLauncher.capabilities})
    far = kind()
    assert launch(tmp_path, far, "--yes", "launch.run_dir=/shared/runs") == 0
    capsys.readouterr()
    assert shardyard(far, "fetch", "first", *runs_dir(tmp_path), "--yes") == 2
    told = capsys.readouterr().err
    assert "cannot be read from here" in told
    assert "shardyard fetch --via s3://bucket/prefix" in told
    assert shardyard(far, "fetch", "first", *runs_dir(tmp_path), "--via", "s3:/x") == 2
    assert "Give s3://bucket/prefix" in capsys.readouterr().err


def test_a_folder_that_this_machine_sees_needs_no_fetch(tmp_path: Path, capsys: Captured) -> None:
    near = FakeLauncher()
    assert launch(tmp_path, near, "--yes") == 0
    capsys.readouterr()
    assert shardyard(near, "fetch", "first", *runs_dir(tmp_path)) == 0
    assert "no files to fetch" in capsys.readouterr().err


def idle(seconds: float) -> SideWork:
    return SideWork(run=RunDir(Path()), recipe=Recipe(), arguments={"idle_s": seconds})


def test_the_idle_side_job_ends_when_nobody_has_read_for_a_while(tmp_path: Path) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now == 200:
            reader.mkdir()
            (reader / "stat").write_text("77 (tail) S 0 77 77 0 -1")
        if now == 250:
            (reader / "stat").unlink()
            reader.rmdir()

    reader = tmp_path / "77"
    told = stay(idle(300), clock=lambda: now, sleep=sleep, processes=tmp_path)
    assert told == {"ended": "no reader for 300 s"}
    assert 545 <= now <= 552


def test_its_own_processes_are_no_readers(tmp_path: Path) -> None:
    ours = {os.getpid(): 7, 7: 1, 1: 0, 88: os.getpid()}
    for pid, parent in ours.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
    assert not has_reader(tmp_path)
    (tmp_path / "99").mkdir()
    (tmp_path / "99" / "stat").write_text("99 (tail) R 0 99 99")
    assert has_reader(tmp_path)

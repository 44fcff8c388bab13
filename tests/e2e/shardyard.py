"""The product as a user starts it: `python -m shardyard VERB ...` in a process of its own.

Every process started here carries a mark in its environment, so that a test sees what is left
running, and has a scratch folder of its own, so that a test sees what is left there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardyard.report.run_data import read_run
from shardyard.report.walltime import account, total_phases
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from tests.elastic.agents import wait_until

PATIENCE_S = 600.0
"""For the longest thing a test waits for, on a machine that others use too."""

_MARK = f"SHARDYARD_E2E={os.getpid()}"
_NOT_OURS = "torchinductor_"
"""Beginning of the name of a cache that torch keeps in the scratch folder."""


@dataclass(frozen=True)
class Answer:
    """What a user gets: the answer, the talk, the exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Running:
    """A command line that has not ended."""

    process: subprocess.Popen[str]
    _files: tuple[Path, Path]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> Answer:
        code = self.process.wait(PATIENCE_S)
        return _checked(Answer(code, *(file.read_text() for file in self._files)))


class Place:
    """A folder to work in, and what a test may ask about it."""

    def __init__(self, folder: Path, *, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch

    def run(self, *words: str, cwd: Path | None = None, **environment: str) -> Answer:
        """Run a verb to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "shardyard", *words],
            cwd=cwd or self.folder,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return _checked(Answer(done.returncode, done.stdout, done.stderr))

    @contextmanager
    def start(self, *words: str) -> Iterator[Running]:
        """Start a verb; whatever a failed test leaves of it is ended."""
        files = self.scratch / "out.txt", self.scratch / "err.txt"
        with files[0].open("w") as out, files[1].open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardyard", *words],
                cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, text=True,
            )  # fmt: skip
        try:
            yield Running(process, files)
        finally:
            if process.poll() is None:
                end_what_is_left()
            process.wait()
            for file in files:
                file.unlink()

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        name, _, value = _MARK.partition("=")
        ours = {name: value, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **ours, **(more or {})}

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.folder / "runs" / run_id)

    def state(self, run_id: str) -> str:
        """The word that `shardyard runs` has for a run."""
        rows = {row["id"]: row for row in self.run("runs", "--json").json}
        return str(rows[run_id]["state"])

    def assert_nothing_left(self) -> None:
        """No process of ours runs, and nothing of ours lies in the scratch folder."""
        wait_until(lambda: not processes_left(), timeout_s=20.0)
        wait_until(lambda: not self.files_left(), timeout_s=5.0)

    def files_left(self) -> list[str]:
        names = (entry.name for entry in self.scratch.iterdir())
        return [name for name in names if not name.startswith(_NOT_OURS)]


@contextmanager
def make_place(folder: Path) -> Iterator[Place]:
    """A place whose scratch folder has a short name: sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as scratch:
        try:
            yield Place(folder, scratch=Path(scratch))
        finally:
            end_what_is_left()


def processes_left() -> list[int]:
    """Processes that carry our mark: all that were started here, and their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if _MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_what_is_left() -> None:
    for pid in processes_left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def events(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir.events) if event["kind"] == kind]


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, timeout_s=PATIENCE_S)


def wait_for_step(run_dir: RunDir, step: int) -> None:
    """Until a step has its line in metrics.jsonl."""
    wait_for(lambda: any(line["step"] >= step for line in read_lines(run_dir.metrics)))


def wait_for_end(run_dir: RunDir) -> None:
    """Until no agent trains the run any more."""
    wait_for(lambda: not is_locked(run_dir.lease))


def assert_time_is_accounted(run_dir: RunDir) -> None:
    """The phases of a run sum to its wall clock; 1 % of it at the most is explained by none."""
    record = read_run(run_dir)
    wall_s = max(event["t"] for event in read_lines(run_dir.events)) - min(
        attempt.manifest["started_at"] for attempt in record.attempts
    )
    attempts = account(record)
    phases = total_phases(attempts)
    assert sum(phases.values()) == pytest.approx(wall_s, rel=0.01)
    unexplained_s = [abs(attempt.phases["unexplained"]) for attempt in attempts]
    assert sum(unexplained_s) <= 0.01 * wall_s, phases
    assert all(seconds >= 0 for name, seconds in phases.items() if name != "unexplained")


def _checked(answer: Answer) -> Answer:
    """What holds for every command, right or wrong."""
    assert "Traceback" not in answer.out + answer.err, answer.err
    assert "This is a bug" not in answer.err, answer.err
    return answer

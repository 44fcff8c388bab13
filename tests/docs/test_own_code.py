"""The tutorial on the user's own functions: its commands, and a kill of the run that it shows."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.io.polling import wait_for
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from tests.docs.shown import not_printed, steps_of
from tests.test_docs import ROOT, files_of

PAGE = ROOT / "docs/tutorials/own-code.md"
SHARDYARD = str(Path(sys.executable).parent / "shardyard")


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.system
def test_commands_print_what_the_page_shows_and_a_killed_run_ends_the_same(tmp_path: Path) -> None:
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text)
    for step in steps_of(PAGE):
        (line,) = step.commands
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=_environment(),
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        said = re.search(r"# exit code (\d+)", line)
        assert done.returncode == (int(said[1]) if said else 0), f"{line}\n{printed}"
        assert not_printed(step.shown, printed, numbers=False) == [], f"{line}\n{printed}"
    _check_killed_run(tmp_path)


def _check_killed_run(folder: Path) -> None:
    """SIGKILL of the command, its agent and its workers, then a resume: the numbers stay."""
    once, killed = RunDir(folder / "runs/own"), RunDir(folder / "runs/killed")
    words = [SHARDYARD, "train", "own.yaml", "run.id=killed"]
    with subprocess.Popen(
        words, cwd=folder, env=_environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert wait_for(killed.latest_checkpoint, every_s=0.05, within_s=300)
        finally:
            _kill_all_below(process.pid)
    assert len(read_steps(killed.metrics)) < len(read_steps(once.metrics))
    done = subprocess.run(
        [SHARDYARD, "resume", str(killed.path)], cwd=folder, env=_environment(),
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [
        ({line["step"]: line["loss"] for line in read_steps(each.metrics)}[20],
         read_evaluations(each.metrics)[-1]["eval"])
        for each in (once, killed)
    ]  # fmt: skip
    assert ends[0] == ends[1]


def _kill_all_below(pid: int) -> None:
    """Kill a process and all that it started, children first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(pid, signal.SIGSTOP)
    for child in children:
        _kill_all_below(int(child))
    os.kill(pid, signal.SIGKILL)

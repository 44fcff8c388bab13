"""What comes from elsewhere cannot act on the terminal of whoever looks."""

import ast
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, ShardyardError
from shardyard.io import terminal
from shardyard.launchers.base import JobState, JobStatus, LogLine
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard
from tests.elastic.agents import wait_until

Captured = pytest.CaptureFixture[str]

EVIL = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b2J \u202e"
SHOWN = r"\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b2J \u202e"


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    launcher.lines = [LogLine(source="node 0", text=f"step 1 {EVIL}\r")]
    launcher.statuses = [
        JobStatus(state=JobState.FAILED, reason=f"died {EVIL}", exit_code=1, nodes=((EVIL, EVIL),))
    ]
    return launcher


@pytest.mark.parametrize("verb", ["logs", "watch", "status"])
def test_escapes_are_shown_as_text_also_in_a_pipe(
    verb: str, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    shardyard(fake, verb, "first", *runs_dir(tmp_path))
    said = "".join(capsys.readouterr())
    assert SHOWN in said
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said)


@pytest.mark.parametrize("verb", ["logs", "watch"])
def test_raw_prints_them_as_they_come(
    verb: str, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    shardyard(fake, verb, "first", "--raw", *runs_dir(tmp_path))
    assert capsys.readouterr().out == f"step 1 {EVIL}\r\n"


def test_an_error_that_quotes_a_service_is_shown_as_text(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.unanswered = [ShardyardError(f"the service said {EVIL}")]
    assert shardyard(fake, "status", "first", *runs_dir(tmp_path)) == 1
    assert capsys.readouterr().err == f"error: the service said {SHOWN}\n"


@pytest.mark.heavy
def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    """The process ignores SIGHUP, as under nohup; its writes fail with EIO from then on."""
    told = tmp_path / "told"
    source = (
        "import click, os, sys, time\n"
        "from shardyard.io.terminal import run, echo_err, echo\n"
        "def work():\n"
        "    echo_err('begun')\n"
        "    while os.isatty(1): time.sleep(0.05)\n"
        "    echo_err('x'); echo('y'); print('z')\n"
        f"    open({str(told)!r}, 'w').write('whole')\n"
        "sys.exit(run(click.Command('a', callback=work), []))\n"
    )
    child, controller = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, "-c", source])
    assert b"begun" in os.read(controller, 1024)
    os.close(controller)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert told.read_text() == "whole"


_HELD = """
import click, os, signal, sys, time
from shardyard.io.terminal import run, echo_err
def work():
    try:
        echo_err("begun")
        {work}
    finally:
        open({told!r}, "w").write("cleaned up")
sys.exit(run(click.Command("a", callback=work), []))
"""
_PREPARES = (
    "from shardyard.control import subprocesses\n"
    "        wait = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "        subprocesses.python_program = lambda *_: wait\n"
    "        subprocesses.run_program('x', [])"
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_DRAINED)]
)
@pytest.mark.parametrize("work", ["time.sleep(600)", _PREPARES], ids=["itself", "by a program"])
def test_a_verb_that_is_ended_cleans_up(tmp_path: Path, work: str, number: int, code: int) -> None:
    """A shell that ends sends SIGHUP to its jobs, `timeout` SIGTERM; only the verb gets it here."""
    told = tmp_path / "told"
    source = _HELD.format(work=work, told=str(told))
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as verb:
        assert verb.stderr is not None and verb.stderr.readline() == b"begun\n"
        try:
            wait_until(lambda: work != _PREPARES or bool(_children(verb.pid)))
            children = _children(verb.pid)
            verb.send_signal(number)
            assert verb.wait(60) == code
        finally:
            verb.kill()
    assert told.read_text() == "cleaned up" and bool(children) == (work == _PREPARES)
    # Orphans are reaped by the machine's first process, which may take its time.
    wait_until(lambda: not any(_is_running(child) for child in children))


def _is_running(pid: str) -> bool:
    """Whether a process exists and has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_no_verb_prints_by_another_way() -> None:
    """Marked lines and a node's first words are for a log, which is read through this way."""
    package = Path(terminal.__file__).parent
    others = {
        "node/log_markers.py", "node/env_entry.py", "node/side_job.py", "node/bench.py",
    }  # fmt: skip
    found = [
        f"{path.name}:{node.lineno}"
        for half in ("cli", "control", "node")
        for path in sorted((package / half).glob("*.py"))
        if f"{half}/{path.name}" not in others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("print", "click.echo", "sys.stdout.write", "sys.stderr.write")
    ]
    assert not found


_ENDED_AS_IT_STARTS = """
import os, signal, subprocess, sys
from shardyard.control import subprocesses
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        open({told!r}, "w").write(str(self.pid))
        os.kill(os.getpid(), {number})
subprocesses.subprocess.Popen = Popen
subprocesses.python_program = lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"]
subprocesses.run_program("x", [])
"""


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_a_program_starts_ends_it_too(tmp_path: Path, number: int) -> None:
    told = tmp_path / "told"
    source = _ENDED_AS_IT_STARTS.format(told=str(told), number=int(number))
    assert subprocess.run([sys.executable, "-c", source], timeout=120).returncode != 0
    wait_until(lambda: not _is_running(told.read_text()), timeout_s=30)

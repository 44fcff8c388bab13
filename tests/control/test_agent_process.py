"""The command line and its agent: signals passed on, answers read, nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shardyard.control.agent_process import _signals_passed_on, run_agent_command
from shardyard.control.follow import LogView
from shardyard.rundir.layout import RunDir
from tests.elastic.agents import (
    Agents,
    parent_of,
    session_pids,
    wait_until,
    with_shared_memory,
)
from tests.mounts import mounted, needs_root

pytestmark = pytest.mark.heavy

_PROGRAM = str(Path(__file__).parents[1] / "elastic" / "bodies.py")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run-1")
    Agents(run, tmp_path).prepare()
    return run


def run_script(run: RunDir, script: str) -> tuple[dict[str, object], str]:
    lines: list[str] = []
    answer = run_agent_command(
        [sys.executable, "-c", script],
        run,
        1,
        view_factory=lambda _: LogView(lines.append, 3, every=1),
    )
    return answer, "\n".join(lines)


def test_the_last_line_is_the_answer(run: RunDir) -> None:
    script = 'print("talk"); print(\'{"outcome": "finished", "exit_code": 0, "message": "m"}\')'
    answer, _ = run_script(run, script)
    assert answer == {"outcome": "finished", "exit_code": 0, "message": "m"}


def test_a_killed_agent_is_told_with_its_log_and_how_to_go_on(run: RunDir) -> None:
    answer, _ = run_script(run, "import os; os.kill(os.getpid(), 9)")
    assert (answer["outcome"], answer["exit_code"]) == ("failed", 1)
    message = str(answer["message"])
    assert "ended with SIGKILL" in message and "agent-0.log" in message
    assert f"`shardyard resume {run.path}`" in message
    assert answer["killed_by"] == signal.SIGKILL


def test_ctrl_c_is_passed_on_and_explained(run: RunDir) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def answer(number, _):\n"
        '    print(\'{"outcome": "drained", "exit_code": 130, "message": ""}\')\n'
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, answer)\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\n"  # as the terminal would
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        "time.sleep(30)\n"
    )
    answer, shown = run_script(run, script)
    assert answer["exit_code"] == 130
    assert "finishing the step and saving; press Ctrl-C again to stop at once" in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_agent_starts_reaches_it() -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    notes: deque[str] = deque()
    with _signals_passed_on(notes, is_node=False) as pass_to:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        os.kill(os.getpid(), signal.SIGINT)  # as another thread may receive it
        assert len(notes) == 1 and process.poll() is None
        pass_to(process)
        assert process.wait(30) == 130
        process.stdout.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_terminal_that_closes_drains_the_training_and_its_answer_is_heard(run: RunDir) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def answer(number, _):\n"
        '    print(\'{"outcome": "drained", "exit_code": 143, "message": ""}\')\n'
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGHUP, answer)\n"
        f"os.kill({os.getpid()}, signal.SIGHUP)\n"  # as the shell that ends would
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])\n"
        "time.sleep(30)\n"
    )
    answer, shown = run_script(run, script)
    assert answer["exit_code"] == 143 and "press Ctrl-C" not in shown
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_node_asks_its_agent_once_and_heeds_no_signal_after_it(run: RunDir) -> None:
    script = (
        "import sys\n"
        "words = '--asked-once' in sys.argv\n"
        'print(\'{"outcome": "drained", "exit_code": 143, "message": "%s"}\' % words)\n'
    )
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    answer = run_agent_command(
        [sys.executable, "-c", script],
        run,
        1,
        view_factory=None,
        node_rank=1,
        endpoint="127.0.0.1:1",
        is_node=True,
    )
    after = [signal.getsignal(number) for number in before]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert answer["message"] == "True"
    assert after == [signal.SIG_IGN] * 3


@pytest.mark.system
def test_a_killed_program_of_a_node_takes_its_agent_with_it_and_drains_nothing(
    run: RunDir, scratch: str
) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from shardyard.control.agent_process import run_agent_command\n"
        "from shardyard.rundir.layout import RunDir\n"
        f"run_agent_command([sys.executable, {_PROGRAM!r}], RunDir(Path({str(run.path)!r})), 1,\n"
        "    view_factory=None, endpoint=None, is_node=True)\n"
    )
    environment = {**os.environ, "TEST_BODY": "train_until_drained", "TMPDIR": scratch}
    agents = Agents(run, Path(scratch))
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as node:
        try:
            agents.wait_for_training()
        finally:
            node.kill()
    workers = [worker["pid"] for worker in agents.events("attempt_started")[0]["workers"]]
    wait_until(lambda: not any(map(_is_running, workers)))
    assert not agents.events("draining")
    assert not agents.events("attempt_ended")


@pytest.mark.system
@needs_root
def test_a_killed_agent_leaves_no_semaphore_in_shared_memory(
    run: RunDir, scratch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BODY", "never_drain")
    monkeypatch.setenv("TMPDIR", scratch)
    agents = Agents(run, Path(scratch))
    with mounted(tmp_path / "shm", "size=16m") as shared, ThreadPoolExecutor() as pool:
        killed = pool.submit(_kill_when_it_trains, agents, shared)
        answer = run_agent_command(
            [*with_shared_memory(shared), sys.executable, _PROGRAM], run, 1, view_factory=None
        )
        assert killed.result()  # semaphores that were there before
        assert answer["killed_by"] == signal.SIGKILL
        assert not list(shared.iterdir())


def _kill_when_it_trains(agents: Agents, shared: Path) -> list[Path]:
    agents.wait_for_training()
    there = list(shared.iterdir())
    worker = agents.events("attempt_started")[0]["workers"][0]["pid"]
    os.kill(parent_of(parent_of(worker)), signal.SIGKILL)
    return there


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_what_an_agent_leaves_running_is_ended(run: RunDir) -> None:
    script = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        'print(\'{"outcome": "finished", "exit_code": 0, "message": "%d"}\' % os.getpid())\n'
    )
    answer, _ = run_script(run, script)
    wait_until(lambda: not session_pids(int(str(answer["message"]))), timeout_s=20.0)


@pytest.fixture
def scratch() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.mark.system
def test_a_killed_command_line_lets_the_run_drain(run: RunDir, scratch: str) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from shardyard.cli.progress import attempt_view\n"
        "from shardyard.control.agent_process import run_agent_command\n"
        "from shardyard.rundir.layout import RunDir\n"
        f"run_agent_command([sys.executable, {_PROGRAM!r}], RunDir(Path({str(run.path)!r})), 1,\n"
        "    view_factory=attempt_view)\n"
    )
    environment = {
        **os.environ,
        "TEST_BODY": "train_until_drained",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": scratch,
    }
    agents = Agents(run, Path(scratch))
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as command_line:
        try:
            agents.wait_for_training()
        finally:
            command_line.kill()
    wait_until(lambda: bool(agents.events("attempt_ended")))
    assert agents.events("draining")[0]["signal"] == "SIGHUP"
    assert agents.events("attempt_ended")[0]["exit_code"] == 143
    worker = agents.events("attempt_started")[0]["workers"][0]["pid"]
    assert not Path(f"/proc/{worker}").exists()

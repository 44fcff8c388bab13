"""Agent as a process of the command line: started, followed, signalled, never left behind.

It gets a session of its own, so that Ctrl-C at the terminal reaches only the command line,
which passes it on. If the command line is killed, the agent drains, as no program starts
the run again. If a node's program is killed, its agent ends with it: the node is lost, and
the program that started it acts on that. A drain of its ranks would be a drain of all.
"""

import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from shardyard.control.follow import ViewFactory, follow, log_view
from shardyard.io.files import parse_json
from shardyard.io.polling import wait_for
from shardyard.own_processes import is_hang_up_ignored, python_program
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.rundir.state import resume_words

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_FIRST_WORDS = "finishing the step and saving; press Ctrl-C again to stop at once"
_LAST_WAIT_S = 60.0
_LEAVING_S = 3.0
"""Seconds for the children of a killed agent; ended ones that were not waited for count as
there.
"""
_POLL_S = 0.1


def run_agent_process(
    run_dir: RunDir,
    attempt: int,
    *,
    view_factory: ViewFactory = log_view,
    lease: Lease | None = None,
) -> dict[str, Any]:
    """Train one attempt on this machine.

    Call from the main thread.

    Args:
        view_factory: How its progress is shown.
        lease: Of the run; the agent takes it over. None: the agent takes it.

    Returns:
        The agent's answer: ``outcome`` (finished, drained, failed), ``exit_code``, ``message``.
    """
    return run_agent_command(
        python_program("shardyard.elastic"),
        run_dir,
        attempt,
        view_factory=view_factory,
        lease=lease,
    )


def run_node_process(
    run_dir: RunDir,
    attempt: int,
    *,
    node_rank: int,
    endpoint: str,
    own_host: str | None = None,
    store_moves: bool,
    lease: Lease | None = None,
) -> dict[str, Any]:
    """Train one node's share of an attempt; node 0 reports its progress.

    However many signals come, the agent gets one request: schedulers and people repeat
    themselves, and a second one would cut the drain short. After it this process, which ends,
    ignores them too.

    Args:
        lease: Lease of the run, on node 0; the agent takes it over.
    """
    return run_agent_command(
        python_program("shardyard.elastic"),
        run_dir,
        attempt,
        view_factory=log_view if node_rank == 0 else None,
        node_rank=node_rank,
        endpoint=endpoint,
        own_host=own_host,
        is_node=True,
        store_moves=store_moves,
        lease=lease,
    )


def run_agent_command(
    program: list[str],
    run_dir: RunDir,
    attempt: int,
    *,
    view_factory: ViewFactory | None,
    node_rank: int = 0,
    endpoint: str | None = None,
    own_host: str | None = None,
    is_node: bool = False,
    store_moves: bool = False,
    lease: Lease | None = None,
) -> dict[str, Any]:
    """Do the same as `run_agent_process`, for an agent that is started as ``program``.

    Args:
        view_factory: How progress is shown; None: not at all.
        endpoint: HOST:PORT of the rendezvous of several nodes' agents.
        own_host: This node's name, as the others reach it.
        is_node: Whether this process is a node's program, not a command line: of several signals
            only the first counts, and the agent is lost with this process.
        store_moves: Whether the others continue where the node that serves their store is lost.
        lease: Lease of the run; the agent takes it over.
    """
    passed = () if lease is None else lease.descriptors
    command = [*program, str(run_dir.path), "--attempt", str(attempt)]
    command += ["--part-of" if is_node else "--with-parent", str(os.getpid())]
    command += ["--node-rank", str(node_rank)]
    command += [] if endpoint is None else ["--rendezvous", endpoint]
    command += [] if own_host is None else ["--own-host", own_host]
    command += ["--asked-once"] if is_node else []
    command += ["--store-moves"] if store_moves else []
    command += [word for each in passed for word in ("--lease", str(each))]
    # A file and not a pipe: whatever still holds the other end of a pipe would keep us waiting.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        notes: deque[str] = deque()
        with _signals_passed_on(notes, is_node=is_node) as pass_to, ExitStack() as ended:
            with _signals_blocked():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    start_new_session=True,
                    pass_fds=passed,
                )
                ended.callback(_end, process)
                pass_to(process)
                if lease is not None:
                    lease.close()
            if view_factory is None:
                # Not wait(): a signal that comes just before it begins is seen when it ends.
                wait_for(process.poll, every_s=_POLL_S)
            else:
                follow(run_dir, attempt, process, view_factory=view_factory, notes=notes)
        log = run_dir.attempt(attempt) / f"agent-{node_rank}.log"
        return _read_answer(stdout, run_dir, log, exit_code=process.returncode)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Deliver signals only once they can be passed on; the agent starts with them blocked too.

    It never takes SIGUSR1, with which some clusters of Slurm warn all processes of a node.
    """
    blocked = (*_PASSED_ON, signal.SIGHUP, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


@contextmanager
def _signals_passed_on(
    notes: deque[str], *, is_node: bool
) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to a process that starts within; yields the function that takes it.

    A signal may come before: blocking keeps it only from this thread, and where the program has
    others one of them receives it.
    """
    words = [_FIRST_WORDS]
    processes: list[subprocess.Popen[bytes]] = []
    waiting: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if words and number == signal.SIGINT and not is_node:
            notes.append(words.pop())
        if processes:
            processes[0].send_signal(number)
        else:
            waiting.append(number)

    def pass_to(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        for number in waiting:
            process.send_signal(number)

    hang_up = () if is_hang_up_ignored() else (signal.SIGHUP,)
    previous = {number: signal.signal(number, pass_on) for number in (*_PASSED_ON, *hang_up)}
    try:
        yield pass_to
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if is_node else handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that the agent and all its children have ended."""
    if process.poll() is None:  # following it failed
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WAIT_S)
    if process.returncode is not None and process.returncode < 0:
        _wait_for_group(process.pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for_group(group: int) -> None:
    """Let the processes that a killed agent started exit by themselves: the kernel signals them.

    One of them is the tracker of multiprocessing, which is the only one to remove the agent's
    semaphores from /dev/shm.
    """

    def has_exited() -> bool:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    wait_for(has_exited, within_s=_LEAVING_S, every_s=_POLL_S)


def _read_answer(stdout: IO[str], run_dir: RunDir, log: Path, *, exit_code: int) -> dict[str, Any]:
    stdout.seek(0)
    lines = stdout.read().splitlines()
    with suppress(IndexError, ValueError):
        answer: dict[str, Any] = parse_json(lines[-1])
        return answer
    ending = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    killed_by = {"killed_by": -exit_code} if exit_code < 0 else {}
    return {
        **killed_by,
        "outcome": "failed",
        "exit_code": 1,
        "message": (
            f"the agent of run {run_dir.run_id} ended with {ending} and gave no answer; its "
            f"processes ended with it. Its log is {log}. {resume_words(run_dir)}."
        ),
    }

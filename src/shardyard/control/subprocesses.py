"""Start one of our own programs and read its answer: one line of JSON on stdout.

A program that fails answers ``{"error": message, "exit_code": n}``, with ``page`` if there is one;
its talk goes to our stderr.
"""

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Any

from shardyard.control_groups import memory_limit
from shardyard.errors import (
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    AccessError,
    CapacityError,
    LostNodeError,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import parse_json
from shardyard.own_processes import is_hang_up_ignored, python_program

_ERRORS: dict[int, type[ShardyardError]] = {
    error.exit_code: error
    for error in (ShardyardError, RequestError, CapacityError, AccessError, LostNodeError)
}


def run_program(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run ``python -m module`` to its end and return its answer.

    SIGTERM is passed on to the program, and so is SIGHUP of a terminal that closes. Ctrl-C
    reaches it without us, as it reaches every process of the terminal.

    Raises:
        ShardyardError: The program's own error, as the class for its exit code; or it died
            without an answer.
        KeyboardInterrupt: It was interrupted.
    """
    command = python_program(module, *arguments)
    received: list[int] = []
    waiting: list[int] = []
    started: list[subprocess.Popen[str]] = []

    def deliver() -> None:
        while started and waiting:
            started[0].send_signal(waiting.pop(0))

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        waiting.append(number)
        deliver()

    # Before the program starts: a signal that came while it did would end this process alone.
    numbers = [signal.SIGTERM] if is_hang_up_ignored() else [signal.SIGTERM, signal.SIGHUP]
    previous = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            started.append(process)
            deliver()
            try:
                output, _ = process.communicate()
            except KeyboardInterrupt:
                process.wait()
                raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signal.SIGTERM in received:
        raise SystemExit(EXIT_DRAINED)
    if process.returncode == EXIT_INTERRUPTED or received:
        raise KeyboardInterrupt
    return _read_answer(output, module, process.returncode)


def _read_answer(output: str, module: str, exit_code: int) -> dict[str, Any]:
    lines = output.splitlines()
    try:
        answer = parse_json(lines[-1])
    except (IndexError, ValueError) as error:
        raise ShardyardError(
            f"`python -m {module}` ended with {ending_of(exit_code)} and gave no answer. Its last "
            "lines are above; run the same command again to continue where it stopped."
        ) from error
    if "error" in answer:
        raise error_of(answer.get("exit_code"), answer["error"], page=str(answer.get("page", "")))
    assert isinstance(answer, dict)
    return answer


def error_of(exit_code: object, message: str, *, page: str = "") -> ShardyardError:
    """The error whose exit code a program ended with.

    Args:
        page: Page of the documentation that the program named.
    """
    kind = _ERRORS.get(exit_code, ShardyardError) if isinstance(exit_code, int) else ShardyardError
    return kind(message, page=page)


def ending_of(exit_code: int) -> str:
    """Return a process's end in words: its exit code, or the signal that killed it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    if name != "SIGKILL":
        return f"signal {name}"
    limit = memory_limit()
    return f"signal {name} (out of memory?{f' {limit} holds here' if limit else ''})"

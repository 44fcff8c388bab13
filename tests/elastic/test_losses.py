"""What is said of a lost worker, and which of several losses is told."""

from typing import Any

import pytest

from shardyard.elastic.losses import Loss, describe_loss, first_cause

PEER = {
    "noted_s": 11.0,
    "error": "RuntimeError",
    "message": "Connection closed by peer",
    "exit_code": 1,
    "is_own": False,
    "is_final": False,
}
OWN = {
    "noted_s": 12.0,
    "error": "DataError",
    "message": "a\nb",
    "exit_code": 1,
    "is_own": True,
    "is_final": True,
}


def loss(rank: int, exit_status: int, failure: dict[str, Any] | None = None) -> Loss:
    return describe_loss(
        rank=rank, node="n0", pid=7, exit_status=exit_status, failure=failure, agreed_s=10.0
    )


@pytest.mark.parametrize(
    ("exit_status", "signal", "words"),
    [
        (-9, "SIGKILL", "often the kernel's out-of-memory killer; look at `dmesg`"),
        (-11, "SIGSEGV", "a crash in native code"),
        (-7, "SIGBUS", "often a full /dev/shm"),
        (-10, "SIGUSR1", "killed by SIGUSR1"),
    ],
)
def test_a_signal_is_named_with_its_usual_reason(exit_status: int, signal: str, words: str) -> None:
    lost = loss(1, exit_status)
    assert lost.signal == signal and lost.exit_code is None and words in lost.cause


def test_an_error_raised_on_purpose_keeps_its_whole_message() -> None:
    assert loss(0, 1, OWN).cause == "a\nb"


def test_another_exception_is_told_by_its_last_line() -> None:
    assert loss(0, 1, {**PEER, "message": "a\nb"}).cause == "RuntimeError: b"


def test_the_first_cause_is_a_signal_then_a_purpose_then_the_earliest() -> None:
    killed, meant, peer = loss(2, -9), loss(1, 1, OWN), loss(0, 1, PEER)
    assert first_cause([peer, meant, killed]) is killed
    assert first_cause([peer, meant]) is meant
    later = loss(3, 1, {**PEER, "noted_s": 11.5})
    assert first_cause([later, peer]) is peer

"""What is said of a lost worker, and which of several losses is told."""

from typing import Any

import pytest

from shardyard.elastic.worker_failures import (
    Loss,
    causes,
    describe_dead,
    describe_loss,
    first_cause,
    host_memory_loss,
)

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


def loss(
    rank: int, exit_status: int, failure: dict[str, Any] | None = None, *, waited: bool = False
) -> Loss:
    return describe_loss(
        rank=rank, node="n0", pid=7, exit_status=exit_status, failure=failure, agreed_s=10.0,
        waited=waited,
    )  # fmt: skip


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


KILLED = loss(2, -9)
FOLLOWED = [
    loss(0, -6, waited=True),  # native code gave up in a collective
    loss(0, -6),  # or in one that is not noted
    loss(0, -11, waited=True),
    loss(0, 1, {**PEER, "noted_s": 10.5}),  # its collective broke, and it said so first
    loss(0, 1, OWN),
]


@pytest.mark.parametrize("peer", FOLLOWED)
def test_what_followed_a_kill_is_never_named_for_it(peer: Loss) -> None:
    for losses in ([peer, KILLED], [KILLED, peer]):
        assert first_cause(losses) is KILLED and causes(losses) == [KILLED]
    assert KILLED.is_clear


def test_native_code_that_gives_up_elsewhere_is_the_cause_of_what_gives_up_in_a_collective() -> (
    None
):
    crashed, aborted, broken = loss(3, -11), loss(0, -6, waited=True), loss(1, 1, PEER)
    assert causes([aborted, broken, crashed]) == [crashed]
    assert causes([aborted, broken, loss(3, 1, OWN)]) == [loss(3, 1, OWN)]
    for each in (crashed, aborted, broken):
        assert not each.is_clear  # others are asked before it is named
    assert causes([broken, aborted]) == [aborted]  # nobody else can have begun it


def test_all_that_were_killed_at_once_are_told() -> None:
    assert [each.rank for each in causes([loss(3, -9), loss(1, 1, PEER), KILLED])] == [2, 3]
    assert causes([loss(1, 1, PEER)]) == [loss(1, 1, PEER)]


def test_a_rank_that_noted_that_it_waits_may_have_followed() -> None:
    class Ended:
        pid, exitcode = 7, -6

    found = describe_dead(
        {0: Ended(), 1: Ended()}, node="n0", server=None, last_words=lambda _rank: None,
        agreed_s=0.0, waiting=[0],
    )  # fmt: skip
    assert [each.waited for each in found] == [True, False] and first_cause(found).rank == 1
    assert "waited" not in found[0].event()


@pytest.mark.parametrize(("steps_done", "is_final"), [(0, True), (1, True), (2, False)])
def test_a_memory_limit_that_ends_the_first_steps_ends_the_run(
    steps_done: int, is_final: bool
) -> None:
    why = "the memory limit of 900.0 MiB of control group /g was reached"
    found = host_memory_loss(loss(1, -9), why, steps_done=steps_done)
    assert found.is_final is is_final and why in found.cause and "dmesg" not in found.cause
    assert ("Use a smaller optim.micro_batch" in found.cause) is is_final
    assert first_cause([loss(0, 1, PEER), found]) == found

"""Lines of pods: whole, merged, bounded."""

import threading
from collections.abc import Iterator
from typing import Any

from shardyard.launchers.kubernetes.logs import follow_logs, lines_of, logs_so_far
from tests.launchers.kubernetes.api_server import RUNNING


def pod(rank: int, *, uid: str = "", restarts: int = 0) -> dict[str, Any]:
    state = {"restartCount": restarts, "state": {"running": {}}}
    labels = {"batch.kubernetes.io/job-completion-index": str(rank)}
    meta = {"name": f"p-{rank}", "uid": uid or f"u-{rank}", "labels": labels}
    return {"metadata": meta, "status": {**RUNNING, "containerStatuses": [state]}}


def test_lines_are_whole_whatever_the_pieces() -> None:
    assert list(lines_of(iter([b"a", b"b\nc", b"\n\nd"]))) == ["ab", "c", "", "d"]


def test_a_line_that_never_ends_is_cut() -> None:
    lines = list(lines_of(iter([b"x" * 2**15] * 5)))
    assert max(len(line) for line in lines) == 2**16
    assert "".join(lines) == "x" * (5 * 2**15)


def test_broken_characters_do_not_end_the_log() -> None:
    assert list(lines_of(iter([b"a\xff\n"]))) == ["a\ufffd"]


def test_a_pod_that_has_not_started_prints_nothing() -> None:
    def read(pod: dict[str, Any], follow: bool) -> Iterator[bytes]:
        raise AssertionError(f"the server would refuse {pod}, {follow}")
        yield b""

    waiting = pod(0)
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {}}
    assert list(logs_so_far([waiting], read, node=None)) == []


def test_512_nodes_are_followed_with_bounded_lines_ahead() -> None:
    printed = 0
    lock = threading.Lock()

    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        nonlocal printed
        for _ in range(20):
            with lock:
                printed += 1
            yield b"line\n"

    pods = [pod(rank) for rank in range(512)]
    follower = follow_logs(lambda: pods, read, node=None, is_over=lambda: True, poll_s=0.01)
    first = next(follower)
    assert first.text == "line"
    assert printed < 512 * 20  # readers wait for whoever prints
    assert 1 + sum(1 for _ in follower) == 512 * 20


def test_a_container_started_again_in_its_pod_is_read_again() -> None:
    rounds = iter([[pod(0)], [pod(0)], [pod(0, restarts=1)]])
    last = [pod(0, restarts=1)]
    over = iter([False, False, False, False])
    texts = iter([b"first\n", b"second\n"])

    def read(_pod: dict[str, Any], _follow: bool) -> Iterator[bytes]:
        yield next(texts)

    follower = follow_logs(
        lambda: next(rounds, last), read, node=0, is_over=lambda: next(over, True), poll_s=0.01
    )
    assert [line.text for line in follower] == ["first", "second"]

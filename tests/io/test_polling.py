"""Waiting: what comes is found, what does not is given up, and the end of a block is not missed."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardyard.io.polling import backoff_s, poll_in_background, poll_until, wait_for


@pytest.mark.parametrize("nothing", [None, False])
@pytest.mark.parametrize("found", [0, "", {}, True, "it"])
def test_what_comes_is_waited_for_and_given_back(nothing: Any, found: Any) -> None:
    answers = [nothing, nothing, found, "too late"]
    assert wait_for(lambda: answers.pop(0), every_s=0.001) == found
    assert answers == ["too late"]


@pytest.mark.parametrize("within_s", [0.0, 0.02])
def test_what_does_not_come_in_time_is_given_up_after_a_last_look(within_s: float) -> None:
    looked_s: list[float] = []
    began_s = time.monotonic()

    def look() -> bool:
        looked_s.append(time.monotonic())
        return False

    assert wait_for(look, every_s=0.005, within_s=within_s) is False
    assert looked_s and looked_s[-1] - began_s >= within_s


def test_the_last_look_comes_after_the_question_that_ends_it() -> None:
    story: list[str] = []
    ends = iter([False, False, True])

    def is_over() -> bool:
        story.append("asks")
        return next(ends)

    slept: list[float] = []
    for is_last in poll_until(is_over, every_s=2.0, sleep=slept.append):
        story.append("last" if is_last else "look")
    assert story == ["asks", "look", "asks", "look", "asks", "last"]
    assert slept == [2.0, 2.0]


def looking(limit: int) -> tuple[list[str], threading.Event, Callable[[], bool]]:
    """What each look notes, an event at the given one, and the look."""
    looks, is_there = list[str](), threading.Event()

    def look() -> bool:
        looks.append(threading.current_thread().name)
        if len(looks) == limit:
            is_there.set()
        return False

    return looks, is_there, look


def test_a_thread_looks_while_the_block_runs_and_not_behind_it() -> None:
    looks, is_there, look = looking(3)
    with poll_in_background(look, every_s=0.001, name="watch"):
        assert is_there.wait(10)
    number = len(looks)
    assert set(looks) == {"watch"} and "watch" not in {t.name for t in threading.enumerate()}
    time.sleep(0.01)
    assert len(looks) == number


@pytest.mark.parametrize(("looks_at_end", "expected"), [(False, 0), (True, 1)])
def test_a_block_that_ends_at_once_is_looked_at_where_nothing_may_be_missed(
    looks_at_end: bool, expected: int
) -> None:
    looks, _, look = looking(1)
    with poll_in_background(look, every_s=60.0, name="watch", poll_at_end=looks_at_end):
        pass
    assert len(looks) == expected


def test_a_look_that_settles_it_is_the_last() -> None:
    looks, settled = list[int](), threading.Event()

    def look() -> bool:
        looks.append(1)
        settled.set()
        return True

    with poll_in_background(look, every_s=0.001, name="watch", poll_at_end=True):
        assert settled.wait(10)
        time.sleep(0.01)
    assert len(looks) == 1


def test_a_block_that_fails_ends_the_thread_too() -> None:
    with pytest.raises(KeyError), poll_in_background(lambda: None, every_s=60.0, name="watch"):
        raise KeyError
    assert "watch" not in {thread.name for thread in threading.enumerate()}


def test_waits_double_up_to_the_longest_after_any_number_of_failures() -> None:
    waits = [backoff_s(failures, first_s=5.0, longest_s=300.0) for failures in range(5000)]
    assert waits[:8] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert set(waits[8:]) == {300.0}

"""A pause is no training: neither a stopped process nor a suspended machine counts as a step."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.train.loop import Loop
from shardyard.train.pauses import RunningClock

WATCHED = """
import sys, time
from shardyard.train.pauses import RunningClock
clock = RunningClock()
with clock.watching():
    began, wall = clock.now(), time.time()
    print("ready", flush=True)
    sys.stdin.readline()
    print(clock.now() - began, time.time() - wall, [each.what for each in clock.take_pauses()])
"""


class Clocks:
    """Three clocks of the kernel, set by hand."""

    def __init__(self) -> None:
        self.monotonic_s = self.boot_s = 100.0
        self.cpu_s = self.queued_s = 0.0
        self.clock = RunningClock(
            monotonic=lambda: self.monotonic_s,
            boot_time=lambda: self.boot_s,
            cpu_time=lambda: self.cpu_s,
            queued_time=lambda: self.queued_s,
        )
        self.clock._is_watched = True

    def go(self, seconds: float, *, cpu_s: float = 0.0, suspended_s: float = 0.0) -> float:
        self.monotonic_s += seconds
        self.boot_s += seconds + suspended_s
        self.cpu_s += cpu_s
        return self.clock.now()


def test_a_gap_without_processor_time_is_a_stop_and_one_with_it_is_none() -> None:
    clocks = Clocks()
    clocks.go(0.0)
    assert clocks.go(0.5) == pytest.approx(100.5)
    assert clocks.go(30.0, cpu_s=25.0) == pytest.approx(130.5)  # only the thread was late
    clocks.queued_s += 4.0
    assert clocks.go(5.0) == pytest.approx(135.5)  # a busy machine
    assert clocks.clock.take_pauses() == []
    assert clocks.go(60.0) == pytest.approx(135.7)
    [pause] = clocks.clock.take_pauses()
    assert pause.what == "stopped" and pause.seconds == pytest.approx(59.8)
    assert clocks.clock.take_pauses() == []


def test_a_suspension_is_what_boot_time_counts_and_the_monotonic_clock_does_not() -> None:
    clocks = Clocks()
    assert clocks.go(0.1, suspended_s=3600.0) == pytest.approx(100.1)
    [pause] = clocks.clock.take_pauses()
    assert pause.what == "suspended" and pause.seconds == pytest.approx(3600.0)
    assert clocks.go(0.1) == pytest.approx(100.2)
    assert clocks.clock.take_pauses() == []


@pytest.mark.heavy
def test_a_process_that_was_stopped_for_three_seconds_ran_for_less_than_two() -> None:
    command = [sys.executable, "-c", WATCHED]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        ran, wall, *what = process.stdout.readline().split()
    assert float(wall) >= 3.0 and float(ran) < 2.0 and what == ["['stopped']"]


def test_the_loop_reports_each_pause_and_leaves_it_out_of_what_stood_still() -> None:
    told: list[Any] = []
    clocks = Clocks()
    loop = object.__new__(Loop)
    loop.clock, loop.step_ended_at = clocks.clock, 100.0
    loop.training = SimpleNamespace(  # type: ignore[assignment]
        report=lambda kind, **fields: told.append((kind, fields))
    )
    began = clocks.clock.now()
    clocks.go(8.2)
    loop._exclude_from_step_time(
        8.2, began
    )  # a profile that was written in 0.2 s, and a stop of 8 s
    assert loop.step_ended_at == pytest.approx(100.2)
    loop._report_pauses(7)
    assert told == [("paused", {"step": 7, "what": "stopped", "seconds": pytest.approx(8.0)})]

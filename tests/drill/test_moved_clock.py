"""A wall clock that a drill moves, in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardyard.drill.sandbox import SkewedClock

LOOKS = """
import datetime, pickle, sys, time
from datetime import datetime as early
while sys.stdin.readline():
    made = pickle.loads(pickle.dumps(datetime.datetime.now(datetime.timezone.utc)))
    assert isinstance(made, datetime.datetime) and early is datetime.datetime
    print(time.time(), made.timestamp(), time.time_ns() / 1e9, time.monotonic(), flush=True)
"""
HOUR_S = 3600.0


@pytest.mark.heavy
def test_a_running_process_goes_by_the_clock_that_is_moved(tmp_path: Path) -> None:
    clock = SkewedClock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", LOOKS], env={**os.environ, **clock.environment}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for seconds in (0.0, HOUR_S, -HOUR_S):
            clock.move(seconds)
            process.stdin.write("\n")
            process.stdin.flush()
            *told, monotonic_s = map(float, process.stdout.readline().split())
            assert all(abs(each - time.time() - seconds) < HOUR_S / 2 for each in told)
            assert abs(monotonic_s - time.monotonic()) < HOUR_S / 2

"""The benchmarks of the network's benchmark run, small; how long anything takes is no matter."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.network_loop import measure
from tests.debian_packages import need
from tests.mounts import needs_root


@pytest.mark.slow
def test_rows_of_both_are_timed_alternately() -> None:
    rows = measure(2, pairs=2, sizes=(1024,))
    assert [row["collective"] for row in rows] == [
        "all_reduce", "all_gather", "reduce_scatter", "alltoall"
    ]  # fmt: skip
    for row in rows:
        assert len(row["bench_s"]) == len(row["loop_s"]) == 2 and row["ratio"] > 0
        assert row["is_met"] in (True, False)


def slow_link(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.slow_link", *words],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_root
@pytest.mark.system
def test_a_host_whose_link_has_a_fifth_is_named() -> None:
    need("iproute2")
    one, last = slow_link("--times=1", "--hosts=3")
    assert last == {"times": 1, "right": 1, "slurm": False}
    assert one["named"] == ["host-0"]


@needs_root
@pytest.mark.slow
def test_of_four_real_slurm_nodes_the_one_with_a_slow_link_is_named_ten_times_of_ten() -> None:
    need("iproute2", "slurmctld", "slurmd", "slurm-client")
    assert slow_link("--times=10", "--slurm")[-1] == {"times": 10, "right": 10, "slurm": True}

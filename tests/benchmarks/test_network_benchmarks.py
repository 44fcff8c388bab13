"""The benchmarks of the network's benchmark run, small; how long anything takes is no matter."""

import json
import os
import subprocess
import sys
from pathlib import Path
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


def slow_link(out: Path, *words: str) -> dict[str, Any]:
    """The file of the result."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.slow_link", *words, f"--out={out}"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@needs_root
@pytest.mark.system
def test_a_host_whose_link_has_a_fifth_is_named(tmp_path: Path) -> None:
    need("iproute2")
    found = slow_link(tmp_path / "result.json", "--times=1", "--hosts=3")
    assert found["right"] == 1 and not found["slurm"]
    assert [time["named"] for time in found["times"]] == [["host-0"]]


@needs_root
@pytest.mark.slow
def test_of_four_real_slurm_nodes_the_one_with_a_slow_link_is_named_ten_times_of_ten(
    tmp_path: Path,
) -> None:
    need("iproute2", "slurmctld", "slurmd", "slurm-client")
    found = slow_link(tmp_path / "result.json", "--times=10", "--slurm")
    assert found["right"] == len(found["times"]) == 10 and found["slurm"]

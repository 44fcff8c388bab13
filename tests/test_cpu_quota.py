"""The cores a process may keep busy; its control group's limit: the tightest, or not known."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.control_groups import usable_cores
from shardyard.telemetry.host import Throttled
from tests.mounts import needs_root

UNKNOWN = {"cpu_limit_cores": None, "cpu_limit_periods": None, "cpu_throttled_periods": None}
STAT = "usage_usec 900\nnr_periods 40\nnr_throttled 25\nthrottled_usec 70000\n"


def tree(root: Path, cgroup: str, **files: str) -> Path:
    """A system with this /proc/self/cgroup, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_of_its_own_name_space_has_its_limit_at_the_top(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", **{"cpu.max": "250000 100000\n", "cpu.stat": STAT})
    assert Throttled(root).read() == {
        "cpu_limit_cores": 2.5, "cpu_limit_periods": 40, "cpu_throttled_periods": 25,
    }  # fmt: skip


def test_of_a_job_step_the_tightest_limit_above_it_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "0::/slurm/job_7/step_0\n",
        **{
            "slurm/job_7/step_0/cpu.max": "max 100000\n", "slurm/job_7/step_0/cpu.stat": "x 1\n",
            "slurm/job_7/cpu.max": "400000 100000\n", "slurm/job_7/cpu.stat": STAT,
            "slurm/cpu.max": "3200000 100000\n", "slurm/cpu.stat": "nr_periods 1\n",
        },
    )  # fmt: skip
    assert Throttled(root).read()["cpu_limit_cores"] == 4.0
    assert Throttled(root).read()["cpu_throttled_periods"] == 25


def test_where_only_the_end_of_the_hosts_path_is_seen_the_top_is_the_group(tmp_path: Path) -> None:
    files = {"cpu.max": "100000 100000\n", "cpu.stat": STAT}
    root = tree(tmp_path, "0::/kubepods/pod1/container\n", **files)
    assert Throttled(root).read()["cpu_limit_cores"] == 1.0


def test_version_1_is_read_too(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n0::/\n",
        **{
            "cpu/docker/a/cpu.cfs_quota_us": "50000\n",
            "cpu/docker/a/cpu.cfs_period_us": "100000\n",
            "cpu/docker/a/cpu.stat": "nr_periods 40\nnr_throttled 25\nthrottled_time 9\n",
            "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    assert Throttled(root).read() == {
        "cpu_limit_cores": 0.5, "cpu_limit_periods": 40, "cpu_throttled_periods": 25,
    }  # fmt: skip


@pytest.mark.parametrize(
    "files",
    [{}, {"cpu.max": "max 100000\n", "cpu.stat": STAT}, {"cpu.max": "odd\n", "cpu.stat": STAT}],
)
def test_without_a_limit_nothing_is_known(tmp_path: Path, files: dict[str, str]) -> None:
    assert Throttled(tree(tmp_path, "0::/\n", **files)).read() == UNKNOWN
    assert Throttled(tmp_path / "elsewhere").read() == UNKNOWN


def test_a_group_that_is_gone_leaves_its_counts_unknown(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", **{"cpu.max": "100000 100000\n", "cpu.stat": STAT})
    limit = Throttled(root)
    (root / "sys/fs/cgroup/cpu.stat").unlink()
    assert limit.read() == {**UNKNOWN, "cpu_limit_cores": 1.0}


@pytest.mark.parametrize(
    ("limit", "usable"), [("350000", 3), ("50000", 1), ("max", 8), ("6400000", 8)]
)
def test_as_many_cores_are_usable_as_there_are_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usable: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    root = tree(tmp_path, "0::/\n", **{"cpu.max": f"{limit} 100000\n", "cpu.stat": STAT})
    assert usable_cores(root) == usable
    assert usable_cores(tmp_path / "elsewhere") == 8


@pytest.fixture
def group() -> Iterator[Path]:
    """A real one with a limit of a fifth of a core."""
    one = Path("/sys/fs/cgroup/cpu")
    folder = (one if one.is_dir() else one.parent) / "shardyard-test-limit"
    try:
        folder.mkdir()
        if one.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("20000")
        else:
            (folder / "cpu.max").write_text("20000 100000")
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {error.strerror}")
    yield folder
    deadline_s = time.monotonic() + 10.0
    while (folder / "cgroup.procs").read_text():
        assert time.monotonic() < deadline_s, "a process is left in the group"
        time.sleep(0.05)
    folder.rmdir()


BUSY = """
import os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from shardyard.control_groups import usable_cores
from shardyard.telemetry.host import Throttled
assert usable_cores() == 1
limit = Throttled()
before, until = limit.read(), time.monotonic() + 2.0
while time.monotonic() < until:
    pass
after = limit.read()
periods, throttled = (after[k] - before[k] for k in ("cpu_limit_periods", "cpu_throttled_periods"))
print(after["cpu_limit_cores"], throttled / periods)
"""


@needs_root
@pytest.mark.heavy
def test_the_kernel_counts_the_periods_in_which_a_process_stood_still(group: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(group)], capture_output=True, text=True, check=True
    )
    cores, share = map(float, done.stdout.split())
    assert cores == 0.2 and share > 0.5


def test_nothing_else_asks_the_machine_how_many_cores_there_are() -> None:
    source = Path(__file__).parents[1] / "src/shardyard"
    asking = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"sched_getaffinity|cpu_count", path.read_text())
    }
    told = "telemetry/__main__.py"  # says how many the node has, beside the limit
    assert asking == {"control_groups.py", told}

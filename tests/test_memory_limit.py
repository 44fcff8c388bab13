"""The memory that a process may fill, and what the kernel killed for want of it."""

from pathlib import Path

import pytest

from shardyard.control_groups import (
    OutOfMemoryKills,
    machine_memory_bytes,
    memory_limit,
    usable_memory_bytes,
)
from tests.test_cpu_quota import tree

MIB = 2**20


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/\n", {"memory.max": f"{900 * MIB}\n"}),  # a container, version 2
        ("0::/job/step\n", {"job/memory.max": f"{900 * MIB}\n", "job/step/memory.max": "max\n"}),
        ("9:memory:/docker/a\n0::/\n", {"memory/docker/a/memory.limit_in_bytes": str(900 * MIB)}),
        ("9:memory:/docker/a\n", {"memory/memory.limit_in_bytes": f"{900 * MIB}\n"}),
    ],
)
def test_the_tightest_limit_of_memory_counts_in_both_versions(
    tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    root = tree(tmp_path, cgroup, **files)
    assert usable_memory_bytes(root) == 900 * MIB
    assert "memory limit of 900.0 MiB of control group" in str(memory_limit(root))


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("", {}),
        ("0::/\n", {"memory.max": "max\n"}),
        ("9:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}),
    ],
)
def test_without_a_limit_the_machine_has_what_it_has(
    tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    root = tree(tmp_path, cgroup, **files)
    assert memory_limit(root) is None and usable_memory_bytes(root) == machine_memory_bytes()


def test_files_that_the_kernel_would_drop_are_not_used_memory(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "0::/\n",
        **{"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "inactive_file 500\n"},
    )  # fmt: skip
    limit = memory_limit(root)
    assert limit is not None and limit.used_bytes == 200


@pytest.mark.parametrize(
    ("cgroup", "limit", "peak", "counter"),
    [
        ("0::/\n", "memory.max", "memory.peak", "memory.events"),
        ("9:memory:/\n", "memory/memory.limit_in_bytes", "memory/memory.max_usage_in_bytes",
         "memory/memory.oom_control"),
    ],
)  # fmt: skip
def test_a_kill_for_want_of_memory_is_told_with_limit_and_peak(
    tmp_path: Path, cgroup: str, limit: str, peak: str, counter: str
) -> None:
    files = {limit: f"{900 * MIB}\n", peak: f"{899 * MIB}\n", counter: "oom 1\noom_kill 1\n"}
    root = tree(tmp_path, cgroup, **files)
    kills = OutOfMemoryKills(root)
    assert kills.words() is None
    (root / "sys/fs/cgroup" / counter).write_text("oom 2\noom_kill 2\n")
    words = kills.words() or ""
    assert words.startswith("the memory limit of 900.0 MiB of control group ")
    assert words.endswith(" was reached, at a peak of 899.0 MiB")
    assert OutOfMemoryKills(root).words() is None

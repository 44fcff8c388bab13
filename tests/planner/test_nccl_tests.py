"""nccl-tests' own text, as it stands in logs: the published table of two p4d comes out equal."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.planner.calibration import read_calibration
from shardyard.planner.measured_network import CollectiveTable, read_nccl_table

P4D = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"
NEW = (
    "  1048576   262144   float   sum   -1   100.0   10.49   19.66   0   101.0   10.38   19.47   0"
)

PREFIXES: dict[str, Callable[[int], str]] = {
    "none": lambda _: "",
    "kubectl logs --prefix": lambda _: "[pod/nccl-test-launcher-x7k2p/nccl] ",
    "kubectl logs --timestamps": lambda line: f"2026-11-22T10:00:{line % 60:02}.123456789Z ",
    "mpirun --tag-output": lambda _: "[1,0]<stdout>:",
    "srun -l": lambda _: "0: ",
    "shardyard logs": lambda _: "node 0 | ",
}


def printed(prefix: Callable[[int], str]) -> str:
    """The rows of the published table between lines of NCCL, as a version of 2022 printed."""
    with P4D.open(newline="") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) validation: 1"]
    for rank in range(16):
        host = f"nccl-test-worker-{rank // 8}"
        lines.append(f"#   Rank {rank:2} Pid {30 + rank} on {host} device {rank % 8} [0x10] A100")
    lines.append("nccl-test-worker-0:30:30 [0] NCCL INFO NET/OFI Selected Provider is efa")
    lines.append("#       size  count   type   redop   time  algbw  busbw  error   time  algbw ...")
    for row in rows:
        lines.append("  ".join(row))
        lines.append("nccl-test-worker-1:31:40 [0] NCCL INFO NET/OFI [2] Using EFA device 4 of 4")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 8.24"]
    return "".join(f"{prefix(number)}{line}\n" for number, line in enumerate(lines))


@pytest.mark.parametrize("name", PREFIXES)
def test_raw_output_of_nccl_tests_is_taken_as_pasted_from_a_log_of_a_pod(
    name: str, tmp_path: Path
) -> None:
    log = tmp_path / "pod.log"
    log.write_text(printed(PREFIXES[name]))
    given, published = CollectiveTable.read(log), CollectiveTable.read(P4D)
    assert len(given.rows) == 28 and given.rows == published.rows
    assert (given.ranks, given.ranks_per_node) == (published.ranks, 8) == (16, 8)
    cluster = cluster_of(instance("p4d.24xlarge"), 2)
    ours, theirs = (read_calibration(path, cluster=cluster).link_between for path in (log, P4D))
    assert ours is not None and theirs is not None
    assert (ours.bytes_per_s, ours.latency_s) == (theirs.bytes_per_s, theirs.latency_s)


def test_the_average_bus_bandwidth_is_recomputed_from_the_rows() -> None:
    table = read_nccl_table(printed(PREFIXES["none"]))
    assert table is not None
    assert f"{table.average_busbw_gbs:.2f}" == "8.24"  # as published


def test_a_row_of_a_newer_version_has_a_root_and_counts_wrong_values() -> None:
    table = read_nccl_table(NEW)
    assert table is not None
    (row,) = table.rows
    assert (row.size_bytes, row.redop, row.out_busbw_gbs, row.in_time_us) == (
        1048576, "sum", 19.66, 101.0
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("  sum  ", "  none  "), "it is of redop none, and a link is fitted to all-reduces"),
        (("# nThread", "$ /opt/all_gather_perf -b 8\n# nThread"), "it is of all_gather_perf"),
        (("values : 0 OK", "values : 12 FAILED"), "12 values came out wrong"),
        (("Rank 15", "Rank 14"), "its header lists 15 ranks, and its bandwidths are those of 16"),
    ],
)
def test_a_log_that_no_link_follows_from_is_refused_with_the_reason(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    log = tmp_path / "pod.log"
    log.write_text(printed(PREFIXES["none"]).replace(*change))
    with pytest.raises(RequestError, match=words):
        CollectiveTable.read(log)


def test_text_without_a_table_says_what_can_be_given(tmp_path: Path) -> None:
    log = tmp_path / "pod.log"
    log.write_text("hello\n")
    with pytest.raises(RequestError, match="Give what all_reduce_perf of nccl-tests prints"):
        CollectiveTable.read(log)

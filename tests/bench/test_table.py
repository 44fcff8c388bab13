"""nccl-tests' table to the column, bus bandwidth by its definition, and what it is held against."""

import csv
from pathlib import Path

import pytest

from shardyard.bench import nccl_table
from shardyard.bench.nccl_table import CollectiveTiming
from shardyard.planner.measured_network import is_of_table, read_nccl_table
from shardyard.rundir.network import COLLECTIVES, Collective, NetworkBench

P4D = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"
BENCH = NetworkBench(
    collectives=("all_reduce",), begin_bytes=8, end_bytes=2**30, warmup=5, iterations=20,
    is_pairs=False, processes=8,
)  # fmt: skip
RANKS = [
    {"node": f"node-{rank // 8}", "pid": 40 + rank, "device": rank % 8, "kind": "A100"}
    for rank in range(16)
]

# As versions 2.13 and later print them: NVIDIA/nccl-tests, src/util.cu.
HEAD = """\
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
"""  # noqa: W291, E501
ROW = "     1048576        262144     float     sum      -1   1599.2    0.66    1.23      0   1595.3    0.66    1.23      0"  # noqa: E501


def measured(**changes: object) -> CollectiveTiming:
    values = {
        "collective": "all_reduce", "size_bytes": 2**20, "count": 2**18, "out_s": 1599.2e-6,
        "out_wrong": 0, "in_s": 1595.3e-6, "in_wrong": 0,
    }  # fmt: skip
    return CollectiveTiming(**{**values, **changes})  # type: ignore[arg-type]


def published() -> list[CollectiveTiming]:
    """The table of two p4d, by its times alone."""
    with P4D.open(newline="") as file:
        return [
            measured(
                size_bytes=int(line["size_bytes"]), count=int(line["count"]),
                out_s=float(line["out_time_us"]) / 1e6, in_s=float(line["in_time_us"]) / 1e6,
            )
            for line in csv.DictReader(file)
        ]  # fmt: skip


def test_the_table_is_that_of_nccl_tests_to_the_column() -> None:
    assert "\n".join(nccl_table.preamble("all_reduce", BENCH, RANKS)[-3:]) + "\n" == HEAD
    assert nccl_table.row(measured(), ranks=16) == ROW


@pytest.mark.parametrize(
    ("us", "shown"), [(5.554, "   5.55 "), (631.44, "  631.4 "), (12738.4, "  12738 ")]
)
def test_times_have_as_many_digits_as_nccl_tests_give_them(us: float, shown: str) -> None:
    assert shown in nccl_table.row(measured(out_s=us / 1e6), ranks=2)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("alltoall", 0.75)],
)
def test_bus_bandwidth_is_defined_as_nccl_tests_define_it(
    collective: Collective, factor: float
) -> None:
    row = measured(collective=collective, size_bytes=4_000_000, out_s=0.001, in_s=0.002)
    assert row.busbw_gbs(4) == pytest.approx((4 * factor, 2 * factor))


def test_the_published_table_is_printed_as_it_stands_and_read_back_equal() -> None:
    rows = published()
    lines = [
        *nccl_table.preamble("all_reduce", BENCH, RANKS),
        *(nccl_table.row(row, 16) for row in rows),
    ]
    read = read_nccl_table("\n".join([*lines, *nccl_table.ending(rows, 16)]))
    assert read is not None and len(read.rows) == 28
    assert (read.ranks, read.ranks_per_node, read.programs) == (16, 8, ("all_reduce",))
    with P4D.open(newline="") as file:
        for line, row in zip(csv.DictReader(file), read.rows, strict=True):
            assert float(line["out_time_us"]) == row.out_time_us
            assert float(line["in_time_us"]) == row.in_time_us
            assert abs(float(line["out_busbw_gbs"]) - row.out_busbw_gbs) < 0.011
    assert f"{nccl_table.average_busbw_gbs(rows, 16):.2f}" == "8.24"  # as published
    assert all(map(is_of_table, lines))
    assert not is_of_table("ip-10-0-0-1:88:95 [0] NCCL INFO Using network Socket")


def test_of_several_tables_of_one_log_the_all_reduces_are_read() -> None:
    lines = []
    for collective in COLLECTIVES:
        rows = [measured(collective=collective, size_bytes=2**k, count=2**k // 4) for k in (20, 21)]
        lines += [*nccl_table.preamble(collective, BENCH, RANKS)]
        lines += [*(nccl_table.row(row, 16) for row in rows), *nccl_table.ending(rows, 16)]
    read = read_nccl_table("\n".join(reversed_tables(lines)))
    assert read is not None and len(read.rows) == 2 and read.errors() == []


def reversed_tables(lines: list[str]) -> list[str]:
    """The same with the all-reduces last: it does not matter where they stand."""
    end = next(n for n, line in enumerate(lines) if n and line.startswith("# Collective"))
    return lines[end:] + lines[:end]


def test_wrong_values_are_counted_and_what_is_not_checked_says_so() -> None:
    rows = [
        measured(collective="alltoall", out_wrong=3, in_wrong=None),
        measured(collective="alltoall", in_wrong=None),
    ]
    assert nccl_table.row(rows[0], 2).endswith("    N/A")
    assert nccl_table.ending(rows, 2)[0] == "# Out of bounds values : 3 FAILED"


# --- what must go between nodes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "nodes", "must"),
    [
        ("all_reduce", 2, 2000),  # each hands the other its sum
        ("all_reduce", 4, 6000),
        ("all_gather", 4, 3000),  # each lacks three quarters
        ("reduce_scatter", 4, 3000),
        ("alltoall", 2, 4000),  # of 8 ranks each sends half of its 1,000 bytes away
        ("all_reduce", 1, 0),
        ("alltoall", 1, 0),
    ],
)
def test_what_all_nodes_must_send_follows_from_the_collective(
    collective: Collective, nodes: int, must: int
) -> None:
    assert nccl_table.bytes_between_nodes(collective, 1000, ranks=8, nodes=nodes) == must
    assert nccl_table.required_send_bytes(collective, {1000: 3}, ranks=8, nodes=nodes) == 3 * must


def test_the_interfaces_of_efa_are_counted_as_one_and_set_against_what_must_be_sent() -> None:
    sent = [{"efa/rdmap16": 2**29, "efa/rdmap32": 2**29, "eth0": 1024}, {"efa/rdmap16": 2**30}]
    carried = nccl_table.bytes_by_interface(sent)
    assert carried == {"efa": 2**31, "eth0": 1024}
    assert nccl_table.traffic_check_lines(carried, 2**31) == [
        "# efa carried 2.0 GiB of 2.0 GiB that nodes must send",
        "# eth0 carried 1.0 KiB of 2.0 GiB that nodes must send",
    ]

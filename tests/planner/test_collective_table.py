"""Tables of measured collectives: the published one of 2 x p4d, one made from a known link, bad
ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import NVLINK_3, Link, network
from shardyard.planner.collectives import Group, all_reduce_s
from shardyard.planner.measured_network import CollectiveTable, fit_link

P4D = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "nccl_all_reduce_2x_p4d_4efa.csv"
CLUSTER = ClusterHardware(
    name="2 x p4d", accelerator=instance("p4d.24xlarge").accelerator, devices_per_node=8, nodes=2,
    inside=NVLINK_3, between=network("4 x EFA", gbps=50, source="400 Gb/s for 8"),
    host_memory_bytes=None, local_disk_bytes=None, usd_per_node_hour=None, price_source="",
)  # fmt: skip
HEAD = "size_bytes,out_time_us,out_algbw_gbs,out_busbw_gbs"


def csv_file(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def json_file(folder: Path, content: Any) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return path


def table_of(cluster: ClusterHardware, group: Group) -> CollectiveTable:
    sizes = [2.0**power for power in range(10, 31)]
    return CollectiveTable(
        source="made.csv", ranks=group.size, ranks_per_node=group.per_node,
        rows=tuple((size, all_reduce_s(size, group, cluster)) for size in sizes),
    )  # fmt: skip


def test_the_published_table_has_28_rows_of_16_ranks() -> None:
    table = CollectiveTable.read(P4D)
    assert (len(table.rows), table.ranks, table.ranks_per_node) == (28, 16, None)
    assert [nbytes for nbytes, _ in table.rows] == [2**power for power in range(3, 31)]
    assert table.rows[0][1] == pytest.approx(629.7e-6)
    assert table.rows[-1][1] == pytest.approx(47.904e-3)
    assert table.group(CLUSTER) == Group(size=16, per_node=8)


def test_one_link_explains_every_row_of_the_published_table_from_64_kib_on() -> None:
    table = CollectiveTable.read(P4D)
    link = fit_link(table, cluster=CLUSTER)
    fitted = replace(CLUSTER, between=link)
    for nbytes, time_s in table.rows:
        if nbytes >= 65536:
            assert all_reduce_s(nbytes, table.group(CLUSTER), fitted) == pytest.approx(
                time_s, rel=0.15
            )
    # 42 of 50 GB/s a node at 1 GiB, said as a datasheet would that is reached to 90 %
    assert link.bytes_per_s * 8 == pytest.approx(42e9 / 0.9, rel=0.03)
    assert link.source == "measured, nccl_all_reduce_2x_p4d_4efa.csv, 16 ranks"
    assert link.name == "4 x EFA, measured"


@pytest.mark.parametrize(
    "group",
    [Group(size=8, per_node=8), Group(size=2, per_node=1), Group(size=16, per_node=8)],
)
def test_the_link_a_table_was_made_with_is_found_again(group: Group) -> None:
    link = fit_link(table_of(CLUSTER, group), cluster=CLUSTER)
    made: Link = CLUSTER.inside if group.nodes == 1 else CLUSTER.between
    assert link.bytes_per_s == pytest.approx(made.bytes_per_s, rel=0.05)
    # between nodes the model bends where tree gives way to ring; a line does not
    assert link.latency_s == pytest.approx(made.latency_s, rel=0.15)


def test_one_bad_row_does_not_tilt_the_line() -> None:
    group = Group(size=8, per_node=8)
    table = table_of(CLUSTER, group)
    rows = [(n, 3 * t if n == 2**25 else t) for n, t in table.rows]
    link = fit_link(replace(table, rows=tuple(rows)), cluster=CLUSTER)
    assert link.bytes_per_s == pytest.approx(CLUSTER.inside.bytes_per_s, rel=0.05)


def test_ranks_may_be_given_as_columns(tmp_path: Path) -> None:
    rows = [f"{2**power},{100 + 2**power / 1e4},64,4" for power in range(16, 24)]
    path = csv_file(tmp_path, "size_bytes,out_time_us,ranks,ranks_per_node", *rows)
    table = CollectiveTable.read(path)
    assert (table.ranks, table.ranks_per_node) == (64, 4)
    assert table.group(CLUSTER).nodes == 16


def test_a_table_may_be_json(tmp_path: Path) -> None:
    rows = [{"size_bytes": 2**power, "time_s": 1e-4 + 2**power / 1e10} for power in range(16, 24)]
    content = {
        "kind": "collectives", "collective": "all_reduce", "ranks": 2, "ranks_per_node": 2,
        "rows": rows,
    }  # fmt: skip
    link = fit_link(CollectiveTable.read(json_file(tmp_path, content)), cluster=CLUSTER)
    # two ranks send half twice: 10 GB/s, of which the datasheet would say 10 / 0.8
    assert link.bytes_per_s == pytest.approx(10e9 / 0.8, rel=1e-3)


def test_missing_columns_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        CollectiveTable.read(csv_file(tmp_path, "size,out_time_us", "8,1"))
    text = str(caught.value)
    assert "table.csv has 3 problems and was not used" in text
    assert all(f"no column '{name}'" in text for name in ("size_bytes", "out_algbw_gbs"))
    assert "nccl-tests' columns" in text


def test_everything_wrong_with_the_rows_is_told_at_once(tmp_path: Path) -> None:
    path = csv_file(tmp_path, HEAD, "64,5,1,1", "32,-1,1,1", "128,soon,1,1")
    with pytest.raises(RequestError) as caught:
        CollectiveTable.read(path)
    text = str(caught.value)
    assert "3 problems" in text
    assert "row 2: a time of -1e-06 s is not above 0" in text
    assert "row 2: size 32 comes after 64, sizes must grow" in text
    assert "row 3: out_time_us='soon' is not a number" in text


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="1 problem and was not used:\n  no rows"):
        CollectiveTable.read(csv_file(tmp_path, HEAD))


def test_ranks_that_the_bandwidths_do_not_tell_are_asked_for(tmp_path: Path) -> None:
    # an all-gather: bus over algorithm bandwidth is (n - 1) / n
    path = csv_file(tmp_path, HEAD, "65536,10,6.5,5.7", "131072,20,6.5,5.7", "262144,40,6.5,5.7")
    with pytest.raises(RequestError, match=r"is 0\.877, .*\n.*all_reduce_perf, or add columns"):
        CollectiveTable.read(path)
    # 1,024 ranks: 1.998, which two printed decimals do not tell from 512 or infinity
    path = csv_file(tmp_path, HEAD, "65536,10,40.00,79.92")
    with pytest.raises(RequestError, match="no number of ranks follows"):
        CollectiveTable.read(path)


def test_a_column_of_ranks_has_one_value(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "size_bytes,out_time_us,ranks", "8,1,2", "16,2,4")
    with pytest.raises(RequestError, match="column 'ranks' is not the same whole number"):
        CollectiveTable.read(path)


def test_wrong_json_is_told_with_what_to_give(tmp_path: Path) -> None:
    content = {"kind": "collectives", "collective": "broadcast", "ranks": 1, "rows": []}
    with pytest.raises(RequestError) as caught:
        CollectiveTable.read(json_file(tmp_path, content))
    text = str(caught.value)
    assert "collective='broadcast' is not 'all_reduce'" in text
    assert "ranks=1 is not a number of at least 2" in text
    assert "ranks_per_node=None" in text
    assert 'Give {"kind": "collectives"' in text
    (tmp_path / "table.json").write_text('{"kind": ')
    with pytest.raises(RequestError, match="is not JSON"):
        CollectiveTable.read(tmp_path / "table.json")


def test_a_table_without_large_rows_gives_no_link() -> None:
    table = CollectiveTable(
        source="small.csv", ranks=8, ranks_per_node=8, rows=((8.0, 1e-5), (65536.0, 2e-5))
    )
    with pytest.raises(RequestError, match=r"1 rows of at least 65,536 bytes.*Measure up to 1 GiB"):
        fit_link(table, cluster=CLUSTER)


def test_a_time_that_does_not_grow_gives_no_rate() -> None:
    rows = tuple((2.0**power, 1e-3 - power * 1e-5) for power in range(16, 24))
    table = CollectiveTable(source="odd.csv", ranks=8, ranks_per_node=8, rows=rows)
    with pytest.raises(RequestError, match="does not grow with the size"):
        fit_link(table, cluster=CLUSTER)

"""A node's telemetry as it is read: in part, torn, odd, or much longer than anybody looks at."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.telemetry import latest_sample, read_downsampled, read_telemetry

HEAD = {"t": 1.0, "node": "a", "attempt": 0, "cores": 8, "names": ["H100"] * 2,
        "memory_bytes": [80, None]}  # fmt: skip


def line(t: float, **more: Any) -> dict[str, Any]:
    return {
        "t": t,
        "devices": {"power_w": [600.0 + t, None]},
        "host": {"cpu_busy_cores": 2},
        **more,
    }


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    )
    return path


def test_lines_have_the_head_before_them(tmp_path: Path) -> None:
    file = write(tmp_path / "n", HEAD, line(2.0), {**HEAD, "attempt": 1}, line(3.0))
    assert [(s.t, s.head.attempt) for s in read_telemetry(file)] == [(2.0, 0), (3.0, 1)]
    newest = latest_sample(file)
    assert newest is not None and (newest.t, newest.head.attempt) == (3.0, 1)
    assert newest.devices == {"power_w": (603.0, None)}


def test_no_file_and_no_line_are_no_sample(tmp_path: Path) -> None:
    assert list(read_telemetry(tmp_path / "none")) == []
    assert latest_sample(tmp_path / "none") is None
    assert latest_sample(write(tmp_path / "head", HEAD)) is None
    assert read_downsampled(tmp_path / "none", most=10) == []


@pytest.mark.parametrize(
    "odd",
    ["{torn", "[]", "7", '{"t": "now"}', "[" * 100_000, '{"t": null, "devices": {}}', "\x00" * 50],
)
def test_a_line_of_another_form_is_passed_over(tmp_path: Path, odd: str) -> None:
    file = write(tmp_path / "n", HEAD, odd, line(2.0), odd)
    assert [s.t for s in read_telemetry(file)] == [2.0]


@pytest.mark.parametrize(
    "odd",
    [{"devices": []}, {"devices": {"power_w": "much"}}, {"xid": [[1], ["a", 2], 3]}, {"host": 3},
     {"stuck": {"power_w": "x"}}, {"ranks": [1]}, {"unanswered": {"a": 1}}, {"findings": ["x"]}],
)  # fmt: skip
def test_what_of_a_line_is_odd_is_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    (sample,) = read_telemetry(write(tmp_path / "n", HEAD, {**line(2.0), **odd}))
    assert sample.xid == () and sample.unanswered == () and sample.findings == ()
    assert all(isinstance(v, float | None) for row in sample.devices.values() for v in row)


def test_a_long_file_is_read_in_places_spread_evenly(tmp_path: Path) -> None:
    file = write(tmp_path / "n", HEAD, *(line(float(t), pad="x" * 3000) for t in range(2, 1002)))
    found = read_downsampled(file, most=50)
    assert len(found) == 50
    gaps = [b.t - a.t for a, b in itertools.pairwise(found)]
    assert min(gaps) >= 15 and max(gaps) <= 25
    assert found[0].devices["power_w"][0] == 602.0

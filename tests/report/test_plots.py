"""Thinning a curve keeps what a reader looks for."""

from pathlib import Path

from shardyard.report.charts import bucket_medians, decimate, draw, panels
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import RunWriter, resolved_run, write_whole_run


def test_a_short_curve_is_left_as_it_is() -> None:
    assert decimate([1, 2, 3], [5, 4, 6]) == ([1, 2, 3], [5, 4, 6])


def test_a_spike_survives_thinning_and_order_is_kept() -> None:
    values = [0.0] * 10_000
    values[7_777] = 9.0
    xs, ys = decimate(list(range(10_000)), values, 100)
    assert len(xs) <= 100
    assert xs == sorted(xs)
    assert (7_777, 9.0) in zip(xs, ys, strict=True)


def test_a_spike_does_not_drag_the_smoothed_curve() -> None:
    values = [1.0] * 600
    values[300] = 1000.0
    xs, ys = bucket_medians(list(range(600)), values, 60)
    assert len(xs) == 60
    assert set(ys) == {1.0}


def test_two_panels_share_no_id() -> None:
    first = draw("a", lambda axes: axes.plot([1, 2], [3, 4]))
    second = draw("b", lambda axes: axes.plot([1, 2], [3, 4]))
    assert 'id="a-' in first and 'id="b-' in second
    assert 'id="a-' not in second
    assert first.startswith("<svg") and first.endswith("</svg>")
    assert 'width="' not in first[: first.index(">")]


def test_a_curve_without_values_or_of_zeros_has_no_panel(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    for line in writer.lines:
        line |= {"lr": 0.0, "grad_norm": None, "data_wait_s": 1e-6}
    drawn = panels(read_run(writer.write()))
    assert set(drawn) == {"loss", "throughput", "step-time", "memory"}
    assert "waiting for data" not in drawn["step-time"]


def test_memory_on_a_cpu_leaves_the_process_out_and_shows_the_plan(tmp_path: Path) -> None:
    drawn = panels(read_run(write_whole_run(tmp_path)))["memory"]
    for word in ("plan", "rank 0", "rank 1", "activations", "without 376.5 MiB of Python"):
        assert f">{word}<" in drawn or word in drawn

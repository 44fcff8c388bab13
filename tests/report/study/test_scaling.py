"""What is called scaling and what is not; bands of what nobody measured; what must be said."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from shardyard.report.study import charts
from shardyard.report.study.charts import joined
from shardyard.report.study.page import render, to_markdown
from shardyard.report.study.rows import (
    Forecast,
    OpenTerm,
    Origin,
    ScalingSeries,
    SeriesRow,
    Settings,
    SizeRate,
    Spread,
)
from shardyard.report.study.scaling import Point, points, series_notes, series_words
from shardyard.report.study.table import to_csv, to_json
from shardyard.report.study.values import values_of

USUAL = Settings(micro_batch=4, accumulation=2, layout="FULL_SHARD", global_batch=64)
SURE = Spread(error=0.01, freedom=9)


def row(
    accelerators: int, rate: float | None, origin: Origin = "measured", /, **more: object
) -> SeriesRow:
    content = {
        "nodes": accelerators,
        "accelerators": accelerators,
        "origin": origin,
        "rate": None if rate is None else SizeRate(samples_per_s=rate, spread=SURE),
        "settings": USUAL,
        **more,
    }
    return SeriesRow(**content)  # type: ignore[arg-type]


def series(*rows: SeriesRow, **more: object) -> ScalingSeries:
    return ScalingSeries(name="s", rows=rows, **{"hold": "batch-per-device", **more})  # type: ignore[arg-type]


def by_size(study: ScalingSeries) -> dict[int, Point]:
    return {point.row.accelerators: point for point in points(study)}


def test_efficiency_is_against_the_smallest_size_with_the_interval_of_the_ratio() -> None:
    found = by_size(series(row(4, 340.0), row(1, 100.0)))
    first, last = found[1].efficiency, found[4].efficiency
    assert first is not None and last is not None
    assert (first.value, first.low) == (1.0, None)
    assert last.value == pytest.approx(0.85)
    factor = SURE.combined_with(SURE).factor
    assert last.low == pytest.approx(0.85 / factor) and last.high == pytest.approx(0.85 * factor)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"micro_batch": 2}, "micro-batch 4 -> 2"),
        ({"accumulation": 4}, "accumulation 2 -> 4"),
        ({"layout": "NO_SHARD"}, "layout FULL_SHARD -> NO_SHARD"),
        ({"layout": "FULL_SHARD x tp 2"}, "layout FULL_SHARD -> FULL_SHARD x tp 2"),
        ({"recompute": "full"}, ""),
        ({"layout": "NO_SHARD", "is_one_rank": True}, ""),
        ({"global_batch": 128}, ""),
        ({"micro_batch": None}, ""),
    ],
)
def test_a_setting_that_differs_is_named(changed: dict[str, object], says: str) -> None:
    other = replace(USUAL, **changed)  # type: ignore[arg-type]
    point = by_size(series(row(1, 100.0), row(2, 190.0, settings=other)))[2]
    assert point.changed == ((says,) if says else ())
    assert point.is_scaling == (not says)


def test_fewer_micro_batches_are_what_strong_scaling_means() -> None:
    other = replace(USUAL, accumulation=1)
    study = series(row(1, 100.0), row(2, 190.0, settings=other), hold="global-batch")
    assert by_size(study)[2].is_scaling
    assert "strong scaling" in study.kind


def test_no_line_goes_through_a_failed_size_nor_to_one_of_other_settings() -> None:
    other = replace(USUAL, micro_batch=1)
    study = series(
        row(1, 100.0), row(2, 198.0), row(4, None, "failed", note="out of memory."),
        row(8, 760.0), row(16, 1500.0, settings=other), row(32, 2800.0),
        row(64, None, "extrapolated"),
    )  # fmt: skip
    stretches = [
        [each["accelerators"] for each in stretch]
        for stretch in joined(values_of(study), "efficiency")
    ]
    assert stretches == [[1, 2], [8], [32]]
    said = " ".join(series_notes(study))
    assert "4 nodes failed: out of memory. No line is drawn through it." in said
    assert "16 nodes: micro-batch 4 -> 1" in said


def test_a_failed_first_size_leaves_the_next_one_to_be_the_first() -> None:
    found = by_size(series(row(1, None, "failed"), row(2, 190.0), row(4, 370.0)))
    assert found[1].efficiency is None and found[2].is_first
    assert found[4].efficiency is not None
    assert found[4].efficiency.value == pytest.approx(370 / 380)


def test_a_size_that_nobody_measured_lies_between_two_laws() -> None:
    study = series(row(1, 100.0), row(4, 320.0), row(8, None, "extrapolated"))
    figure = by_size(study)[8].extrapolated
    assert figure is not None and figure.low is not None and figure.high is not None
    growth = 1 / 0.8 - 1  # of a step, from 1 to 4
    by_doubling, by_device = 1 / (1 + growth * 3 / 2), 1 / (1 + growth * 7 / 3)
    assert figure.low < by_device < figure.value < by_doubling < figure.high
    shown = values_of(study)[-1]
    assert shown["origin"] == "extrapolated"
    assert shown["samples_per_s"] == pytest.approx(800 * figure.value)


@pytest.mark.parametrize("sizes", [(1, 64), (1,)])
def test_nothing_is_extrapolated_far_away_or_from_one_size(sizes: tuple[int, ...]) -> None:
    known = [row(1, 100.0)] if sizes == (1,) else [row(1, 100.0), row(8, 700.0)]
    study = series(*known, row(64 if len(sizes) == 2 else 2, None, "extrapolated"))
    assert points(study)[-1].extrapolated is None


def forecast(step_s: float, *, best_s: float, worst_s: float, nodes: int) -> Forecast:
    terms = OpenTerm(name="the network between nodes", assumed="slow", step_s=worst_s)
    return Forecast(
        samples_per_step=64 * nodes, step_s=step_s, best_s=best_s, worst_s=worst_s,
        open_terms=(terms,) if nodes > 1 else (), tokens_per_sample=128,
    )  # fmt: skip


def planned(nodes: int, rate: float | None, plan: Forecast) -> SeriesRow:
    return row(nodes, rate, "predicted" if rate is None else "measured", forecast=plan)


ALONE = forecast(1.0, best_s=1.0, worst_s=1.0, nodes=1)


def test_a_wide_forecast_says_which_term_is_open_and_the_band_it_leaves() -> None:
    wide = forecast(1.02, best_s=1.0, worst_s=1.25, nodes=8)
    study = series(planned(1, None, ALONE), planned(8, None, wide))
    figure = by_size(study)[8].predicted
    assert figure is not None
    assert [figure.low, figure.high] == pytest.approx([0.8, 1.0])
    said = " ".join(series_notes(study))
    assert "8 nodes: predicted 98.0 %, and what is open leaves 80.0 % to 100.0 %" in said
    assert "the network between nodes (slow): 18.0 points" in said


def test_a_forecast_that_is_off_says_so_and_whether_the_band_held() -> None:
    narrow = forecast(1.02, best_s=1.0, worst_s=1.04, nodes=8)
    study = series(planned(1, 64.0, ALONE), planned(8, 8 * 64 * 0.85, narrow))
    point = by_size(study)[8]
    assert point.error == pytest.approx(1 / 1.02 - 0.85)
    assert "off by +13.0 points and outside of the band" in " ".join(series_notes(study))


def test_rates_that_were_never_measured_and_tight_memory_are_marked_everywhere() -> None:
    more = {"unmeasured": "no product timed", "memory_bytes": 2**30, "tight": "95% of 1 GiB"}
    guessed = row(1, None, "predicted", forecast=ALONE, **more)
    study = series(guessed, row(8, 7.0, forecast=ALONE, unmeasured="no product timed"))
    text = to_markdown("x", [study])
    assert "64\\*" in text and "1.0 GiB (tight)" in text
    assert "7\\*" not in text  # measured here
    assert "\\* not measured: no product timed" in text and "tight: 95% of 1 GiB" in text
    page = render("x", [study], {})
    assert "64*" in page and "1.0 GiB (tight)" in page and "* not measured: no product" in page
    shown = to_json("x", [study])["series"][0]["rows"][0]
    assert (shown["unmeasured"], shown["tight"]) == ("no product timed", "95% of 1 GiB")


def test_a_narrow_forecast_that_holds_needs_no_remark() -> None:
    narrow = forecast(1.02, best_s=1.0, worst_s=1.04, nodes=8)
    study = series(planned(1, 64.0, ALONE), planned(8, 8 * 64 * 0.97, narrow))
    assert len(series_notes(study)) == 1


def test_epochs_and_prices_follow_from_the_rate() -> None:
    more = {"epoch_samples": 36_000, "run_samples": 72_000, "usd_per_hour": 5.0}
    study = series(row(1, 10.0, **more), row(2, 18.0, **{**more, "usd_per_hour": 10.0}))
    first, last = values_of(study)
    assert (first["epoch_s"], first["usd_per_epoch"]) == (3600, 5)
    assert (last["epoch_s"], last["ideal_epoch_s"]) == (2000, 1800)
    assert last["usd_per_epoch"] == pytest.approx(5.5556, abs=1e-4)
    assert last["usd_per_run"] == pytest.approx(2 * last["usd_per_epoch"])


def test_table_csv_and_json_hold_the_same_numbers() -> None:
    study = series(row(1, 100.0), row(2, 190.0, settings=replace(USUAL, micro_batch=1)))
    content = to_json("s|x", [study])
    assert content["series"][0]["rows"][1]["efficiency"] == pytest.approx(0.95)
    lines = to_csv([study]).splitlines()
    assert len(lines) == 3 and "0.95" in lines[2] and "micro-batch 4 -> 1" in lines[2]
    text = to_markdown("s|x", [study])
    assert "# s\\|x" in text
    assert "(95.0 (" in text  # in brackets: not called scaling
    assert "95 % interval by batch means" in text and "warm-up" in text


def test_markers_intervals_and_bands_are_inside_the_axes_and_the_ideal_is_straight() -> None:
    wide = SizeRate(samples_per_s=205, spread=Spread(error=0.2, freedom=3))
    rows = values_of(ScalingSeries(name="x", rows=(
        row(1, 100, memory_bytes=2**30), row(2, None, rate=wide), row(4, 380), row(8, 790),
    )))  # fmt: skip
    for paint in (charts._paint_efficiency, charts._paint_rate, charts._paint_memory):
        axes = Figure().add_subplot()
        paint(axes, rows)
        low, high = axes.get_ylim()
        assert all(
            low < y < high for line in axes.lines for y in list(np.asarray(line.get_ydata())) if y
        ), paint
    axes = Figure().add_subplot()
    charts._paint_rate(axes, rows)
    (ideal,) = [line for line in axes.lines if line.get_label() == "ideal"]
    assert np.asarray(ideal.get_xdata()).size == 2
    assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize(
    ("name", "key"),
    [("rate", "samples_per_s"), ("epoch", "epoch_s"), ("memory", "memory_bytes"),
     ("cost", "usd_per_epoch")],
)  # fmt: skip
def test_the_ideal_begins_at_the_first_size_and_is_straight_on_both_axes(
    name: str, key: str
) -> None:
    more = {"epoch_samples": 1000, "memory_bytes": 2**30}
    rows = values_of(series(
        row(2, 200, usd_per_hour=4.0, **more), row(8, 700, usd_per_hour=16.0, **more),
    ))  # fmt: skip
    axes = Figure().add_subplot()
    getattr(charts, f"_paint_{name}")(axes, rows)
    (ideal,) = [line for line in axes.lines if str(line.get_label()).startswith("ideal")]
    sizes, values = np.asarray(ideal.get_xdata()), np.asarray(ideal.get_ydata())
    scale = 2**30 if name == "memory" else 1
    assert values[0] == pytest.approx(rows[0][key] / scale)
    power = {"rate": 1, "epoch": -1, "memory": -1, "cost": 0}[name]
    assert values[1] == pytest.approx(values[0] * (sizes[1] / sizes[0]) ** power)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_what_is_alike_for_all_sizes_is_said_once() -> None:
    open_term = OpenTerm(name="the network between nodes", assumed="slow", step_s=1.25)
    wide = {"best_s": 1.0, "worst_s": 1.25}
    found = [
        planned(n, n * 60.0, replace(forecast(1.02, nodes=n, **wide), open_terms=(open_term,)))
        for n in (4, 8)
    ]
    study = series(planned(1, 64.0, ALONE), *found)
    words = series_words(study)
    assert sum("What a plan cannot know" in text for text in series_notes(study)) == 2
    assert words.count("What a plan cannot know") == words.count("The wait for data") == 1
    assert "4 nodes 98.0 % (80.0 % to 100.0 %), measured 93.8 %" in words
    assert "8 nodes 98.0 % (80.0 % to 100.0 %), measured 93.8 %" in words

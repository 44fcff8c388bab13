"""The error next to a planned speed, computed again from the raw rows of its measurement."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.accuracy_metrics import mape, p90
from shardyard.config.layout import Layout
from shardyard.planner.throughput import PUBLISHED_ERRORS, published_error

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "cpu-2core"
TABLES = {
    "measured_runs.csv": "planner-accuracy-rows-20261129.csv",
    "measured_runs_more.csv": "planner-accuracy-more-rows-20261129.csv",
}
"""Published runs -> predicted over measured rate of each."""
MODEL_AXES = ("tp", "pp", "cp", "ep")


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


def test_each_error_is_that_of_the_raw_rows() -> None:
    ratios, sources = defaultdict[object, list[float]](list), defaultdict[object, set[str]](set)
    for table, result in TABLES.items():
        runs = {row["id"]: row for row in rows_of(BENCHMARKS / "groundtruth" / table)}
        for row in rows_of(RESULTS / result):
            if row["ratio"] and row["quality"] in ("A", "B"):
                run = runs[row["id"]]
                has_axes = any(float(run[axis] or 1) > 1 for axis in MODEL_AXES)
                kind = run["gpu"].split("-")[0], has_axes
                ratios[kind].append(float(row["ratio"]))
                sources[kind].add(row["family"])
    assert {(each.chip, each.has_model_axes) for each in PUBLISHED_ERRORS} == set(ratios)
    for each in PUBLISHED_ERRORS:
        kind = each.chip, each.has_model_axes
        assert each.runs == len(ratios[kind])
        assert each.mean == pytest.approx(mape(ratios[kind]), abs=5e-4)
        assert each.most == pytest.approx(p90(ratios[kind]), abs=5e-4)
        assert set(each.sources) == sources[kind]


def test_a_layout_is_held_to_runs_of_its_chip_and_kind() -> None:
    sharded = Layout(dp_replicate=1, dp_shard=8, zero=3)
    split = Layout(dp_replicate=1, dp_shard=4, tp=2, zero=3)
    data, model = published_error("H100 SXM", sharded), published_error("H100 SXM", split)
    assert data is not None and not data.has_model_axes and "48 published runs" in data.words()
    assert model is not None and model.has_model_axes and "nemo" in model.sources
    assert published_error("Trainium 1", sharded) is None

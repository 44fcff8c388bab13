"""A run's folder becomes a row: warm-up left out, terms that add up, ranks that were asked for."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardyard.report.run_data import read_run
from shardyard.report.study.measured import measured_row, steady_steps
from shardyard.report.study.rows import SeriesRow
from tests.report.synthetic import STEP_S, write_whole_run

PLANNED = SeriesRow(nodes=1, accelerators=2, origin="predicted")


def steps(count: int, generation: int = 0) -> list[dict[str, float]]:
    return [{"step": n, "generation": generation, "step_time_s": 1.0} for n in range(1, count + 1)]


@pytest.mark.parametrize(("counts", "left"), [([60], 54), ([5], 4), ([1], 0), ([20, 40], 54)])
def test_the_first_tenth_of_each_start_is_left_out(counts: Sequence[int], left: int) -> None:
    lines = [line for place, count in enumerate(counts) for line in steps(count, place)]
    assert len(steady_steps(lines)) == left


def test_a_run_becomes_a_row(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    row = measured_row(record, PLANNED)
    assert (row.origin, row.run_id) == ("measured", record.run.run_id)
    assert row.rate is not None and row.rate.samples_per_s is not None
    assert row.rate.samples_per_s == pytest.approx(16 / STEP_S)
    assert row.rate.spread is not None and row.rate.spread.freedom == 9
    assert math.isclose(sum(seconds for _, seconds in row.terms), STEP_S)
    assert row.memory_bytes == 471 * 2**20
    assert row.epoch_samples == 19_532
    assert row.settings.micro_batch == 4 and row.settings.accumulation == 2


def test_a_run_on_other_ranks_than_asked_is_no_measurement(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    row = measured_row(record, SeriesRow(nodes=4, accelerators=4, origin="predicted"))
    assert row.origin == "failed"
    assert row.note == "it trained on 2 ranks in place of 4."

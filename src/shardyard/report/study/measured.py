"""One size that has run: its row, read from the run's folder.

Steps that warm up are left out: of each start the first tenth, and at least the first one, which
compiles, fills caches and lets links come up.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any

from shardyard.report.run_data import RunRecord
from shardyard.report.study.forecast import settings_of
from shardyard.report.study.rows import SeriesRow, SizeRate, spread_of

Line = dict[str, Any]

WARM_UP_SHARE = 0.1
WARM_UP_WORDS = "of each start the first tenth of its steps, at least one, is warm-up and left out"


def measured_row(record: RunRecord, planned: SeriesRow) -> SeriesRow:
    """Return the measurements of a run of one size, together with the plan's values.

    Args:
        planned: The row of its plan: settings, prices and forecast.
    """
    lines = steady_steps(record.steps)
    if not lines:
        return replace(planned, origin="failed", note="it made too few steps to measure.")
    ranks = {line.get("world_size") for line in lines}
    if ranks != {planned.accelerators}:
        came = ", ".join(str(count) for count in sorted(ranks, key=str))
        return replace(
            planned,
            origin="failed",
            note=f"it trained on {came} ranks in place of {planned.accelerators}.",
        )
    times = [float(line["step_time_s"]) for line in lines]
    step_s = fmean(times)
    tokens = _mean_per_step(lines, "tokens_per_s")
    samples = _mean_per_step(lines, "samples_per_s")
    return replace(
        planned,
        origin="measured",
        note="",
        run_id=record.run.run_id,
        settings=planned.settings if record.plan is None else settings_of(record.plan),
        rate=SizeRate(
            samples_per_s=None if samples is None else samples / step_s,
            tokens_per_s=None if tokens is None or record.unit == "image" else tokens / step_s,
            spread=spread_of(times),
        ),
        terms=_terms(lines),
        memory_bytes=_peak_bytes(record),
        mfu=_mfu(lines, step_s),
        epoch_samples=_epoch_samples(record) or planned.epoch_samples,
        usd_per_hour=_usd_per_hour(record) or planned.usd_per_hour,
    )


def steady_steps(lines: Sequence[Line]) -> list[Line]:
    """Steps without those that warm up, in order."""

    def start(line: Line) -> tuple[int, int]:
        return line.get("attempt", 0), line.get("generation", 0)

    result: list[Line] = []
    for _, group in groupby((line for line in lines if line.get("step_time_s")), key=start):
        steps = list(group)
        result += steps[max(1, math.ceil(WARM_UP_SHARE * len(steps))) :]
    return result


def _mean_per_step(lines: Sequence[Line], key: str) -> float | None:
    """Samples or tokens of a mean step, from a rate and the time of each."""
    if any(line.get(key) is None for line in lines):
        return None
    return fmean(line[key] * line["step_time_s"] for line in lines)


def _terms(lines: Sequence[Line]) -> tuple[tuple[str, float], ...]:
    """Return the terms of a step that a run can tell apart; the plan's terms are finer."""
    step = fmean(line["step_time_s"] for line in lines)
    data = fmean(line.get("data_wait_s") or 0.0 for line in lines)
    return (("computes and exchanges", max(0.0, step - data)), ("waits for data", data))


def _mfu(lines: Sequence[Line], step_s: float) -> float | None:
    if any(line.get("mfu") is None for line in lines):
        return None
    return fmean(line["mfu"] * line["step_time_s"] for line in lines) / step_s


def _peak_bytes(record: RunRecord) -> int | None:
    finished = record.last("run_finished") or {}
    peaks = [int(peak) for peak in finished.get("peak_bytes_by_rank") or [] if peak]
    peaks += [int(line.get("peak_memory_bytes") or 0) for line in record.steps]
    return max(peaks, default=0) or None


def _epoch_samples(record: RunRecord) -> int | None:
    samples = (record.last("data_ready") or {}).get("samples")
    return int(samples) if samples else None


def _usd_per_hour(record: RunRecord) -> float | None:
    rate = (record.last("spent") or {}).get("usd_per_hour")
    return None if rate is None else float(rate)

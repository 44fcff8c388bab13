"""Every number of a point, once: the table, the CSV, the JSON and the page print the same."""

from typing import Any

from shardyard.report.study.rows import Figure, ScalingSeries, SeriesRow, SizeRate
from shardyard.report.study.scaling import Point, points

Values = dict[str, Any]

_SHOWN = ("measured", "published", "predicted")
"""Origins whose own memory and MFU are shown; of others they are those of a plan."""


def values_of(series: ScalingSeries) -> list[Values]:
    """A dict for each row, smallest first; None: not known, or it has no meaning there."""
    found = points(series)
    first = next((point for point in found if point.is_first), None)
    per_epoch = next((row.epoch_samples for row in series.rows if row.epoch_samples), None)
    per_run = next((row.run_samples for row in series.rows if row.run_samples), None)
    rows = [_values(point, first, per_epoch=per_epoch, per_run=per_run) for point in found]
    base = next((row for row, point in zip(rows, found, strict=True) if point is first), None)
    for row in rows:
        row["ideal_epoch_s"] = _ideal(row, base)
    return [{"series": series.name, **row} for row in rows]


def _values(
    point: Point, first: Point | None, *, per_epoch: int | None, per_run: int | None
) -> Values:
    row, forecast = point.row, point.row.forecast
    rate, low, high = _rate(point, first)
    samples, tokens = (None, None) if rate is None else (rate.samples_per_s, rate.tokens_per_s)
    epoch_s = _seconds(per_epoch, samples)
    if epoch_s is None and rate is not None and rate.epochs_per_s:
        epoch_s = 1 / rate.epochs_per_s
    run_s = _seconds(per_run, samples)
    settings = row.settings
    return {
        "nodes": row.nodes,
        "accelerators": row.accelerators,
        "origin": row.origin,
        "note": row.note,
        "run_id": row.run_id,
        "samples_per_s": samples,
        "tokens_per_s": tokens,
        "per_accelerator": None if rate is None else rate.value / row.accelerators,
        "rate_low_share": low,
        "rate_high_share": high,
        **_figure("efficiency", point.efficiency),
        "is_scaling": point.is_scaling,
        "changed": list(point.changed),
        "printed": row.printed,
        "predicted_samples_per_s": None if forecast is None else forecast.samples_per_s,
        "predicted_tokens_per_s": None if forecast is None else forecast.tokens_per_s,
        "rate_error": point.rate_error,
        **_figure("predicted_efficiency", point.predicted),
        "efficiency_error": point.error,
        "unmeasured": row.unmeasured if forecast is not None else "",
        "tight": row.tight if row.origin == "predicted" else "",
        **_figure("extrapolated_efficiency", point.extrapolated),
        "epoch_s": epoch_s,
        "run_s": run_s,
        "memory_bytes": row.memory_bytes if row.origin in _SHOWN else None,
        "predicted_memory_bytes": _predicted_memory_bytes(row),
        "mfu": row.mfu if row.origin in _SHOWN else None,
        "predicted_mfu": None if forecast is None else forecast.mfu,
        "usd_per_hour": row.usd_per_hour,
        "usd_per_epoch": _usd(epoch_s, row),
        "usd_per_run": _usd(run_s, row),
        "micro_batch": settings.micro_batch,
        "accumulation": settings.accumulation,
        "layout": settings.layout,
        "global_batch": settings.global_batch,
        "terms": dict(row.terms),
        "predicted_terms": {} if forecast is None else dict(forecast.terms),
    }


def _predicted_memory_bytes(row: SeriesRow) -> int | None:
    """Return memory of a device; a plan gives it also for devices without a measured speed."""
    if row.forecast is not None:
        return row.forecast.memory_bytes
    return row.memory_bytes if row.origin == "predicted" else None


def _rate(point: Point, first: Point | None) -> tuple[SizeRate | None, float | None, float | None]:
    """The rate that a row shows, and its interval or band as shares of it."""
    row = point.row
    if row.rate is not None:
        spread = row.rate.spread
        ends = (None, None) if spread is None else (1 / spread.factor, spread.factor)
        return row.rate, *ends
    figure = point.extrapolated
    if figure is not None and first is not None and first.row.rate is not None:
        scale = figure.value * row.accelerators / first.row.accelerators
        return _scaled(first.row.rate, scale), *_shares(figure)
    forecast = row.forecast
    if forecast is None or row.origin != "predicted":
        return None, None, None
    rate = SizeRate(samples_per_s=forecast.samples_per_s, tokens_per_s=forecast.tokens_per_s)
    return rate, forecast.step_s / forecast.worst_s, forecast.step_s / forecast.best_s


def _scaled(rate: SizeRate, scale: float) -> SizeRate:
    def times(value: float | None) -> float | None:
        return None if value is None else value * scale

    return SizeRate(
        samples_per_s=times(rate.samples_per_s),
        tokens_per_s=times(rate.tokens_per_s),
        epochs_per_s=times(rate.epochs_per_s),
    )


def _shares(figure: Figure) -> tuple[float | None, float | None]:
    if figure.low is None or figure.high is None:
        return None, None
    return figure.low / figure.value, figure.high / figure.value


def _figure(name: str, figure: Figure | None) -> Values:
    if figure is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}


def _seconds(samples: int | None, rate: float | None) -> float | None:
    return None if samples is None or not rate else samples / rate


def _usd(seconds: float | None, row: SeriesRow) -> float | None:
    if seconds is None or row.usd_per_hour is None:
        return None
    return seconds / 3600 * row.usd_per_hour


def _ideal(row: Values, base: Values | None) -> float | None:
    """The time of an epoch if each accelerator were as fast as in the first size."""
    if base is None or base["epoch_s"] is None:
        return None
    return float(base["epoch_s"]) * int(base["accelerators"]) / int(row["accelerators"])

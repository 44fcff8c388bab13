"""Predicted against measured, term by term, with the error of the prediction."""

from dataclasses import dataclass
from statistics import median

from shardyard.plan.plan import Plan
from shardyard.report.run import Line, RunRecord


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One term. ``unit`` is bytes, s, tokens/s, steps or tokens."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str

    @property
    def error(self) -> float | None:
        """predicted / measured - 1: above 0, too much was predicted."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def compare(record: RunRecord) -> list[Comparison]:
    """All terms that have a prediction or a measurement; empty if there is no plan."""
    plan = record.plan
    if plan is None:
        return []
    return [row for row in (*_memory(record, plan), *_pace(record, plan)) if _has_any(row)]


def memory_by_rank(record: RunRecord) -> list[Line]:
    """Measured bytes of each rank, by kind; the peak is the last one known."""
    ready = record.last("model_ready") or {}
    rows = [dict(row) for row in ready.get("memory_by_rank") or []]
    finished = record.last("run_finished") or {}
    peaks = finished.get("peak_bytes_by_rank") or []
    for row, peak in zip(rows, peaks, strict=False):
        row["peak_bytes"] = peak
    if rows and not peaks and record.steps:
        # only rank 0 writes its peak while it runs
        so_far = record.steps[-1].get("peak_memory_bytes") or 0
        rows[0]["peak_bytes"] = max(rows[0].get("peak_bytes") or 0, so_far)
    return rows


def median_tokens_per_s(record: RunRecord) -> float | None:
    """Median rate of all steps but the first of each start, which warms up."""
    rates = steady(record.steps, "tokens_per_s")
    return median(rates) if rates else None


def steady(lines: tuple[Line, ...], key: str) -> list[float]:
    """Values of a key, without the first step of each start unless there is no other."""
    seen: set[tuple[int, int]] = set()
    warm: list[float] = []
    rest: list[float] = []
    for line in lines:
        start = (line.get("attempt", 0), line.get("generation", 0))
        if line.get(key) is not None:
            (rest if start in seen else warm).append(float(line[key]))
        seen.add(start)
    return rest or warm


def _memory(record: RunRecord, plan: Plan) -> list[Comparison]:
    rows = memory_by_rank(record)

    def largest(key: str) -> float | None:
        return max((row[key] for row in rows if row.get(key)), default=None)

    durable = record.last("checkpoint_durable") or {}
    return [
        Comparison(
            name="parameters, largest rank", unit="bytes", note="fp32 master weights",
            predicted=plan.memory_term("parameters"), measured=largest("parameters_bytes"),
        ),
        Comparison(
            name="gradients, largest rank", unit="bytes", note="fp32, reduced",
            predicted=plan.memory_term("gradients"), measured=largest("gradients_bytes"),
        ),
        Comparison(
            name="optimizer, largest rank", unit="bytes", note="fp32 state",
            predicted=plan.memory_term("optimizer"), measured=largest("optimizer_bytes"),
        ),
        Comparison(
            name="peak memory, largest rank", unit="bytes",
            note="predicted as the sum of its terms; what the allocator wastes is in none",
            predicted=plan.memory_bytes, measured=largest("peak_bytes"),
        ),
        Comparison(
            name="checkpoint on disk", unit="bytes", note="weights and optimizer, all ranks",
            predicted=plan.checkpoint_bytes, measured=durable.get("bytes"),
        ),
    ]  # fmt: skip


def _pace(record: RunRecord, plan: Plan) -> list[Comparison]:
    step_s = sum(line.get("step_time_s") or 0.0 for line in record.steps)
    is_whole = record.last("run_finished") is not None
    return [
        Comparison(
            name="throughput", unit="tokens/s", note=plan.speed.reason,
            predicted=plan.speed.tokens_per_s, measured=median_tokens_per_s(record),
        ),
        Comparison(
            name="time of all steps", unit="s",
            note=plan.speed.reason if plan.seconds is None else "without start and evaluation",
            predicted=plan.seconds, measured=step_s if is_whole else None,
        ),
    ]  # fmt: skip


def _has_any(row: Comparison) -> bool:
    return row.measured is not None or row.predicted is not None

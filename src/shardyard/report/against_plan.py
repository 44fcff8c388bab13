"""Predicted against measured, term by term, with the error of the prediction."""

from dataclasses import dataclass
from statistics import median

from shardyard.planner.plan import Plan
from shardyard.report.run_data import AttemptRecord, Line, RunRecord
from shardyard.report.walltime import WAITING, AttemptTime, effective_share, total_phases
from shardyard.rundir.counted_lines import start_of
from shardyard.rundir.jsonl import LOSSES


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One term. ``unit`` is bytes, s, tokens/s, images/s, USD or share."""

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


def against_plan(record: RunRecord, times: list[AttemptTime]) -> list[PlanRow]:
    """All terms that have a prediction or a measurement; empty if there is no plan.

    Args:
        times: Wall time of the attempts, from ``account``.
    """
    plan = record.plan
    if plan is None:
        return []
    lines = planned_lines(record, plan)
    rows = (*_memory(record, plan), *_pace(record, plan, lines), *_failures(record, plan, times))
    return [row for row in rows if _has_any(row)]


def memory_by_rank(record: RunRecord, attempt: AttemptRecord | None = None) -> list[Line]:
    """Measured bytes of each rank, by kind; the peaks are the last ones known.

    Args:
        attempt: Whose ranks; None: those of the newest attempt that built its model.
    """
    of = record if attempt is None else attempt
    ready = of.last("model_ready") or {}
    rows = [
        {**row, "start_bytes": row.get("peak_bytes")} for row in ready.get("memory_by_rank") or []
    ]
    finished = of.last("run_finished") or {}
    if start_of(finished) < start_of(ready):
        finished = {}  # the run has been resumed since, maybe on other ranks
    peaks = finished.get("peak_bytes_by_rank") or []
    for row, peak in zip(rows, peaks, strict=False):
        row["peak_bytes"] = peak
    for row, reserved in zip(rows, finished.get("reserved_bytes_by_rank") or [], strict=False):
        row["reserved_bytes"] = reserved
    lines = record.steps if attempt is None else attempt.lines
    if rows and not peaks and lines:
        # only rank 0 writes its peak while it runs
        so_far = lines[-1].get("peak_memory_bytes") or 0
        rows[0]["peak_bytes"] = max(rows[0].get("peak_bytes") or 0, so_far)
    return rows


def memory_attempt(record: RunRecord) -> AttemptRecord | None:
    """The attempt whose memory is shown: like the main one, and if possible with all peaks.

    Only an attempt that reaches the end of the run reports the peak of every rank.
    """
    main = record.main_attempt
    if main is None:
        return None
    alike = [each for each in record.attempts if _memory_kind(each) == _memory_kind(main)]
    whole = [each for each in alike if (each.last("run_finished") or {}).get("peak_bytes_by_rank")]
    return whole[-1] if whole else main


def _memory_kind(attempt: AttemptRecord) -> tuple[object, ...]:
    ranks = len((attempt.last("model_ready") or {}).get("memory_by_rank") or [])
    return ranks, None if attempt.plan is None else _predicted_step(attempt.plan)


def median_tokens_per_s(record: RunRecord) -> float | None:
    """Median rate of all steps but the first of each start, which warms up."""
    return _median(record.steps, "tokens_per_s")


def planned_lines(record: RunRecord, plan: Plan) -> tuple[Line, ...]:
    """Steps that the plan predicts: on as many ranks, in attempts that were planned the same."""
    alike = {
        attempt.number
        for attempt in record.attempts
        if attempt.plan is not None and _predicted_step(attempt.plan) == _predicted_step(plan)
    }
    ranks = plan.layout.world_size
    return tuple(
        line
        for line in record.steps
        if (line.get("attempt") or 0) in alike and line.get("world_size", ranks) == ranks
    )


def _predicted_step(plan: Plan) -> tuple[object, ...]:
    return plan.layout, plan.micro_batch, plan.recompute, plan.samples_per_step, plan.memory_bytes


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


def _memory(record: RunRecord, plan: Plan) -> list[PlanRow]:
    rows = memory_by_rank(record, memory_attempt(record))

    def largest(key: str) -> float | None:
        return max((row[key] for row in rows if row.get(key)), default=None)

    durable = record.last("checkpoint_durable") or {}
    reserved = largest("reserved_bytes")
    return [
        PlanRow(
            name="parameters, largest rank", unit="bytes", note="fp32 master weights",
            predicted=plan.memory_term("parameters"), measured=largest("parameters_bytes"),
        ),
        PlanRow(
            name="optimizer, largest rank", unit="bytes", note="averages of gradients",
            predicted=plan.memory_term("optimizer"), measured=largest("optimizer_bytes"),
        ),
        PlanRow(
            name="peak memory, largest rank", unit="bytes",
            note=f"the sum of its terms {plan.memory_moment}; what the allocator wastes is in none",
            predicted=plan.memory_bytes, measured=largest("peak_bytes"),
        ),
        PlanRow(
            name="reserved memory, largest rank", unit="bytes", note="what the allocator holds",
            predicted=plan.reserved_bytes if reserved else None, measured=reserved,
        ),
        PlanRow(
            name="checkpoint on disk", unit="bytes", note="weights and optimizer, all ranks",
            predicted=plan.checkpoint_bytes, measured=durable.get("bytes"),
        ),
    ]  # fmt: skip


def _pace(record: RunRecord, plan: Plan, lines: tuple[Line, ...]) -> list[PlanRow]:
    steps_s = sum(line.get("step_time_s") or 0.0 for line in record.steps)
    is_whole, spent = record.state == "finished", record.last("spent") or {}
    return [
        PlanRow(
            name="time of a step", unit="s", note=plan.speed.reason,
            predicted=plan.step_s, measured=_median(lines, "step_time_s"),
        ),
        PlanRow(
            name="throughput", unit=f"{plan.units}/s", note="of all ranks",
            predicted=plan.speed.tokens_per_s, measured=_median(lines, "tokens_per_s"),
        ),
        PlanRow(
            name="MFU", unit="share",
            note="FLOP counted with full attention"
            if plan.unit == "token" else "FLOP of convolutions and products",
            predicted=plan.mfu, measured=_median(lines, "mfu"),
        ),
        PlanRow(
            name="time of all steps", unit="s",
            note="without start and evaluation",
            predicted=plan.seconds, measured=steps_s if is_whole else None,
        ),
        PlanRow(
            name="reference pass", unit="s", note=plan.reference_reason,
            predicted=plan.reference_s or None, measured=_reference_s(record),
        ),
        PlanRow(
            name="cost", unit="USD", note="predicted without preparation and evaluation",
            predicted=plan.usd, measured=spent.get("usd") if is_whole else None,
        ),
    ]  # fmt: skip


def _failures(record: RunRecord, plan: Plan, times: list[AttemptTime]) -> list[PlanRow]:
    """Return the share of time left after saves and failures; of a finished run, its length too."""
    outlook, phases = plan.failures, total_phases(times)
    losses = [event for kind in LOSSES for event in record.all(kind)]
    wall_s = sum(attempt.seconds for attempt in times) - phases.get(WAITING, 0.0)
    lost = len({(event.get("attempt", 0), event.get("generation", 0)) for event in losses})
    expected = "" if outlook is None else f"{outlook.expected_failures:.3g} failures expected, "
    effective = PlanRow(
        name="effective time", unit="share",
        note=f"time trained / running time; {expected}{lost} happened",
        predicted=None if outlook is None else outlook.ettr, measured=effective_share(phases),
    )  # fmt: skip
    if outlook is None or record.state != "finished":
        return [effective]
    return [
        PlanRow(
            name="wall time", unit="s",
            note="without waiting between attempts; predicted without evaluation",
            predicted=outlook.wall_s, measured=wall_s,
        ),
        PlanRow(
            name="blocked by saves", unit="s", note="training stood still",
            predicted=outlook.checkpoint_blocked_s, measured=phases.get("checkpoint-blocked", 0.0),
        ),
        effective,
    ]  # fmt: skip


def _reference_s(record: RunRecord) -> float | None:
    """Time of the pass before the first step, of all starts that had one; None: none had."""
    return sum(event.get("seconds") or 0.0 for event in record.all("reference_ready")) or None


def _median(lines: tuple[Line, ...], key: str) -> float | None:
    values = steady(lines, key)
    return median(values) if values else None


def _has_any(row: PlanRow) -> bool:
    return row.measured is not None or row.predicted is not None

"""Cost of a run so far, and the remaining cost at the pace that it has really had.

Node 0 writes down the money (`spent`); each cost is counted once. The pace is the wall time
since the first step over the steps that count. Evaluations, saves, restarts and lost work
are in it. The first start is left out, and so is waiting between attempts, when no node is
paid.
"""

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.tasks import metrics_of
from shardyard.errors import RequestError
from shardyard.report.run_data import Line, RunRecord
from shardyard.report.walltime import AttemptTime
from shardyard.rundir.jsonl import scores_of
from shardyard.units import format_seconds, format_usd


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """US dollars of one run, all attempts together."""

    so_far_usd: float
    usd_per_hour: float
    """Rate of the newest attempt, all nodes together."""
    last_step: int | None
    """At which it ends; None: not known."""
    pace_s: float | None
    """Wall time of a step that counts; None: fewer than two steps were done."""
    to_end_s: float | None
    """Until ``last_step``; None: not known (``why_open``), or it has ended."""
    why_open: str
    """Reason why its remaining time and money are unknown; empty where known or after its end."""
    target: str
    """Value of ``run.target``, in words; empty: none."""
    target_step: int | None
    """Step of the evaluation that reached the target."""
    target_usd: float | None
    """Cost of the run when it reached the target."""

    @property
    def to_end_usd(self) -> float | None:
        """Remaining cost to the end of the run."""
        return None if self.to_end_s is None else self.to_end_s / 3600 * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "to_end_usd": self.to_end_usd}

    def words(self) -> str:
        """Cost so far, to the end, and of the target, with what that assumes."""
        parts = [
            f"{format_usd(self.so_far_usd)} so far, at {format_usd(self.usd_per_hour)} an hour"
        ]
        if self.to_end_usd is not None and self.to_end_s is not None and self.pace_s is not None:
            all_usd = format_usd(self.so_far_usd + self.to_end_usd)
            early = f"; {self.target} would end it sooner" if self.target_is_open else ""
            parts.append(
                f"about {format_usd(self.to_end_usd)} more, in {format_seconds(self.to_end_s)}, to "
                f"step {self.last_step:,}{early}: {all_usd} in all, if a step continues to take "
                f"{format_seconds(self.pace_s)} with all that is lost between steps, as since the "
                "first one"
            )
        elif self.why_open:
            parts.append(f"what its end costs is not known: {self.why_open}")
        if self.target_usd is not None:
            parts.append(
                f"{self.target} was reached at step {self.target_step:,} for "
                f"{format_usd(self.target_usd)}"
            )
        return "Cost: " + "; ".join(parts) + "."

    @property
    def target_is_open(self) -> bool:
        """Whether the recipe has a target that no evaluation has reached."""
        return bool(self.target) and self.target_step is None


def cost_of(
    record: RunRecord, times: list[AttemptTime], *, last_step: int | None
) -> RunCost | None:
    """Return the cost of a run; None: no price was known, or no step has run yet.

    Args:
        times: Wall time of the attempts, from ``account``.
        last_step: Step at which it ends; None: not known.
    """
    spent = record.last("spent")
    if spent is None or spent.get("usd") is None or spent.get("usd_per_hour") is None:
        return None
    pace_s, why_open = _pace(record, times)
    done: int = record.steps[-1]["step"] if record.steps else 0
    if last_step is None:
        why_open = "its length is not known"
    elif record.resolved is not None and record.resolved.phases:
        why_open = "steps of its phases differ in length"
    left = 0 if last_step is None else last_step - done
    is_open = record.state != "finished" and (last_step is None or left > 0)
    to_end_s = left * pace_s if is_open and not why_open and pace_s is not None else None
    reached = _reached(record)
    return RunCost(
        so_far_usd=spent["usd"],
        usd_per_hour=spent["usd_per_hour"],
        last_step=last_step,
        pace_s=pace_s,
        to_end_s=to_end_s,
        why_open=why_open if is_open else "",
        target=_target_words(record),
        target_step=None if reached is None else reached.get("step"),
        target_usd=None
        if reached is None
        else Spent(record).usd_at(reached.get("attempt", 0), reached["t"]),
    )


def _pace(record: RunRecord, times: list[AttemptTime]) -> tuple[float | None, str]:
    """Wall time of a step since the first one, and why there is none."""
    first = next(iter(record.all("first_step")), None)
    done: int = record.steps[-1]["step"] if record.steps else 0
    steps = 0 if first is None else done - int(first.get("step", done))
    if first is None or steps < 1:
        return None, "no two steps were done"
    ended_t = times[-1].began_t + times[-1].seconds
    waited_s = sum(
        time.phases.get("waiting", 0.0) for time in times if time.number > first.get("attempt", 0)
    )
    return (ended_t - first["t"] - waited_s) / steps, ""


def _target_words(record: RunRecord) -> str:
    target = None if record.resolved is None else record.resolved.recipe.run.target
    if not target:
        return ""
    return f"run.target ({', '.join(f'{name} {value:g}' for name, value in target.items())})"


def _reached(record: RunRecord) -> Line | None:
    """The first evaluation that was all that ``run.target`` asks for."""
    if record.resolved is None or not record.resolved.recipe.run.target:
        return None
    recipe = record.resolved.recipe
    try:
        metrics = metrics_of(recipe.task, recipe.data.eval_sets, recipe.data.eval_tasks)
    except RequestError:  # of a package that is not here
        return None
    asked = [(name, metrics[name], value) for name, value in (recipe.run.target or {}).items()]
    told = {event.get("step"): event for event in record.counted_events("evaluated")}
    for line in record.evaluations:
        scores = scores_of(line)
        if all(
            scores.get(name) is not None and metric.is_reached(scores[name], value)
            for name, metric, value in asked
        ):
            return told.get(line["step"])
    return None


class Spent:
    """Cost of a run at any moment: the count before it, and the time since at its rate."""

    def __init__(self, record: RunRecord) -> None:
        self._counts: dict[int, list[Line]] = {}
        for event in record.all("spent"):
            if event.get("usd") is not None and event.get("usd_per_hour") is not None:
                self._counts.setdefault(event.get("attempt", 0), []).append(event)

    def usd_at(self, attempt: int, t: float) -> float | None:
        """Return the cost of all attempts together; None: none was counted in this one by then.

        Args:
            t: Unix seconds.
        """
        counts = self._counts.get(attempt, [])
        place = bisect_right(counts, t, key=lambda count: float(count["t"]))
        if not place:
            return None
        count = counts[place - 1]
        return float(count["usd"] + (t - count["t"]) / 3600 * count["usd_per_hour"])

"""How far the planner is from published runs it has never seen, per source and over all sources.

Every row of the table becomes a workload on a cluster (``planner_rows.py``), the planner predicts
it, and the prediction is set against what the row measured (``accuracy_metrics.py``). Nothing is
fitted to a row or a source. A source is a ``family`` of the table. Rows of quality C are predicted
and shown apart: a source's figures are of its rows A and B, and a source with none of those
does not enter the macro average.

    python benchmarks/planner_accuracy.py --table benchmarks/groundtruth/measured_runs.csv [--json]
"""

import argparse
import csv
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

if not __package__:  # started as a file: its folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import accuracy_metrics as metrics
from benchmarks.accuracy_metrics import Pair, Share
from benchmarks.accuracy_text import render
from benchmarks.planner_rows import Case, Skipped, row_to_case, with_cumulative_features
from benchmarks.planner_table import Row, read_table
from shardyard.errors import ShardyardError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.workload import Recompute, Workload

COUNTED_QUALITIES = ("A", "B")
DOES_NOT_FIT = "does not fit"
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Modes of recompute that are tried where a row names none and it would not fit without."""
_DIGITS = 6


class MemoryNumbers(Protocol):
    """Peaks of the fullest device, in bytes."""

    @property
    def allocated_bytes(self) -> float: ...
    @property
    def reserved_bytes(self) -> float: ...
    @property
    def device_bytes(self) -> float: ...


class Fit(Protocol):
    """How near a prediction comes to the memory of the device."""

    @property
    def verdict(self) -> str: ...


class Estimate(Protocol):
    """What is compared of a prediction."""

    @property
    def tokens_per_s_per_device(self) -> float: ...
    @property
    def memory(self) -> MemoryNumbers: ...
    @property
    def fit(self) -> Fit: ...


Planner = Callable[[Workload, ClusterHardware], Estimate]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A case and what the planner says of it."""

    case: Case
    estimate: Estimate

    @property
    def rate(self) -> Pair | None:
        """Tokens per second and device."""
        measured = self.case.tokens_per_s_per_device
        if not measured:
            return None
        return Pair(predicted=self.estimate.tokens_per_s_per_device, measured=measured)

    @property
    def memory(self) -> Pair | None:
        """Bytes of the number that the row printed."""
        measured = self.case.memory
        if measured is None:
            return None
        predicted = getattr(self.estimate.memory, f"{measured.number}_bytes")
        return Pair(predicted=predicted, measured=measured.bytes)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All predictions of a table, and why the other rows have none."""

    predictions: Sequence[Prediction]
    skipped: Sequence[tuple[Row, str]]

    @property
    def families(self) -> list[str]:
        """Sources by name."""
        used = {prediction.case.family for prediction in self.predictions}
        return sorted(used | {row.raw("family") or "unnamed" for row, _ in self.skipped})


def predict(rows: Sequence[Row], estimate: Planner) -> Outcome:
    """Ask the planner about every row that can be read as a run."""
    predictions, skipped = list[Prediction](), list[tuple[Row, str]]()
    for row in with_cumulative_features(rows):
        case = row_to_case(row)
        if isinstance(case, Skipped):
            skipped.append((row, case.reason))
            continue
        try:
            case, answer = _with_own_recompute(case, estimate)
        except ShardyardError:
            if case.tokens_per_s_per_device or not (case.memory or case.is_oom):
                skipped.append((row, "refused by the planner"))
                continue
            answer = _memory_alone(case)  # of a device whose products nobody timed
        predictions.append(Prediction(case=case, estimate=answer))
    return Outcome(predictions=predictions, skipped=skipped)


@dataclass(frozen=True, kw_only=True)
class _MemoryEstimate:
    """What a planner says of a device without rates."""

    memory: MemoryNumbers
    fit: Fit
    tokens_per_s_per_device: float = math.nan


def _memory_alone(case: Case) -> Estimate:
    from shardyard.planner.memory import fit, memory

    needed = memory(case.workload)
    limit = case.cluster.accelerator.memory_bytes
    return _MemoryEstimate(memory=needed, fit=fit(needed.device_bytes, limit))


def _with_own_recompute(case: Case, estimate: Planner) -> tuple[Case, Estimate]:
    """Where the row names no mode of recompute, the fastest way that fits, as a search finds it."""
    first = estimate(case.workload, case.cluster)
    if not case.recompute_is_open or first.fit.verdict != DOES_NOT_FIT:
        return case, first
    found = []
    offloads: tuple[Literal["none", "activations"], ...] = ("none", "activations")
    for mode, offload in product(MODES, offloads):
        techniques = replace(case.workload.techniques, offload=offload)
        workload = replace(case.workload, recompute=mode, techniques=techniques)
        answer = estimate(workload, case.cluster)
        if answer.fit.verdict != DOES_NOT_FIT:
            found.append((replace(case, workload=workload), answer))
    return max(found, key=lambda each: each[1].tokens_per_s_per_device, default=(case, first))


def run(table: Path, estimate: Planner) -> dict[str, Any]:
    """The whole report on a table, as plain values; shares are fractions."""
    return report(predict(read_table(table), estimate))


def report(outcome: Outcome) -> dict[str, Any]:
    """``families``, ``macro`` and ``leave_one_source_out``."""
    families = {name: _family(outcome, name) for name in outcome.families}
    counted = {name: family for name, family in families.items() if family["in_macro"]}
    ratios = {name: _ratios(_of_quality(outcome, name, COUNTED_QUALITIES)) for name in counted}
    answer = {
        "families": families,
        "macro": _macro(families, counted),
        "leave_one_source_out": metrics.leave_one_source_out(ratios),
    }
    rounded: dict[str, Any] = _rounded(answer)
    return rounded


# --- one source


def _family(outcome: Outcome, name: str) -> dict[str, Any]:
    counted = _of_quality(outcome, name, COUNTED_QUALITIES)
    noisy = _of_quality(outcome, name, ("C",))
    reasons = Counter(
        why for row, why in outcome.skipped if (row.raw("family") or "unnamed") == name
    )
    qualities = Counter(p.case.quality for p in (*counted, *noisy))
    return {
        "rows_used": len(counted) + len(noisy),
        "rows_skipped": dict(reasons.most_common()),
        **_figures(counted or noisy),
        "in_macro": bool(counted),
        "rows_by_quality": dict(sorted(qualities.items())),
        "quality_c": _figures(noisy) if counted and noisy else None,
    }


def _of_quality(outcome: Outcome, family: str, qualities: Iterable[str]) -> list[Prediction]:
    return [
        p for p in outcome.predictions if p.case.family == family and p.case.quality in qualities
    ]


def _ratios(predictions: Iterable[Prediction]) -> list[float]:
    return [p.rate.ratio for p in predictions if p.rate]


def _figures(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Every measure of these rows; None where there is nothing to compare."""
    ratios = _ratios(predictions)
    groups = _groups(predictions)
    regrets = [metrics.regret(group) for group in groups]
    return {
        "mape": metrics.mape(ratios),
        "p90": metrics.p90(ratios),
        "bias": metrics.bias(ratios),
        "spearman": metrics.mean_or_none([metrics.spearman(group) for group in groups]),
        "regret_mean": metrics.mean_or_none(regrets),
        "regret_max": max(regrets, default=None),
        "mape_scaled": metrics.mape_scaled(ratios),
        "memory_mape": _memory_mape(predictions, by="kind"),
        **_oom(predictions),
        "memory_mape_by_number": _memory_mape(predictions, by="number"),
        "speed_rows": len(ratios),
        "memory_rows": sum(p.memory is not None for p in predictions),
        "groups": len(groups),
    }


def _groups(predictions: Iterable[Prediction]) -> list[list[Pair]]:
    """Rates of layouts that do the same work on the same devices, three and more.

    A layout that was measured several times counts once, with its median.
    """
    measured: dict[object, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for prediction in predictions:
        if prediction.rate:
            layout = repr(prediction.case.workload)
            measured[prediction.case.group][layout].append(prediction.rate)
    groups = []
    for layouts in measured.values():
        if len(layouts) >= metrics.LEAST_GROUP:
            groups.append([_median(pairs) for pairs in layouts.values()])
    return groups


def _median(pairs: Sequence[Pair]) -> Pair:
    measured = statistics.median(pair.measured for pair in pairs)
    return Pair(predicted=pairs[0].predicted, measured=measured)


def _memory_mape(predictions: Iterable[Prediction], *, by: str) -> dict[str, float] | None:
    """``mem_kind`` (or which of the three numbers) -> error."""
    ratios = defaultdict[str, list[float]](list)
    for prediction in predictions:
        if prediction.memory and prediction.case.memory:
            ratios[getattr(prediction.case.memory, by)].append(prediction.memory.ratio)
    return {kind: metrics.mape(rows) or 0.0 for kind, rows in sorted(ratios.items())} or None


def _oom(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Of the runs that ran out of memory, how many were called; of the others, how many, too."""
    called, alarms = Counter[bool](), Counter[bool]()
    for prediction in predictions:
        alarm = prediction.estimate.fit.verdict == DOES_NOT_FIT
        (called if prediction.case.is_oom else alarms)[alarm] += 1
    return {
        "oom_recall": _share(called).value,
        "oom_false_alarms": _share(alarms).value,
        "oom_counts": {
            "ooms": called.total(), "called": called[True],
            "others": alarms.total(), "false_alarms": alarms[True],
            "recall_interval": _share(called).interval(),
            "false_alarm_interval": _share(alarms).interval(),
        },
    }  # fmt: skip


def _share(counts: Counter[bool]) -> Share:
    return Share(hits=counts[True], total=counts.total())


# --- all sources


def _macro(families: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """Mean over sources, every source counting once; the worst source's worst regret."""
    names = (
        "mape", "p90", "bias", "spearman", "regret_mean", "mape_scaled", "oom_recall",
        "oom_false_alarms",
    )  # fmt: skip
    rows = list(counted.values())
    worst = [row["regret_max"] for row in rows if row["regret_max"] is not None]
    counts = [row["oom_counts"] for row in rows]
    called = Share(hits=sum(c["called"] for c in counts), total=sum(c["ooms"] for c in counts))
    alarms = Share(
        hits=sum(c["false_alarms"] for c in counts), total=sum(c["others"] for c in counts)
    )
    reasons = Counter[str]()
    for family in families.values():
        reasons.update(family["rows_skipped"])
    return {
        "families": len(counted),
        "rows_used": sum(family["rows_used"] for family in families.values()),
        "rows_skipped": dict(reasons.most_common()),
        **{name: metrics.mean_or_none([row[name] for row in rows]) for name in names},
        "regret_max": max(worst, default=None),
        "memory_mape": _mean_by_key(row["memory_mape"] for row in rows),
        "memory_mape_by_number": _mean_by_key(row["memory_mape_by_number"] for row in rows),
        "oom_counts": {
            "ooms": called.total, "called": called.hits,
            "others": alarms.total, "false_alarms": alarms.hits,
            "recall_interval": called.interval(), "false_alarm_interval": alarms.interval(),
        },
    }  # fmt: skip


def _mean_by_key(tables: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    values = defaultdict[str, list[float]](list)
    for table in tables:
        for key, value in (table or {}).items():
            values[key].append(value)
    return {key: statistics.fmean(rows) for key, rows in sorted(values.items())} or None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


# --- the command


def write_rows(outcome: Outcome, path: Path) -> None:
    """One line a row of the table: predicted beside measured, or why not."""
    head = (
        "line", "id", "family", "quality", "tokens_per_s_per_device", "predicted", "ratio",
        "memory_number", "memory_gib", "predicted_gib", "memory_ratio", "is_oom", "fits", "skipped",
    )  # fmt: skip
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for prediction in outcome.predictions:
            writer.writerow(_row(prediction))
        for row, why in outcome.skipped:
            start = [row.line, row.raw("id"), row.raw("family"), row.raw("quality")]
            writer.writerow([*start, *[""] * (len(head) - len(start) - 1), why])


def _row(prediction: Prediction) -> list[object]:
    case, rate, memory = prediction.case, prediction.rate, prediction.memory
    return [
        case.row.line, case.row.raw("id"), case.family, case.quality,
        *(_pair(rate, unit=1.0)),
        case.memory.number if case.memory else "",
        *(_pair(memory, unit=2.0**30)),
        case.is_oom, prediction.estimate.fit.verdict, "",
    ]  # fmt: skip


def _pair(pair: Pair | None, *, unit: float) -> list[object]:
    if pair is None:
        return ["", "", ""]
    return [round(pair.measured / unit, 3), round(pair.predicted / unit, 3), round(pair.ratio, 4)]


def main(argv: Sequence[str] | None = None, *, planner: Planner | None = None) -> int:
    """Print the report on a table; the exit code is 0, or 2 if the table cannot be used."""
    parser = argparse.ArgumentParser(
        prog="planner_accuracy", description="The planner's error against published runs."
    )
    parser.add_argument("--table", required=True, type=Path, help="CSV of measured runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--rows", type=Path, help="also write every row's prediction to this CSV")
    parser.add_argument("--out", type=Path, help="also write the JSON as a raw result here")
    args = parser.parse_args(argv)
    try:
        rows = read_table(args.table)
        outcome = predict(rows, planner or _planner())
    except ShardyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    answer = report(outcome)
    print(json.dumps(answer, indent=2) if args.json else render(answer, table=str(args.table)))
    if args.out:
        from benchmarks.record import write_result

        write_result("planner-accuracy", answer, args.out)
    if args.rows:
        write_rows(outcome, args.rows)
        print(f"predictions of all rows: {args.rows}", file=sys.stderr)
    return 0


def _planner() -> Planner:
    # after the table is read, so that a bad one is answered at once
    from shardyard.planner.estimate import estimate

    return estimate


if __name__ == "__main__":
    sys.exit(main())

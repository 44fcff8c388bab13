"""The accuracy report as text, below 100 columns: speed, order, memory, and what was left out."""

from collections.abc import Iterable, Mapping
from typing import Any

_NAME = 24
_SHORT = {"allocated": "allocated peak", "reserved": "reserved peak", "device": "nvidia-smi"}


def render(report: Mapping[str, Any], *, table: str) -> str:
    """All tables of a report.

    Args:
        report: As ``planner_accuracy.report`` returns it.
        table: What was compared with.
    """
    parts = [
        [f"Predicted against measured, {table}"],
        _speed(report),
        _memory(report),
        _out_of_memory(report),
        _left_out(report),
        _noisy(report),
        _one_left_out(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _speed(report: Mapping[str, Any]) -> list[str]:
    columns = ("rows", "MAPE", "90 %", "bias", "scaled", "groups", "order", "regret", "worst")
    lines = ["Tokens/s and device", _line("source", columns)]
    for name, family in report["families"].items():
        lines.append(_line(_starred(name, family), _speed_cells(family)))
    macro = {**report["macro"], "speed_rows": None, "groups": None}
    lines.append(_line("macro", _speed_cells(macro)))
    return [
        *lines,
        "scaled: MAPE after the factor that suits the source best. order: Spearman within groups",
        "of 3 or more layouts. regret: slowdown of the layout ranked first against the best one.",
        *(["* no row of quality A or B was used; not in macro"] if _any_starred(report) else []),
    ]


def _any_starred(report: Mapping[str, Any]) -> bool:
    """Whether some source has no row that counts."""
    return any(not family["in_macro"] for family in report["families"].values())


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        _number(row["speed_rows"]),
        _percent(row["mape"]),
        _percent(row["p90"]),
        _percent(row["bias"], signed=True),
        _percent(row["mape_scaled"]),
        _number(row["groups"]),
        "-" if row["spearman"] is None else f"{row['spearman']:.2f}",
        _percent(row["regret_mean"]),
        _percent(row["regret_max"]),
    ]


def _memory(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, family in report["families"].items():
        for kind, error in (family["memory_mape"] or {}).items():
            lines.append(f"{_starred(name, family):{_NAME}}{_percent(error):>8}  {kind}")
    for number, error in (report["macro"]["memory_mape_by_number"] or {}).items():
        lines.append(f"{'macro':{_NAME}}{_percent(error):>8}  {_SHORT[number]}")
    return ["Memory, MAPE by what was printed", *lines] if lines else []


def _out_of_memory(report: Mapping[str, Any]) -> list[str]:
    lines = ["Out of memory", _line("source", ("OOMs", "called", "recall", "others", "alarms"))]
    rows = [*report["families"].items(), ("macro", report["macro"])]
    for name, row in rows:
        counts = row["oom_counts"]
        if not counts["ooms"] and not counts["false_alarms"]:
            continue
        cells = (
            _number(counts["ooms"]),
            _number(counts["called"]),
            _percent(row["oom_recall"]),
            _number(counts["others"]),
            _percent(row["oom_false_alarms"]),
        )
        lines.append(_line(_starred(name, row), cells))
    counts = report["macro"]["oom_counts"]
    for what, hits, total in (("recall", "called", "ooms"), ("alarms", "false_alarms", "others")):
        key = "recall_interval" if what == "recall" else "false_alarm_interval"
        if counts[key]:
            low, high = counts[key]
            lines.append(
                f"{what} over all rows: {counts[hits]} of {counts[total]}, "
                f"95 %: {_percent(low)} to {_percent(high)}"
            )
    return lines


def _left_out(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, family in report["families"].items():
        left = sum(family["rows_skipped"].values())
        used = family["rows_used"]
        lines.append(f"{name:{_NAME}}{used:>5} used{left:>5} not")
        lines += [f"{'':{_NAME}}{count:>10} {why}" for why, count in family["rows_skipped"].items()]
    return ["Rows", *lines]


def _noisy(report: Mapping[str, Any]) -> list[str]:
    """What rows of quality C say in sources that hold better ones."""
    lines = []
    for name, family in report["families"].items():
        noisy = family["quality_c"]
        if noisy:
            rows = _number(family["rows_by_quality"].get("C"))
            cells = (rows, _percent(noisy["mape"]), _percent(noisy["bias"], signed=True))
            lines.append(_line(name, cells))
    if not lines:
        return []
    return [
        "Rows of quality C, not in the figures above",
        _line("source", ("rows", "MAPE", "bias")),
        *lines,
    ]


def _one_left_out(report: Mapping[str, Any]) -> list[str]:
    lines = [
        _line(name, (f"{row['scalar']:.3f}", _percent(row["mape"])))
        for name, row in report["leave_one_source_out"].items()
    ]
    if not lines:
        return []
    return [
        "Leave one source out: the factor that the other sources ask for, and the error under it",
        _line("source", ("factor", "MAPE")),
        *lines,
    ]


def _starred(name: str, row: Mapping[str, Any]) -> str:
    return name if row.get("in_macro", True) else f"{name} *"


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:{_NAME}}" + "".join(f"{cell:>8}" for cell in cells)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"

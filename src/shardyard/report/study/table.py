"""The table of a study: its columns for people, and CSV and JSON for programs."""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from shardyard.planner.format import unmeasured_words
from shardyard.planner.throughput import UNMEASURED
from shardyard.report.study.measured import WARM_UP_WORDS
from shardyard.report.study.rows import CONFIDENCE_WORDS, ScalingSeries
from shardyard.report.study.scaling import series_notes
from shardyard.report.study.values import Values, values_of
from shardyard.units import ABSENT, format_bytes, format_percent, format_seconds, format_usd

VERSION = 1
"""Version of table.json."""

Column = tuple[str, str, Callable[[Values], str]]
"""Its head in words, the key that it is of, and the text of a cell."""


def _number(value: float | None) -> str:
    """Four digits at least, and a source's own decimals where numbers are small."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _efficiency(row: Values) -> str:
    text = percent_of(row, "efficiency")
    if row["efficiency"] is None and row["extrapolated_efficiency"] is not None:
        return f"{percent_of(row, 'extrapolated_efficiency')} extrapolated"
    return text if row["is_scaling"] or text == ABSENT else f"({text})"


def percent_of(row: Values, key: str) -> str:
    """``85.10 %``, with ``85.10 (83.00 to 87.10) %`` where an interval is known."""
    value, low, high = row[key], row[f"{key}_low"], row[f"{key}_high"]
    if value is None:
        return ABSENT
    if low is None or high is None:
        return f"{100 * value:.2f} %"
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f}) %"


def _of(key: str, text: Callable[[Any], str]) -> Callable[[Values], str]:
    return lambda row: ABSENT if row[key] is None else text(row[key])


def _rated(key: str, text: Callable[[Any], str]) -> Callable[[Values], str]:
    """Format like ``_of``, and mark values predicted from rates that were never measured."""

    def cell(row: Values) -> str:
        is_marked = row["unmeasured"] and row["origin"] == "predicted"
        return _of(key, text)(row) + (UNMEASURED if is_marked and row[key] is not None else "")

    return cell


def _memory(row: Values) -> str:
    text = _of("memory_bytes", format_bytes)(row)
    return f"{text} (tight)" if row["tight"] and text != ABSENT else text


def _error(row: Values) -> str:
    if row["efficiency_error"] is not None and row["efficiency_error"] != 0:
        return f"{100 * row['efficiency_error']:+.1f} points"
    return ABSENT


def _predicted(row: Values) -> str:
    text = percent_of(row, "predicted_efficiency")
    return text + (UNMEASURED if row["unmeasured"] and text != ABSENT else "")


def _changed(row: Values) -> str:
    if row["changed"]:
        return "; ".join(row["changed"])
    return "no"


COLUMNS: tuple[Column, ...] = (
    ("nodes", "nodes", lambda row: str(row["nodes"])),
    ("accelerators", "accelerators", lambda row: str(row["accelerators"])),
    ("how", "origin", lambda row: str(row["origin"])),
    ("samples/s", "samples_per_s", _rated("samples_per_s", _number)),
    ("tokens/s", "tokens_per_s", _rated("tokens_per_s", _number)),
    ("per accelerator", "per_accelerator", _rated("per_accelerator", _number)),
    ("efficiency", "efficiency", _efficiency),
    ("predicted efficiency", "predicted_efficiency", _predicted),
    ("off by", "efficiency_error", _error),
    ("rate off by", "rate_error", _of("rate_error", lambda value: f"{100 * value:+.1f} %")),
    ("as printed", "printed", lambda row: str(row["printed"]) or ABSENT),
    ("epoch", "epoch_s", _rated("epoch_s", format_seconds)),
    ("ideal epoch", "ideal_epoch_s", _rated("ideal_epoch_s", format_seconds)),
    ("memory of a device", "memory_bytes", _memory),
    ("MFU", "mfu", _rated("mfu", format_percent)),
    ("epoch costs", "usd_per_epoch", _rated("usd_per_epoch", format_usd)),
    ("run costs", "usd_per_run", _rated("usd_per_run", format_usd)),
    ("settings changed", "changed", _changed),
)  # fmt: skip
"""All columns, in order; one that no row has anything in is left out."""

SPEED = ("samples_per_s", "tokens_per_s", "per_accelerator", "efficiency", "predicted_efficiency",
         "efficiency_error", "rate_error", "printed")  # fmt: skip
"""Columns of the first of a page's two tables: one with all columns is wider than a page."""

_ALWAYS = {"nodes", "accelerators", "origin", "changed"}


def columns_of(rows: Sequence[Values]) -> list[Column]:
    """Return the columns that have a value in some row; an efficiency also if it is missing."""
    known = {key for row in rows for key, value in row.items() if value not in (None, "")}
    if "extrapolated_efficiency" in known or "predicted_efficiency" not in known:
        known.add("efficiency")
    return [column for column in COLUMNS if column[1] in known | _ALWAYS]


def method_notes(series: Sequence[ScalingSeries]) -> list[str]:
    """Explain the numbers, for readers of the table without the page."""
    said = [
        "Efficiency is the rate of an accelerator over that of the smallest size. In brackets: "
        "settings changed too, so that it is not called scaling."
    ]
    rows = [row for each in series for row in each.rows]
    if any(row.origin == "measured" for row in rows):
        said.append(
            f"Measured efficiencies have a {CONFIDENCE_WORDS}: steps that follow each other are "
            "alike, so that stretches of steps are compared and not single ones. What differs "
            f"from run to run of one size is not in it. Of steps, {WARM_UP_WORDS}."
        )
    if any(row.forecast is not None for row in rows):
        said.append(
            "Predicted efficiencies have a band: from no wait between nodes at all to the network "
            "at one device's share of it, and ranks that wait for each other more."
        )
    planned = [row for row in rows if row.forecast is not None]
    said += [
        unmeasured_words(why) for why in dict.fromkeys(row.unmeasured for row in planned) if why
    ]
    if any(row.origin in ("extrapolated", "not run") for row in rows):
        said.append(
            "Extrapolated efficiencies have a band: between what grows with each doubling and what "
            "grows with each accelerator, through the last measured size."
        )
    return said


def to_json(name: str, series: Sequence[ScalingSeries]) -> dict[str, Any]:
    """Plain values; what `--json` prints and table.json holds."""
    return {
        "version": VERSION,
        "name": name,
        "how": method_notes(series),
        "series": [
            {
                "name": each.name,
                "kind": each.kind,
                "hold": each.hold,
                "source": each.source,
                "remarks": series_notes(each),
                "rows": values_of(each),
            }
            for each in series
        ],
    }


def to_csv(series: Sequence[ScalingSeries]) -> str:
    """All series under one header; a cell without a value is empty."""
    rows = [row for each in series for row in values_of(each)]
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell_text(value) for key, value in row.items()})
    return buffer.getvalue()


def _cell_text(value: Any) -> Any:
    if isinstance(value, dict):
        return "; ".join(f"{name} {seconds:.6g} s" for name, seconds in value.items())
    if isinstance(value, list):
        return "; ".join(value)
    return "" if value is None else value


def _with_terms(rows: Sequence[Values]) -> list[Values]:
    return [row for row in rows if row["terms"] or row["predicted_terms"]]


def term_rows(rows: Sequence[Values]) -> list[list[str]]:
    """Terms of a step, a row a term and a column a size: measured ones first, then the plan's."""
    shown = _with_terms(rows)
    found = []
    for key, kind in (("terms", "measured"), ("predicted_terms", "predicted")):
        names = list(dict.fromkeys(name for row in shown for name in row[key]))
        for name in names:
            cells = [row[key].get(name) for row in shown]
            found.append(
                [f"{kind}: {name}", *(ABSENT if s is None else format_seconds(s) for s in cells)]
            )
    return found


def term_heads(rows: Sequence[Values]) -> list[str]:
    """Over the columns of ``term_rows``, without the first."""
    return [f"{row['accelerators']} ({row['origin']})" for row in _with_terms(rows)]

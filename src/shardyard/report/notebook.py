"""HTML of values that a notebook shows: small, escaped, and readable in its light and dark theme.

A notebook may drop style sheets and scripts, so styles are in the elements: text and lines
have the colour of the notebook, and curves have colours that differ from both backgrounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import Any

from shardyard.io.sanitize import sanitize
from shardyard.units import ABSENT, format_count

_COLOURS = ("#3f7fd8", "#c8681a", "#2c9068", "#d24a5a", "#8a63c8", "#1f8b9c", "#957312", "#c2559a")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 210, 58, 36, 10, 14
_MOST_ROWS, _MOST_CURVES, _MOST_POINTS = 20, 24, 400


class MetricsTable(list[dict[str, Any]]):
    """Lines of a run, a dict each: ``pandas.DataFrame(table)`` takes them."""

    def column(self, name: str) -> list[Any]:
        """Return a value of each line; None: the line has none."""
        return [line.get(name) for line in self]

    def __repr__(self) -> str:
        steps = [line["step"] for line in self if "step" in line]
        span = f", steps {steps[0]:,} to {steps[-1]:,}" if steps else ""
        return f"<{type(self).__name__} of {len(self):,} lines{span}>"

    def _repr_html_(self) -> str:
        losses = [(line["step"], line["loss"]) for line in self if line.get("loss") is not None]
        chart = ""
        if losses:
            curve = NotebookCurve("loss", *map(list, zip(*losses, strict=True)))
            chart = chart_html([curve], title="Training loss", x_title="step")
        shown = self[-5:]
        names = [
            name for name in _names(shown) if any(line.get(name) is not None for line in shown)
        ]
        rows = [[cell(line.get(name)) for name in names] for line in shown]
        note = "" if len(shown) == len(self) else f"The last {len(shown)} of {len(self):,} lines."
        return chart + table_html(names, rows, note=note)


def _names(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line))


def cell(value: Any) -> str:
    """Return a value as a table shows it: four digits of a fraction."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _text(value: str) -> str:
    return escape(sanitize(value))


def details_html(title: str, details: Sequence[tuple[str, str, str]], *, lead: str = "") -> str:
    """Return a title and a table of names, values and notes."""
    head = f'<div style="font-weight:600">{_text(title)}</div>'
    if lead:
        head += f'<div style="max-width:90ch;margin:2px 0 4px">{_text(lead)}</div>'
    return head + table_html((), details) if details else head


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = "") -> str:
    """Return a table that scrolls inside itself; the first cell of a row is its name."""
    style = "text-align:left;padding:2px 14px 2px 0;vertical-align:top;background:none"
    parts = ['<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:4px 0">']
    if heads:
        cells = "".join(f'<th scope="col" style="{style}">{_text(head)}</th>' for head in heads)
        parts.append(f"<thead><tr>{cells}</tr></thead>")
    parts.append("<tbody>")
    for row in rows[:_MOST_ROWS]:
        first, *others = (_text(each) for each in row)
        cells = f'<th scope="row" style="{style};font-weight:400">{first}</th>'
        cells += "".join(f'<td style="{style}">{each}</td>' for each in others)
        parts.append(f'<tr style="background:none">{cells}</tr>')
    parts.append("</tbody></table></div>")
    if len(rows) > _MOST_ROWS:
        note = f"{len(rows) - _MOST_ROWS:,} more rows. {note}".strip()
    if note:
        parts.append(f'<div style="opacity:.75">{_text(note)}</div>')
    return "".join(parts)


@dataclass(frozen=True)
class NotebookCurve:
    """One line of a chart."""

    name: str
    xs: list[float]
    ys: list[float]


def downsampled(xs: Sequence[float], ys: Sequence[float], most: int = _MOST_POINTS) -> list[int]:
    """Return which points to draw: both ends, and the extremes of each stretch."""
    if len(xs) <= most:
        return list(range(len(xs)))
    kept = {0, len(xs) - 1}
    stretches = most // 2
    for number in range(stretches):
        places = range(len(xs) * number // stretches, len(xs) * (number + 1) // stretches)
        kept |= {min(places, key=ys.__getitem__), max(places, key=ys.__getitem__)}
    return sorted(kept)


def chart_html(curves: Sequence[NotebookCurve], *, title: str, x_title: str) -> str:
    """Return a chart of lines as SVG, with a label for screen readers; empty: no curve has points.

    Args:
        curves: Finite values only.
    """
    drawn = [curve for curve in curves if curve.xs][:_MOST_CURVES]
    if not drawn:
        return ""
    x_low, x_high = _range([x for curve in drawn for x in curve.xs], air=0.0)
    y_low, y_high = _range([y for curve in drawn for y in curve.ys], air=0.05)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return round(_LEFT + right * wide, 1), round(_TOP + (1 - up) * high, 1)

    last = ", ".join(f"{curve.name} {curve.ys[-1]:.4g}" for curve in drawn[:6])
    label = f"{title} over {x_title}, {len(drawn)} curves. Last values: {last}."
    parts = [
        f'<svg role="img" aria-label="{_text(label)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;max-width:{_WIDTH}px;height:auto" fill="none" '
        'font-family="sans-serif" font-size="11">'
    ]
    for y in _ticks(y_low, y_high, 6):
        top = place(x_low, y)[1]
        parts.append(
            f'<path d="M{_LEFT} {top}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".2"/>'
            f'<text x="{_LEFT - 6}" y="{top + 4}" text-anchor="end" fill="currentColor">'
            f"{_number(y)}</text>"
        )
    parts += [
        f'<text x="{place(x, y_low)[0]}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle" '
        f'fill="currentColor">{_number(x)}</text>'
        for x in _ticks(x_low, x_high, 8)
    ]
    for number, curve in enumerate(drawn):
        points = " ".join(
            "{},{}".format(*place(curve.xs[k], curve.ys[k]))
            for k in downsampled(curve.xs, curve.ys)
        )
        colour = _COLOURS[number % len(_COLOURS)]
        dash = f' stroke-dasharray="{5 + number // len(_COLOURS)} 3"' * (number >= len(_COLOURS))
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="1.7"{dash}/>')
    parts.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 5}" text-anchor="middle" '
        f'fill="currentColor">{_text(x_title)}</text></svg>'
    )
    head = f'<div style="font-weight:600;margin-top:8px">{_text(title)}</div>'
    return head + "".join(parts) + _legend(drawn)


def _legend(curves: Sequence[NotebookCurve]) -> str:
    if len(curves) == 1:
        return ""
    keys = "".join(
        f'<span style="margin-right:14px"><span style="display:inline-block;width:14px;height:3px;'
        f"vertical-align:middle;margin-right:5px;background:{_COLOURS[number % len(_COLOURS)]}"
        f'"></span>{_text(curve.name)}</span>'
        for number, curve in enumerate(curves)
    )
    return f"<div>{keys}</div>"


def _range(values: Sequence[float], *, air: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * air or (abs(low) * 0.05 or 1.0) * (low == high)
    return low - room, high + room


def _ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    first = -floor(-low / step)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return format_count(value) if abs(value) >= 1e4 else f"{value:.4g}"

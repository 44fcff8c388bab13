"""The two charts of the README and the evidence page, drawn from raw results.

docs/predicted-and-measured.svg: speed of published runs, predicted and measured.
docs/recovery.svg: seconds from a killed worker to the next step, Shardyard and torchrun.
"""

import csv
import json
import math

from docs.generate.terminal import RESULTS, newest

WIDTH, HEIGHT = 420, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 404, 46, 284
"""Edges of the plot, in pixels."""
STYLE = """\
 text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2328}
 .t{font-weight:600;font-size:13px}.s{fill:#57606a;font-size:11px}
 .grid{stroke:#d0d7de;fill:none}.ideal{stroke:#57606a;stroke-dasharray:4 3}
 .dot{fill:#0969da;fill-opacity:.45}.ours{fill:#0969da}.theirs{fill:#8c959f}
 @media (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9da7b3}.grid{stroke:#30363d}
 .dot,.ours{fill:#58a6ff}.ideal{stroke:#9da7b3}}
"""
SPEEDS = (1.0, 400_000.0)
"""Ends of both axes of speed, in tokens per second per device."""


def predicted() -> str:
    """Each published run as a point: measured speed to the right, predicted speed up.

    Rows of quality C are left out, as in the means of docs/accuracy.md.
    """
    rows_file = sorted((RESULTS / "cpu-2core").glob("planner-accuracy-rows-2*.csv"))[-1]
    with rows_file.open() as file:
        rows = [row for row in csv.DictReader(file) if row["predicted"] and row["quality"] != "C"]
    points = [(float(row["tokens_per_s_per_device"]), float(row["predicted"])) for row in rows]
    near = sum(abs(math.log(up / right)) <= math.log(1.25) for right, up in points) / len(points)
    lines = []
    for power in range(6):
        speed, x, y = f"{10**power:,}", _across(10.0**power), _up(10.0**power)
        lines += [
            f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}M{LEFT} {y:.1f}H{RIGHT}"/>',
            f'<text class="s" x="{x:.1f}" y="{BOTTOM + 15}" text-anchor="middle">{speed}</text>',
            f'<text class="s" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>',
        ]
    lines.append(f'<path class="ideal" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}"/>')
    lines += [
        f'<circle class="dot" cx="{_across(right):.1f}" cy="{_up(up):.1f}" r="2.6"/>'
        for right, up in points
    ]
    title = f"Speed of {len(points)} published runs: predicted and measured"
    under = f"tokens/s per GPU, measured. {100 * near:.0f} % lie within 25 % of the line"
    return _chart(title, lines, under)


def recovery() -> str:
    """Median seconds until training continues after a worker was killed."""
    table = json.loads(newest("recovery-torchrun").read_text())["table"]
    bars = [
        ("Shardyard, rank 0 killed", table["tiny"]["rank_0_s"], "ours"),
        ("Shardyard, another rank", table["tiny"]["another_s"], "ours"),
        ("torchrun, rank 0 killed", table["torchrun"]["rank_0_s"], "theirs"),
        ("torchrun, another rank", table["torchrun"]["another_s"], "theirs"),
    ]
    longest = max(seconds for _, seconds, _ in bars)
    left, lines = 172, []
    for number, (name, seconds, kind) in enumerate(bars):
        y = TOP + 16 + number * 52
        wide = max(2.0, (RIGHT - left - 50) * seconds / longest)
        lines += [
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{name}</text>',
            f'<rect class="{kind}" x="{left}" y="{y}" width="{wide:.1f}" height="26" rx="2"/>',
            f'<text x="{left + wide + 6:.1f}" y="{y + 17}">{seconds:.2f} s</text>',
        ]
    hung = table["torchrun"]["hung"]
    under = f"llama-tiny, 2 CPU processes, medians of 20 kills; torchrun hung in {hung} of 20"
    return _chart("Seconds from a killed worker to the next step", lines, under)


def _share(value: float) -> float:
    """Where a speed is on a logarithmic axis, 0 to 1."""
    low, high = SPEEDS
    return math.log(value / low) / math.log(high / low)


def _across(value: float) -> float:
    return LEFT + (RIGHT - LEFT) * _share(value)


def _up(value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * _share(value)


def _chart(title: str, lines: list[str], under: str) -> str:
    middle = (LEFT + RIGHT) // 2
    whole = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-labelledby="title">',
        f'<title id="title">{title}</title>',
        f"<style>\n{STYLE}</style>",
        f'<text class="t" x="14" y="24">{title}</text>',
        *lines,
        f'<text class="s" x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{under}</text>',
        "</svg>",
    ]
    return "\n".join(whole) + "\n"

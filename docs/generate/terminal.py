"""The terminal animation of the README, docs/terminal.svg, from the newest recorded session.

The session is recorded by ``python -m benchmarks.terminal_session``. Scenes follow each other and
repeat; where a reader prefers no motion, the first one stays.
"""

import json
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTH, LINE, TOP, LEFT, FONT = 860, 17, 46, 18, 12.6
READ_S_PER_LINE = 0.55
"""How long a scene is shown, for each of its lines and three more."""
MAX_LINES = 15

STYLE = """\
 text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}
 .frame{fill:#0d1117;stroke:#30363d}.c{fill:#7ee787}.d{fill:#8b949e}.e{fill:#ff7b72}
 .scene{opacity:0}.s0{opacity:1}
"""


def animation() -> str:
    """The whole SVG."""
    session = json.loads(newest("terminal-session").read_text())
    scenes = [(scene["command"], _shown(scene["lines"])) for scene in session["scenes"]]
    seconds = [READ_S_PER_LINE * (len(lines) + 3) for _, lines in scenes]
    whole = sum(seconds)
    height = TOP + LINE * (max(len(lines) for _, lines in scenes) + 2)
    rules, groups, begin = [], [], 0.0
    for number, ((command, lines), length) in enumerate(zip(scenes, seconds, strict=True)):
        start, end = 100 * begin / whole, 100 * (begin + length) / whole
        rules.append(
            f" @keyframes s{number}{{0%,{start:.2f}%{{opacity:{0 if number else 1}}}"
            f"{start + 0.01:.2f}%,{end - 0.01:.2f}%{{opacity:1}}{end:.2f}%,100%{{opacity:0}}}}"
        )
        rules.append(f" .s{number}{{animation:s{number} {whole:.1f}s infinite}}")
        groups.append(_group(number, command, lines))
        begin += length
    motion = "\n".join(rules)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title">\n'
        '<title id="title">Shardyard plans a run, launches it, loses a worker, continues from the '
        "last checkpoint and reports.</title>\n"
        f"<style>\n{STYLE} @media (prefers-reduced-motion:no-preference)"
        f"{{\n{motion}\n }}\n</style>\n"
        f'<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        '<circle cx="20" cy="18" r="5.5" fill="#ff5f57"/><circle cx="38" cy="18" r="5.5" '
        'fill="#febc2e"/><circle cx="56" cy="18" r="5.5" fill="#28c840"/>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )


def newest(name: str) -> Path:
    """The newest raw result of a measurement on two CPU cores."""
    return sorted((RESULTS / "cpu-2core").glob(f"{name}-2*.json"))[-1]


def _shown(lines: list[str]) -> list[str]:
    """The lines that fit, each cut at the edge."""
    wide = int((WIDTH - 2 * LEFT) / (FONT * 0.602))
    cut = [line if len(line) <= wide else line[: wide - 3] + "..." for line in lines]
    return cut if len(cut) <= MAX_LINES else [*cut[: MAX_LINES - 1], "..."]


def _group(number: int, command: str, lines: list[str]) -> str:
    prompt = f'<tspan class="c">$</tspan> {escape(command)}'
    rows = [f'<text x="{LEFT}" y="{TOP}" font-size="{FONT}">{prompt}</text>']
    for row, line in enumerate(lines, 1):
        mark = ' class="e"' if line.startswith("lost ") else ""
        at = f'x="{LEFT}" y="{TOP + LINE * row}" font-size="{FONT}"'
        rows.append(f"<text {at}{mark}>{escape(line)}</text>")
    return f'<g class="scene s{number}">\n' + "\n".join(rows) + "\n</g>"

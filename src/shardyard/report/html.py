"""Building blocks of pages: frame, sections, tables, tiles, escaped text; tables of Markdown too.

matplotlib draws the charts and comes with the extra ``plots``; pages without it have none.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module

from shardyard.io.sanitize import sanitize

# How the report's page looks: one style sheet, light and dark, wide and narrow, no script.

CSS = """
:root { color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --muted: #5d6878; --line: #e1e5eb;
  --blue: #2f6fd0; --orange: #d97a12; --green: #2a9168; --red: #cc3f4f; --grey: #9aa3b0;
  --purple: #7d5bb8; --teal: #1a8fa0; --amber: #e0ac1b; --brown: #8d6b4f; --pink: #d671a5;
  --own-1: #1f5fb8; --own-2: #45a0d8; --own-3: #14807f; --own-4: #8fc3e6;
  --lost-1: #e8913a; --lost-2: #84552c; --lost-3: #d2452f; --lost-4: #f4b8a2; --lost-5: #9c2c4c;
  --lost-6: #e66a8a; --lost-7: #efc638; --lost-8: #ad741c; --lost-9: #cf9bb4; --lost-10: #6b3144;
  --lost-11: #c9b98a; --lost-12: #b8560f; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --card: #1a2028; --ink: #e6eaf0; --muted: #9aa5b4; --line: #2d3541;
  --blue: #6ea3f2; --orange: #f0a04b; --green: #5cc49a; --red: #ef7380; --grey: #6d7683;
  --purple: #a98be0; --teal: #55bccb; --amber: #f0c552; --brown: #b8977b; --pink: #e59bc3;
  --own-1: #4f8fe6; --own-2: #7cc4f0; --own-3: #2ba3a0; --own-4: #b3dcf5;
  --lost-1: #f0a45a; --lost-2: #a97a50; --lost-3: #e8644e; --lost-4: #f7cdbd; --lost-5: #c04a6c;
  --lost-6: #f08aa6; --lost-7: #f3d363; --lost-8: #c8923c; --lost-9: #dab3c7; --lost-10: #94566b;
  --lost-11: #d8caa0; --lost-12: #d9792f; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 23px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 6px 0; } .lead { max-width: 78ch; margin-top: 10px; }
.muted, .note { color: var(--muted); } .note { font-size: 13px; max-width: 92ch; }
header .eyebrow { color: var(--muted); font-size: 13px; margin-bottom: 2px; }
.badge { display: inline-block; border-radius: 999px; padding: 1px 11px; font-size: 13px;
  font-weight: 600; --own: var(--grey); border: 1px solid var(--own); vertical-align: 3px;
  background: color-mix(in srgb, var(--own) 20%, var(--card)); white-space: nowrap; }
.badge:is(.finished, .fits) { --own: var(--green); } .badge.running { --own: var(--blue); }
.badge:is(.drained, .draining, .tight) { --own: var(--orange); }
.badge:is(.failed, .lost, .does-not-fit) { --own: var(--red); }
:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 10px;
  margin-top: 18px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 11px 14px; } .card { padding: 14px 16px; }
.tile .label { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 22px; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.tile .sub { color: var(--muted); font-size: 12.5px; line-height: 1.35; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 12px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 12px 6px; }
figure svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; --shade: color-mix(in srgb, var(--ink) 16%, transparent); background:
  linear-gradient(to right, var(--card) 35%, transparent) left / 26px 100% no-repeat local,
  linear-gradient(to left, var(--card) 35%, transparent) right / 26px 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 9px 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 9px 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } tr.total td { font-weight: 600; }
tr.total td.t { font-weight: 400; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.k { white-space: nowrap; } td.w { overflow-wrap: anywhere; min-width: 14ch; }
td.t { color: var(--muted); font-size: 13px; min-width: 24ch; }
code, pre { font-family: var(--mono); font-size: 13px; }
code.kind { white-space: nowrap; }
.copy { user-select: all; } code.copy { overflow-wrap: normal; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt { color: var(--blue); font-weight: 600; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; background: var(--line);
  margin: 4px 0 12px; }
.bar span { display: block; min-width: 0; box-shadow: inset -1px 0 0 var(--card); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.swatch.tick { width: 3px; height: 14px; border-radius: 0; vertical-align: -3px; }
.keys { display: flex; flex-wrap: wrap; gap: 1px 16px; margin: 2px 0 6px; font-size: 13px;
  color: var(--muted); }
figure.wide { max-width: 640px; }
.productive { background: var(--green); } .data-wait { background: var(--amber); }
.evaluation { background: var(--blue); } .checkpoint-blocked { background: var(--purple); }
.sample { background: var(--teal); } .profile { background: var(--ink); }
.init { background: var(--grey); }
.rendezvous { background: var(--brown); } .load { background: var(--pink); }
.lost-work { background: var(--red); } .detect { background: var(--orange); }
.restart { background: color-mix(in srgb, var(--red) 60%, var(--brown)); }
.teardown { background: color-mix(in srgb, var(--grey) 60%, var(--ink)); }
.waiting { background: color-mix(in srgb, var(--grey) 40%, var(--card)); }
.paused { background: color-mix(in srgb, var(--amber) 40%, var(--card)); }
.unexplained { background:
  repeating-linear-gradient(45deg, var(--muted) 0 3px, var(--card) 3px 6px); }
.good { color: var(--green); } .bad { color: var(--red); font-weight: 600; }
.choice, .sides { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center;
  margin: 4px 0 10px; }
.choice input { position: absolute; opacity: 0; }
.choice label { border: 1px solid var(--line); border-radius: 999px; padding: 3px 13px;
  cursor: pointer; background: var(--card); font-size: 14px; }
.choice input:checked + label { background: var(--blue); border-color: var(--blue);
  color: var(--card); font-weight: 600; }
.choice input:focus-visible + label { outline: 2px solid var(--ink); outline-offset: 2px; }
.sides .side { display: inline-flex; align-items: center; gap: 6px; font-size: 13px;
  cursor: pointer; overflow-wrap: anywhere; margin-right: 10px; }
.sides .side:has(:not(:checked)) { color: var(--muted); } svg.look { flex: none; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 16px; margin-bottom: 10px; }
summary { cursor: pointer; font-weight: 600; } details > *:nth-child(2) { margin-top: 10px; }
.card + details { margin-top: 10px; }
footer { margin-top: 40px; color: var(--muted); font-size: 13px; }
@media (max-width: 560px) { .scroll table:not(.folds, #table) tr > :first-child {
  position: sticky; left: 0; background: var(--card); max-width: 42vw; white-space: normal;
  overflow-wrap: break-word; } }
@media (max-width: 560px) { main { padding: 18px 12px 40px; } h1 { font-size: 19px; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile .value { font-size: 18px; }
  figure { padding: 8px 6px 4px; } .card, details { padding: 12px; }
  th, td { padding-right: 10px; } td.w { min-width: 26ch; } td.t { min-width: 46ch; }
  .folds thead { display: none; } .folds tr { display: flex; flex-wrap: wrap; padding: 6px 0;
    border-bottom: 1px solid var(--line); } .folds tr:last-child { border-bottom: 0; }
  .folds td { border: 0; padding: 0 0 0 10px; min-width: 0; }
  .folds td.k { flex: 1 0 auto; padding-left: 0; }
  .folds td.w, .folds td.t { flex: 1 0 100%; } }
@media print { body { background: #fff; } details { break-inside: avoid; } }
"""


def esc(text: object) -> str:
    """Text as HTML shows it, in an element or an attribute; all that came from outside needs it."""
    return escape(sanitize(str(text)), quote=True)


def render_page(title: str, body: str, *, footer: str, css: str = "") -> str:
    """Return a whole file that opens from disk, without network and without script.

    Args:
        title: Plain text.
        body: HTML.
        footer: HTML.
        css: Rules for only this page.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(title)}</title>
<style>{CSS}{css}</style>
</head>
<body>
<main>
{body}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def render_section(name: str, title: str, body: str) -> str:
    """A part of the page under a heading, with an id to link to."""
    return f'<section id="{name}-section"><h2>{title}</h2>\n{body}</section>'


def render_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    totals: int = 0,
    is_folding: bool = False,
) -> str:
    """Return a table of escaped cells; a head that begins with # is a column of numbers.

    Args:
        heads: Plain text; an empty last one is above reasons. With no text in any, no heads.
        totals: Number of last rows that are sums.
        is_folding: Whether a row becomes a paragraph on a phone; its cells must be clear without
            the heads.
    """
    kinds = ["n" if head.startswith("#") else "w" for head in heads]
    kinds[0] = "n" if kinds[0] == "n" else "k"
    if not heads[-1]:
        kinds[-1] = "t"
    names = [text.removeprefix("#") for text in heads]
    head = "".join(
        f'<th class="{kind}">{esc(name)}</th>' if name else f'<td class="{kind}"></td>'
        for kind, name in zip(kinds, names, strict=True)
    )
    lines = list(rows)
    starts = ["<tr>"] * (len(lines) - totals) + ['<tr class="total">'] * totals
    body = "".join(
        start
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for start, row in zip(starts, lines, strict=True)
    )
    top = f"<thead><tr>{head}</tr></thead>" if any(text.strip("#") for text in heads) else ""
    kind = ' class="folds"' if is_folding else ""
    table = f"<table{kind}>{top}<tbody>{body}</tbody></table>"
    return scrolling(table, ", ".join(filter(None, names)))


def scrolling(table: str, name: str) -> str:
    """Return a table that scrolls inside itself, also by keys.

    Args:
        name: Name for screen readers.
    """
    label = esc(f"Table: {name}" if name else "Table")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def render_tiles(tiles: Iterable[tuple[str, str, str]], *, style: str = "") -> str:
    """Return tiles in a row: label, value and a line below, as text."""
    cells = "".join(
        f'<div class="tile"><div class="label">{esc(label)}</div>'
        f'<div class="value">{esc(value)}</div><div class="sub">{esc(below)}</div></div>'
        for label, value, below in tiles
    )
    attribute = f' style="{style}"' if style else ""
    return f'<div class="tiles"{attribute}>{cells}</div>'


def swatch(variable: str, *, is_tick: bool = False) -> str:
    """A spot of a colour of the style sheet (``--blue``: ``blue``), or an upright tick of it."""
    kind = "swatch tick" if is_tick else "swatch"
    return f'<span class="{kind}" style="background:var(--{variable})"></span>'


def render_markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown; heads and cells are text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(escape_markdown(cell) for cell in line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """Text that Markdown neither splits nor takes for markup."""
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text).replace("\n", " ")


def charts_unavailable_reason() -> str:
    """Why a page can have no pictures, and what to install; empty where they can be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        return (
            f"matplotlib is not installed ({error}), so the page has no pictures. Install it: "
            "pip install 'shardyard[plots]'"
        )
    return ""

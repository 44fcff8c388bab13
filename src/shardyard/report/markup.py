"""What pages are put together from: the frame, sections, tables, and text that stays text."""

from collections.abc import Iterable, Sequence
from html import escape

from shardyard.io.sanitize import printable
from shardyard.report.style import CSS


def esc(text: object) -> str:
    """Text as HTML shows it, in an element or an attribute; all that came from outside needs it."""
    return escape(printable(str(text)), quote=True)


def render_page(title: str, body: str, *, footer: str, css: str = "") -> str:
    """A whole file that opens from disk, without network and without script.

    Args:
        title: Plain text.
        body: HTML.
        footer: HTML.
        css: Rules of this page alone.
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
    """A table of escaped cells; a head that begins with # is a column of numbers.

    Args:
        heads: Plain text; an empty last one stands over reasons. With no text in any, no heads.
        totals: So many of the last rows are sums.
        is_folding: Whether a row becomes a paragraph on a phone; its cells must be clear without
            the heads.
    """
    kinds = ["n" if head.startswith("#") else "w" for head in heads]
    kinds[0] = "n" if kinds[0] == "n" else "k"
    if not heads[-1]:
        kinds[-1] = "t"
    head = "".join(
        f'<th class="{kind}">{esc(text.removeprefix("#"))}</th>'
        for kind, text in zip(kinds, heads, strict=True)
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
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def swatch(variable: str, *, is_tick: bool = False) -> str:
    """A spot of a colour of the style sheet (``--blue``: ``blue``), or an upright tick of it."""
    kind = "swatch tick" if is_tick else "swatch"
    return f'<span class="{kind}" style="background:var(--{variable})"></span>'

"""Documents as Markdown: charts, folded details and whatever is only on the page are left out."""

import re
from collections.abc import Iterable, Iterator, Sequence

from shardyard.io.sanitize import sanitize
from shardyard.report.document import (
    Block,
    Callout,
    CopyCommand,
    Document,
    Listing,
    PageSection,
    Paragraph,
    Table,
    Text,
    Tiles,
    shown,
)


def render_markdown(document: Document) -> str:
    """Return the whole file."""
    badge = f": {document.badge}" if document.badge else ""
    lines = [f"# {_escape(document.heading)}{badge}", *_blocks(document.head)]
    lines += _blocks(document.body)
    text = "\n\n".join(line for line in lines if line)
    return sanitize(re.sub(r"(?m)^(- .*)\n(?=\n- )", r"\1", text) + "\n")  # items of one list


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    for block in shown(blocks, "markdown"):
        match block:
            case PageSection():
                if body := list(_blocks(block.blocks)):
                    yield from (f"## {_escape(block.title)}", *body)
            case Paragraph():
                yield f"{'- ' * block.kind.startswith('item')}{_inline(block.runs)}"
            case Tiles():
                yield _table(("", "", ""), block.rows)
            case Table():
                heads, rows = block.for_medium("markdown")
                yield _table([head.text for head in heads], rows)
            case Callout():
                yield _escape(block.text)
                yield _fenced(block.command, "sh") if block.command else ""
            case CopyCommand():
                purpose = f"# {block.purpose}\n" if block.purpose else ""
                yield _fenced(f"{purpose}{block.command}", "sh")
            case Listing():
                yield _fenced("".join(block.runs), "text")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_run, line))} |" for line in lines)


def _inline(runs: Iterable[str]) -> str:
    return "".join(map(_run, runs))


def _run(run: str) -> str:
    kind = run.kind if isinstance(run, Text) else ""
    if kind == "file":
        return f"[{run}]({run})"
    return f"`{run}`" if kind == "copy" else _escape(run)


def _escape(text: str) -> str:
    """Text that Markdown neither splits nor takes for markup."""
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text).replace("\n", " ")


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"

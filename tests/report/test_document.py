"""One document value: the three renderers show the same text, and only the page its markup."""

import pytest

from shardyard.report.document import (
    Callout,
    CopyCommand,
    Details,
    Document,
    PageSection,
    Paragraph,
    Table,
    Text,
    Tiles,
    code,
    only_in,
)
from shardyard.report.html import render_html
from shardyard.report.markdown import render_markdown
from shardyard.report.terminal import show
from tests.report.test_render import Page

HOSTILE = "<script>alert(1)</script> `x` | \x1b[31m"
ROWS = [
    [Text("a", source=HOSTILE), Text("10 s", order=10.0), "only page"],
    [Text("b", kind="code"), Text("9 s", order=9.0), "only page"],
]


def document() -> Document:
    table = Table(["name", "#time", "+more"], ROWS, is_sortable=True, name="rows")
    return Document(
        title="Title",
        kind="Kind",
        heading=HOSTILE,
        badge="fits",
        head=[Tiles([("speed", Text("1 K", source="measured"), "below")])],
        body=[
            PageSection("times", "Times of it", [Paragraph(("see ", code("x.py"))), table]),
            PageSection(
                "more", "More", [Callout("Do:", "a=1"), CopyCommand("shardyard plan", "again")]
            ),
            PageSection(
                "hidden", "Hidden", [Details("folded", [Paragraph("deep")], only=("page",))]
            ),
        ],
        footer=("the end",),
    )  # fmt: skip


def test_a_page_escapes_all_text_and_shows_where_a_number_comes_from() -> None:
    html = render_html(document())
    page = Page(html)
    assert page.open == [] and page.tags["script"] == 0
    assert "\x1b" not in html and "alert(1)" in "".join(page.text)
    assert page.tags["abbr"] == 2 and 'tabindex="0" title="measured"' in html
    assert page.row("a") == ["a", "10 s", "only page"]
    assert {"times-section", "more-section", "hidden-section"} <= set(page.ids)


def test_a_sorted_column_ranks_numbers_and_not_their_text() -> None:
    html = render_html(document())
    assert 'style="--s1:0;--s2:1;"' in html and 'style="--s1:1;--s2:0;"' in html


def test_markdown_has_the_same_cells_and_no_page_only_column() -> None:
    text = render_markdown(document())
    assert "| name | time |" in text and "| a | 10 s |" in text
    assert "only page" not in text and "deep" not in text and "\x1b" not in text
    assert "# \\<script\\>" in text and "```sh\n# again\nshardyard plan\n```" in text


def test_the_terminal_has_the_same_cells_under_the_title(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([PageSection("a", "Times", [Table(["", "#time", "+more"], ROWS), Callout("Do:", "a=1")])])
    assert capsys.readouterr().out == "\nTimes  time\na      10 s\nb      9 s\n\nDo:\n  a=1\n"


def test_a_block_of_one_medium_is_in_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    show(only_in("page", Paragraph("words")))
    assert capsys.readouterr().out == ""

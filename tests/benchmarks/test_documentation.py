"""The prose of documentation packages: what is kept of each kind of source, and as what."""

import json
from pathlib import Path

import pytest

from benchmarks.documentation import (
    html_paragraphs,
    pod_paragraphs,
    rst_paragraphs,
    write_documents,
)

PROSE = "This is a paragraph of some words, and it ends as a sentence does."


def test_markup_of_each_kind_is_taken_away() -> None:
    rst = (
        "Title\n=====\n\nUse :func:`~a.b` or ``x``,\nsee `the page <http://x>`_.\n\n"
        ".. note::\n\n   In.\n\n    code"
    )
    assert list(rst_paragraphs(rst))[1:] == ["Use a.b or x,\nsee the page."]
    pod = "=head1 NAME\n\nUse C<< $x->y >> and I<B<z>>, L<a page|perlfunc/x>, E<eacute>.\n\n  code"
    assert list(pod_paragraphs(pod)) == ["Use $x->y and z, a page, é."]
    page = "<h1>No</h1><p>One <b>two</b> &amp; three.<p>Four.</p><pre>code</pre>"
    assert list(html_paragraphs(page)) == ["One two & three.", "Four."]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("doc/python3.11/html/_sources/library/x.rst.txt", f"{PROSE}\n\n"),
        ("perl/5.36/pod/x.pod", f"{PROSE}\n\n"),
        ("doc/postgresql-doc-15/html/x.html", f"<p>{PROSE}</p>"),
        ("doc/debian-handbook/html/en-US/x.html", f"<p>{PROSE}</p>"),
    ],
)
def test_a_file_with_prose_is_a_document(name: str, block: str, tmp_path: Path) -> None:
    path = tmp_path / "usr/share" / name
    path.parent.mkdir(parents=True)
    path.write_text(block * 3)
    path.with_name(f"short-{path.name}").write_text(block)
    target = tmp_path / "documents.jsonl"
    assert write_documents(tmp_path, target) == 1
    assert json.loads(target.read_text()) == {"text": "\n\n".join([PROSE] * 3)}

"""Text files of several documents: as WikiExtractor, BERT's code and NVIDIA's write them."""

from pathlib import Path

import pytest

from shardyard.data.byte_ranges import SourceFile, Span
from shardyard.data.formats import FORMATS
from shardyard.data.readers import text
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files
from shardyard.errors import SourceError

EXTRACTED = """<doc id="1" url="https://x" title="A">
A

A is a letter. It comes first.
It is old.
</doc>

<doc id="2" url="https://x" title="B">
B

B comes behind it.

</doc>
"""
TEXTS = ["A\n\nA is a letter. It comes first.\n\nIt is old.", "B\n\nB comes behind it."]
BY_BLANK_LINES = (
    "\n\nA\nA is a letter. It comes first.\n  It is old. \n \n\nB\r\nB comes behind it."
)


def read(path: Path, step: int | None = None) -> list[str]:
    """The documents of all spans of so many bytes."""
    size = path.stat().st_size
    file = SourceFile(str(path), path.name, "documents", size, 0)
    step = step or size
    with path.open("rb") as opened:
        return [
            section.text
            for start in range(0, size, step)
            for section in FORMATS["documents"].read(
                opened, Span(file, start, min(start + step, size)), TextOf()
            )
        ]


@pytest.mark.parametrize("content", [EXTRACTED, BY_BLANK_LINES, "\ufeff" + BY_BLANK_LINES.strip()])
def test_documents_are_set_apart_and_lines_too(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    path.write_bytes(content.encode())
    assert read(path) == TEXTS


@pytest.mark.parametrize("content", [EXTRACTED, BY_BLANK_LINES])
def test_each_span_has_the_documents_that_begin_in_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    path.write_bytes(content.encode())
    for step in range(1, len(content)):
        assert read(path, step) == TEXTS, step


def test_data_format_says_that_text_files_hold_several(tmp_path: Path) -> None:
    for name in ("wiki_00", "wiki_01.txt", "more.jsonl"):
        (tmp_path / name).write_text("x")
    found = {file.name: file.format for file in list_files(str(tmp_path), "documents")}
    assert found == {"wiki_00": "documents", "wiki_01.txt": "documents", "more.jsonl": "jsonl"}
    sentences = {file.format for file in list_files(str(tmp_path / "wiki_01.txt"), "sentences")}
    assert sentences == {"text"}


def test_a_file_without_blank_lines_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MOST_DOCUMENT_BYTES", 1000)
    path = tmp_path / "x.txt"
    path.write_text("First.\n\n" + "A line.\n" * 1000)
    with pytest.raises(SourceError, match=r"x\.txt:3: .*more than 1,000 bytes.*data\.format"):
        read(path)


def test_what_is_no_text_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"First.\n\nSecond.\n  Third \xff.\n")
    with pytest.raises(SourceError, match=r"x\.txt:4: byte 24 of the file is not UTF-8"):
        read(path)

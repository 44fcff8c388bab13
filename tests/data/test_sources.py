"""Sources: what is found, in which order, how it is cut, and what is refused."""

import json
from pathlib import Path

import pytest

from shardyard.data.sources import (
    SECTION_BYTES,
    Section,
    list_files,
    read_sections,
    split_into_pieces,
)
from shardyard.errors import DataError, RequestError


def texts_of(source: str | tuple[str, ...], text_key: str = "text") -> list[str]:
    pieces = split_into_pieces(list_files(source), SECTION_BYTES)
    return [section.text for piece in pieces for section in read_sections(piece, text_key)]


def test_a_folder_contributes_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "x.md").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "aa.py").write_text("second")
    (tmp_path / "c.jsonl").write_text('{"text": "fourth"}\n\n{"text": "fifth"}')
    (tmp_path / "picture.png").write_bytes(b"\xff\x00")
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    assert texts_of(str(tmp_path)) == ["first", "second", "third", "fourth", "fifth"]


def test_globs_and_lists_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "c.txt"):
        (tmp_path / name).write_text(name)
    source = (str(tmp_path / "c.txt"), str(tmp_path / "*.log"), str(tmp_path))
    assert texts_of(source) == ["c.txt", "a.log", "b.log"]


def test_json_lines_are_read_once_whatever_the_borders_of_pieces(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    wanted = [f"{number} " + "é" * (number * 37 % 3000) for number in range(200)]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in wanted))
    assert path.stat().st_size > 4 * SECTION_BYTES
    assert texts_of(str(path), text_key="body") == wanted


@pytest.mark.parametrize("separator", ["\n", " ", ""])
def test_the_sections_of_a_long_text_are_the_whole_text(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "book.txt"
    text = separator.join("é" * (number % 700) for number in range(900))
    path.write_text(text)
    (piece,) = split_into_pieces(list_files(str(path)), 100 * SECTION_BYTES)
    sections = list(read_sections(piece, "text"))
    assert "".join(section.text for section in sections) == text
    assert [section.begins for section in sections] == [True] + [False] * (len(sections) - 1)
    assert [section.ends for section in sections] == [False] * (len(sections) - 1) + [True]
    assert all(len(section.text.encode()) <= 2 * SECTION_BYTES for section in sections)
    assert "".join(texts_of(str(path))) == text  # every section in a piece of its own


def test_a_short_text_is_one_section_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (piece,) = split_into_pieces(list_files(str(tmp_path)), SECTION_BYTES)
    assert list(read_sections(piece, "text")) == [Section("hello", begins=True, ends=True)]


def test_the_standard_library_is_there_without_its_tests() -> None:
    files = list_files("python-stdlib")
    names = [file.name for file in files]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if name.startswith(("test/", "site-packages/"))]
    assert sum(file.size_bytes for file in files) > 5e6


def test_a_missing_path_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no-such' does not exist .*no-such.*python-stdlib"):
        list_files(str(tmp_path / "no-such"))


def test_a_folder_without_text_says_what_counts_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(RequestError, match=r"names no file.*\.txt, \.md, \.py, \.jsonl"):
        list_files(str(tmp_path))
    with pytest.raises(RequestError, match="names no file"):
        list_files(str(tmp_path / "*.txt"))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="empty corpus: its only file holds no text"):
        list_files(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"lines\.jsonl:3: not JSON .*Mend or remove the line"),
        ("[1]", r"lines\.jsonl:3: a JSON list, not an object"),
        ('{"body": 1, "id": 2}', r"lines\.jsonl:3: no key 'text' \(its keys: body, id\)"),
        ('{"text": 7}', r"lines\.jsonl:3: 'text' holds 7, not a string.*data\.text_key"),
    ],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n\n' + line + '\n{"text": "b"}\n')
    with pytest.raises(DataError, match=message):
        texts_of(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\xff", r"a\.txt: byte 2 is not UTF-8.*iconv"),
        (b"ab\0c", r"a\.txt: byte 2 is NUL.*binary"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts_of(str(tmp_path))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (piece,) = split_into_pieces(list_files(str(path)), SECTION_BYTES)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        list(read_sections(piece, "text"))

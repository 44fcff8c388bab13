"""Sources: what is found, in which order, how it is cut, and what is refused."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shardyard.data.byte_ranges import TextSection
from shardyard.data.formats import SECTION_BYTES
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import (
    check_readable,
    list_files,
    read_sections,
    split_into_pieces,
)
from shardyard.errors import RequestError, SourceError


def texts_of(
    source: str | tuple[str, ...], text_key: str = "text", data_format: str = "by_suffix"
) -> list[str]:
    pieces = split_into_pieces(list_files(source, data_format), SECTION_BYTES)
    return [section.text for piece in pieces for section in read_sections(piece, TextOf(text_key))]


def test_a_folder_contributes_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "x.md").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "aa.py").write_text("second")
    (tmp_path / "c.jsonl").write_text('{"text": "fourth"}\n\n{"text": "fifth"}')
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "aa.cpython-311.pyc").write_bytes(b"\xff\x00")
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
    sections = list(read_sections(piece, TextOf()))
    assert "".join(section.text for section in sections) == text
    assert [section.begins for section in sections] == [True] + [False] * (len(sections) - 1)
    assert [section.ends for section in sections] == [False] * (len(sections) - 1) + [True]
    assert all(len(section.text.encode()) <= 2 * SECTION_BYTES for section in sections)
    assert "".join(texts_of(str(path))) == text  # every section in a piece of its own


def test_a_short_text_is_one_section_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (piece,) = split_into_pieces(list_files(str(tmp_path)), SECTION_BYTES)
    assert list(read_sections(piece, TextOf())) == [TextSection("hello", begins=True, ends=True)]


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


def test_what_names_no_file_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"names no file.*\.txt, \.md, \.py.*\.jsonl"):
        list_files(str(tmp_path))


def test_what_exists_is_literal_and_the_rest_is_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "[D] *"
    (folder / "my text").mkdir(parents=True)
    for name in ("a[1].txt", "a1.txt", "my text/b.txt"):
        (folder / name).write_text(name)
    for pattern, found in {
        "": ["a1.txt", "a[1].txt", "my text/b.txt"],
        "a[1].txt": ["a[1].txt"],
        "a[0-9].txt": ["a1.txt"],
        "*/*.txt": ["my text/b.txt"],
        "**/*.txt": ["a1.txt", "a[1].txt", "my text/b.txt"],
        "a[[]*": ["a[1].txt"],
    }.items():
        assert texts_of(str(folder / pattern)) == found, pattern


def test_every_entry_must_match_and_all_that_do_not_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    names = ("a.txt", "[x]*.txt", "missing", "empty")
    with pytest.raises(RequestError) as told:
        list_files([str(tmp_path / name) for name in names])
    first, second, third = str(told.value).split("\n")
    assert "no file matches '[x]*.txt' in" in first and first.endswith("name is written [[].")
    assert "missing' does not exist" in second
    assert "empty' holds no file" in third and "take it out of the list" in third


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("A.XLSX", r"\.XLSX: turn it into CSV or JSON lines first"),
        ("a.txt.gz", r"\.gz: unpack it first"),
        ("a.pdf", r"\.pdf: take its text out first"),
        ("corpus", r"no suffix: if it is plain text, set data\.format=text"),
        ("a.unheard", r"\.unheard: if it is plain text, set data\.format=text"),
    ],
)
def test_a_file_of_a_kind_that_is_not_read_is_refused_by_name(
    tmp_path: Path, name: str, remedy: str
) -> None:
    (tmp_path / name).write_text("text")
    (tmp_path / "README.md").write_text("text")
    for source in (str(tmp_path), str(tmp_path / name), str(tmp_path / "*")):
        with pytest.raises(RequestError, match=remedy) as refused:
            list_files(source)
        assert f"1 of its {1 if source.endswith(name) else 2} files" in str(refused.value)
        assert name in str(refused.value)


def test_of_many_such_files_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"part-{number:03}.xlsx").touch()
    with pytest.raises(RequestError, match=r"300 of its 300 .* part-003\.xlsx, and 296 more\. "):
        list_files(str(tmp_path))


def test_with_the_format_text_any_file_is_text_but_json_lines_stay_json_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.conf").write_text("first")
    (tmp_path / "b").write_text("second")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}')
    assert texts_of(str(tmp_path), data_format="text") == ["first", "second", "third"]


def test_what_shardyard_itself_wrote_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in ("prepared", "runs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text('{"text": "ours"}')
    files = list_files(str(tmp_path), own=[tmp_path / "prepared", tmp_path / "runs"])
    assert [file.name for file in files] == ["a.txt"]


def test_a_link_to_a_folder_is_followed_and_a_circle_of_links_is_gone_round_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").write_text("far")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "near.txt").write_text("near")
    (tmp_path / "text" / "to-far").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "text")
    assert texts_of(str(tmp_path / "text")) == ["near", "far"]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_dangling(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, r"x\.txt is a pipe.*Write its content into a file"),
        (make_socket, r"x\.txt is a socket"),
        (make_loop, r"x\.txt is a symbolic link to .*x\.txt that leads back"),
        (make_dangling, r"x\.txt is a broken symbolic link to nothing"),
    ],
)
@pytest.mark.parametrize("named_by", ["folder", "glob"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(
    tmp_path: Path, make: Callable[[Path], None], message: str, named_by: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    make(tmp_path / "x.txt")
    with pytest.raises(RequestError, match=message):
        list_files(str(tmp_path if named_by == "folder" else tmp_path / "*"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("/dev/null", "/dev/null is a device"),
        ("x" * 300, r"xxx\.\.\. cannot be looked at: File name too long"),
        ("x/" * 3000, r"x/\.\.\. cannot be looked at: File name too long"),
        ("a\0b", r"a\\x00b cannot be looked at: embedded null"),
        ("~nobody-of-this-name/x", "cannot be looked at: Could not determine home"),
    ],
)
def test_a_path_that_can_be_none_is_refused_in_one_message(entry: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        list_files(entry)


def test_a_folder_inside_that_may_not_be_read_is_refused_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def as_another_user(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", as_another_user)
    with pytest.raises(RequestError, match="closed cannot be looked at: Permission denied"):
        list_files(str(tmp_path))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(SourceError, match="empty corpus: its only file holds no text"):
        list_files(str(tmp_path))


def test_the_beginning_of_every_file_is_read_before_any_work(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(SourceError) as refused:
        check_readable(list_files(str(tmp_path)), TextOf())
    lines = str(refused.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:-1]] == [
        f"{tmp_path}/{number}.jsonl:1" for number in range(4)
    ]
    assert "no key 'text' (its keys: body)" in lines[0]
    assert lines[-1] == "and 2 files more"


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (piece,) = split_into_pieces(list_files(str(path)), SECTION_BYTES)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.txt cannot be read: No such file"):
        list(read_sections(piece, TextOf()))

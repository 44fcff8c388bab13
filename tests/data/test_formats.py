"""Formats: what the suffix of a file says, how it is read, and how what is wrong in it is told."""

import json
from pathlib import Path

import pytest

from shardyard.data.byte_ranges import SourceFile, Span, TextSection
from shardyard.data.formats import FORMATS, format_of
from shardyard.data.readers import json as json_file
from shardyard.data.readers.columns import TextOf
from shardyard.errors import SourceError

ROWS = '{"text": "one", "n": 1}\n{"n": 2, "text": "two"}\n'


def sections_of(path: Path, text_key: str = "text") -> list[TextSection]:
    format = format_of(path.name, "by_suffix")
    assert format is not None
    stop = path.stat().st_size
    with path.open("rb") as file:
        source = SourceFile(str(path), path.name, format, stop, 0)
        return list(FORMATS[format].read(file, Span(source, 0, stop), TextOf(text_key)))


def texts_of(path: Path, text_key: str = "text") -> list[str]:
    return [section.text for section in sections_of(path, text_key)]


@pytest.mark.parametrize("name", ["x.jsonl", "x.JSONL", "x.ndjson", "x.Ndjson", "x.json", "x.JSON"])
def test_the_suffix_decides_in_any_case(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(ROWS)
    assert sections_of(path) == [
        TextSection("one", begins=True, ends=True),
        TextSection("two", begins=True, ends=True),
    ]


@pytest.mark.parametrize("name", ["x.txt", "X.TXT", "x.Md", "x.py", "x.R"])
def test_a_file_of_text_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(ROWS)
    assert texts_of(path) == [ROWS]


def test_no_suffix_belongs_to_two_formats() -> None:
    suffixes = [suffix for format in FORMATS.values() for suffix in format.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    assert all(suffix == suffix.lower() and suffix[0] == "." for suffix in suffixes)


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "one"}, {"text": "two"}]',
        '\ufeff[\r\n {"text": "one"} ,\r\n {"text": "two"}\r\n]\r\n',
        '{"text": "one"}{"text": "two"}',
        '{\n "text": "one"\n}\n{\n "text": "two"\n}',
        '[{"text": "one"}]\n[]\n[{"text": ""}, {"text": "two"}]',
    ],
)
def test_a_json_file_holds_a_list_or_objects_one_after_the_other(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert texts_of(path) == ["one", "two"]


WRONG_ROWS = [
    ("{oops", r"not JSON \(.*, column 2\).*Fix or remove the line"),
    ('{"text": "a"', r"not JSON .*column (13|1)\)"),
    ("[1]", r"(a JSON list|1), not an object"),
    ("null", r"null, not an object"),
    ('"text"', r"a JSON string, not an object"),
    ('{"body": 1, "id": 2}', r"no key 'text' \(its keys: body, id\)"),
    ("{}", r"no key 'text' \(its keys: none\)"),
    ('{"messages": []}', r".*It is a dialogue: set data\.format=chat, or"),
    ('{"instruction": "a", "output": "b"}', r".*It is a dialogue: set data\.format=chat, or"),
    ('{"id": "1", "body": "words"}', r".*Set data\.text_key=body, or correct the line"),
    ('{"text": 7}', r"'text' holds 7, not a string.*data\.text_key"),
    ('{"text": null}', r"'text' holds null, not a string"),
    ('{"text": ["a"]}', r"'text' holds a JSON list, not a string"),
    (r'{"text": "ab\ud83d"}', r"'text' holds \\ud83d as its character 3: half of a surrogate pair"),
    (
        r'{"text": "\ude00\ud83d"}',
        r"'text' holds \\ude00 as its character 1: half of a surrogate pair",
    ),
    ("[" * 100_000, r"not JSON .*(in one another|Expecting value)"),
    ('{"text": ' + '{"a": ' * 100_000, r"not JSON .*in one another, deeper than can be read"),
    ('{"text": "a\tb"}', r"not JSON \(Invalid control character"),
    (r'{"a\u001b[2J\ud800": "text"}', r".*its keys: a\\x1b\[2J\\ud800\)"),
    (json.dumps({"key" * 999: 0, **dict.fromkeys(range(20))}), r".*0, 1, 10, .*, and 13 more\)"),
]


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.json"])
@pytest.mark.parametrize(("row", "message"), WRONG_ROWS, ids=[row[:20] for row, _ in WRONG_ROWS])
def test_a_wrong_row_is_named_by_file_and_line(
    tmp_path: Path, name: str, row: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"}\n\n' + row + '\n{"text": "b"}\n')
    with pytest.raises(SourceError, match=rf"{name}:[34]: {message}") as refused:
        texts_of(path)
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()
    assert refused.value.exit_code == 2


def test_a_wrong_row_of_a_list_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[\n{"text": "a"},\n{"text": 7}\n]')
    with pytest.raises(SourceError, match=r"list\.json:3: 'text' holds 7"):
        texts_of(path)
    path.write_text('[\n{"text": "a"}\n{"text": "b"}\n]')
    with pytest.raises(SourceError, match=r"list\.json:3: not JSON \(Expecting ',' or ']'"):
        texts_of(path)
    path.write_text('{"data": [\n{"text": "a"}]}')
    with pytest.raises(SourceError, match=r"list\.json:1: no key 'text' \(its keys: data\)"):
        texts_of(path)


@pytest.mark.parametrize("name", ["right.jsonl", "right.json"])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        (r'{"text": "\ud83d\ude00"}', "\U0001f600"),
        (r'{"text": "\u0000"}', "\0"),
        ('{"n": ' + "9" * 5000 + ', "text": "a"}', "a"),
        ('{"n": NaN, "text": "a"}', "a"),
        ('{"text": "a", "text": "b"}', "b"),
        ('\t{"text": "a\u2028b"}\r', "a\u2028b"),
    ],
)
def test_an_odd_row_that_is_right_is_read(tmp_path: Path, name: str, row: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\n\n")
    assert texts_of(path) == [text]


@pytest.mark.heavy
def test_a_line_of_100_mb_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(100):
            file.write(b"a" * 10**6)
        file.write(b'"}\n')
    (text,) = texts_of(path)
    assert len(text) == 10**8


def test_a_json_file_too_large_to_be_read_whole_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MOST_BYTES", 100)
    path = tmp_path / "x.json"
    path.write_text(ROWS * 9)
    with pytest.raises(SourceError, match=r"x\.json has 432 bytes.*read whole, up to 100.*jq"):
        texts_of(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\nab\xff", r":2: byte 3 of the file is not UTF-8.*iconv"),
        (b"\n\n\nab\0c", r":4: byte 5 of the file is NUL.*binary"),
        ("text".encode("utf-16"), r":1: byte 0 of the file is not UTF-8"),
        (b"PAR1\x15\x04\x00\xff", r":1: byte 7 of the file is not UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"{name}{message}"):
        texts_of(path)

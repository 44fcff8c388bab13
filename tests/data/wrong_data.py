"""Text data that is broken, one row a kind: what is there, and what is told of it.

A row makes its files in a folder and gives the source, or a URL. Of each message the file is named,
and the place in it where there is one.
"""

import bz2
import gzip
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Make = Callable[[Path], Any]

GOOD = [json.dumps({"text": f"text {number} " * 20}) for number in range(200)]


@dataclass(frozen=True)
class Wrong:
    """One kind of broken data."""

    name: str
    make: Make
    """Writes files; returns ``data.source``."""
    words: str
    """Regular expression that the message fits; it names file and place."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of ``data``, beside the source."""


def _file(name: str, content: bytes | str) -> Make:
    def make(folder: Path) -> str:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return make


def _lines(name: str, wrong: bytes | str) -> Make:
    """Line 101 of 201 is wrong."""
    line = wrong if isinstance(wrong, bytes) else wrong.encode()
    good = [each.encode() for each in GOOD]
    return _file(name, b"\n".join([*good[:100], line, *good[100:]]) + b"\n")


_ALL = ("\n".join(GOOD) + "\n").encode()


def _zstd(change: Callable[[bytes], bytes]) -> Make:
    def make(folder: Path) -> str:
        zstd = pytest.importorskip("backports.zstd")
        path = folder / "a.jsonl.zst"
        path.write_bytes(change(zstd.compress(_ALL)))
        return str(path)

    return make


def _flipped(content: bytes, at: float) -> bytes:
    place = int(len(content) * at)
    return (
        content[:place]
        + bytes(255 - byte for byte in content[place : place + 40])
        + content[place + 40 :]
    )


def _parquet(columns: dict[str, Any], change: Callable[[bytes], bytes] = bytes) -> Make:
    def make(folder: Path) -> str:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = folder / "a.parquet"
        parquet.write_table(pyarrow.table(columns), path, row_group_size=50, compression="none")
        path.write_bytes(change(path.read_bytes()))
        return str(path)

    return make


def _endless(name: str, packed: Callable[[bytes], bytes]) -> Make:
    """1 GiB of one line, in parts of 8 MiB; a few kB, but as good as endless."""
    return lambda folder: _file(
        name, packed(GOOD[0].encode() + b"\n") + packed(b"x" * 2**23) * 128
    )(folder)


def _endless_zstd(folder: Path) -> str:
    zstd = pytest.importorskip("backports.zstd")
    path: str = _endless("a.jsonl.zst", zstd.compress)(folder)
    return path


_TEXTS = {"text": [f"text {number} " * 20 for number in range(200)]}


def _invalid_utf8(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([b"sound", b"\xff\xfe\xfd"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), folder / "a.parquet")
    return str(folder / "a.parquet")


def _link_to_nothing(folder: Path) -> str:
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").symlink_to("gone.txt")
    return str(folder / "in")


def _pipe(folder: Path) -> str:
    (folder / "in").mkdir()
    os.mkfifo(folder / "in" / "a.txt")
    return str(folder / "in")


def _mixed_folder(folder: Path) -> str:
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(_ALL)
    (folder / "in" / "b.xlsx").write_bytes(b"PK\3\4")
    (folder / "in" / "c.docx").write_bytes(b"PK\3\4")
    return str(folder / "in")


_PART = '{"text": "this line was cut'
_TOKENIZER = '{"version": "1.0", "model": {"type": "BPE", "vocab": {'


def _tokenizer(content: str) -> Make:
    def make(folder: Path) -> str:
        (folder / "tok").mkdir()
        (folder / "tok" / "tokenizer.json").write_text(content)
        _file("a.jsonl", _ALL)(folder)
        return str(folder / "a.jsonl")

    return make


WRONG = [
    Wrong("a line cut off", _lines("a.jsonl", _PART), r"a\.jsonl:101: not JSON"),
    Wrong("the last line cut off", _file("a.jsonl", _ALL[:-30]), r"a\.jsonl:200: not JSON"),
    Wrong("a list on a line", _lines("a.jsonl", '["a", "b"]'), r"a\.jsonl:101: a JSON list, not"),
    Wrong("a bare number", _lines("a.jsonl", "17"), r"a\.jsonl:101: 17, not an object"),
    Wrong("another key", _lines("a.jsonl", '{"txt": "a"}'), r"a\.jsonl:101: no key 'text'.*txt"),
    Wrong("a number for text", _lines("a.jsonl", '{"text": 5}'), r"a\.jsonl:101: 'text' holds 5"),
    Wrong("null for text", _lines("a.jsonl", '{"text": null}'), r"a\.jsonl:101: 'text' holds null"),
    Wrong("a list for text", _lines("a.jsonl", '{"text": ["a"]}'), r"a\.jsonl:101: .*JSON list"),
    Wrong(
        "Latin-1",
        _lines("a.jsonl", '{"text": "é"}'.encode("latin-1")),
        r"a\.jsonl:101: byte \d+ of the file is not UTF-8",
    ),
    Wrong(
        "UTF-16", _file("a.jsonl", '{"text": "words"}\n'.encode("utf-16")), r"a\.jsonl:1: .*UTF-8"
    ),
    Wrong("NUL", _lines("a.jsonl", b'{"text": "a\0b"}'), r"a\.jsonl:101: .*NUL"),
    Wrong(
        "a raw control character", _lines("a.jsonl", b'{"text": "a\1b"}'), r"a\.jsonl:101: not JSON"
    ),
    Wrong(
        "half a surrogate pair",
        _lines("a.jsonl", r'{"text": "a\ud83d"}'),
        r"a\.jsonl:101: .*half of a surrogate pair",
    ),
    Wrong("deep nesting", _lines("a.jsonl", "[" * 100_000), r"a\.jsonl:101: not JSON .*deeper"),
    Wrong("single quotes", _lines("a.jsonl", "{'text': 'a'}"), r"a\.jsonl:101: not JSON"),
    Wrong(
        "two objects on a line",
        _lines("a.jsonl", '{"text": "a"} {"text": "b"}'),
        r"a\.jsonl:101: not JSON .Extra data",
    ),
    Wrong("a merge conflict", _lines("a.jsonl", "<<<<<<< HEAD"), r"a\.jsonl:101: not JSON"),
    Wrong(
        "a web page by that name",
        _file("a.jsonl", "<!DOCTYPE html>\n<p>404"),
        r"a\.jsonl is a web page \(HTML\), not the file itself",
    ),
    Wrong(
        "an object over several lines", _file("a.jsonl", '{\n "text": "a"\n}\n'), r"a\.jsonl:1: not"
    ),
    Wrong("nothing in the file", _file("a.jsonl", ""), r"a\.jsonl.* is an empty corpus"),
    Wrong("blank lines alone", _file("a.jsonl", "\n \n\n"), r"a\.jsonl.* is an empty corpus"),
    Wrong("a list cut off", _file("a.json", "[" + ",\n".join(GOOD)), r"a\.json:200: not JSON"),
    Wrong("a comma missing", _file("a.json", f"[{GOOD[0]}\n{GOOD[1]}]"), r"a\.json:2: not JSON"),
    Wrong(
        "a list of texts",
        _file("a.json", '["a",\n"b"]'),
        r"a\.json:1: a JSON string, not an object",
    ),
    Wrong(
        "gzip cut off",
        _file("a.jsonl.gz", gzip.compress(_ALL)[:-60]),
        r"a\.jsonl\.gz cannot be unpacked",
    ),
    Wrong("gzip damaged", _file("a.jsonl.gz", _flipped(gzip.compress(_ALL), 0.5)), r"a\.jsonl\.gz"),
    Wrong(
        "gzip with another checksum",
        _file("a.jsonl.gz", gzip.compress(_ALL)[:-8] + b"\1" * 8),
        r"a\.jsonl\.gz cannot be unpacked: CRC",
    ),
    Wrong(
        "no gzip by that name",
        _file("a.jsonl.gz", _ALL),
        r"a\.jsonl\.gz cannot be unpacked: Not a gzip",
    ),
    Wrong(
        "a wrong line in gzip",
        _file("a.jsonl.gz", gzip.compress(_ALL + _PART.encode())),
        r"a\.jsonl\.gz:201: not JSON",
    ),
    Wrong("zstd cut off", _zstd(lambda packed: packed[:-60]), r"a\.jsonl\.zst cannot be unpacked"),
    Wrong("zstd damaged", _zstd(lambda packed: _flipped(packed, 0.01)), r"a\.jsonl\.zst"),
    Wrong(
        "bzip2 cut off",
        _file("a.jsonl.bz2", bz2.compress(_ALL)[:-60]),
        r"a\.jsonl\.bz2 cannot be unpacked",
    ),
    Wrong(
        "bzip2 damaged", _file("a.jsonl.bz2", _flipped(bz2.compress(_ALL), 0.5)), r"a\.jsonl\.bz2"
    ),
    Wrong(
        "Parquet cut off",
        _parquet(_TEXTS, lambda content: content[:-100]),
        r"a\.parquet cannot be read as Parquet",
    ),
    Wrong(
        "Parquet without its beginning",
        _parquet(_TEXTS, lambda content: content[2000:]),
        r"a\.parquet",
    ),
    Wrong(
        "no Parquet by that name", _file("a.parquet", _ALL), r"a\.parquet cannot be read as Parquet"
    ),
    Wrong(
        "pages overwritten",
        _parquet(_TEXTS, lambda content: _flipped(content, 0.002)),
        r"a\.parquet",
    ),
    Wrong("another column", _parquet({"body": ["a"]}), r"a\.parquet: no column 'text'.*body"),
    Wrong(
        "a column of numbers", _parquet({"text": [1, 2]}), r"a\.parquet: column 'text' holds int64"
    ),
    Wrong(
        "a null row",
        _parquet({"text": [*_TEXTS["text"], None]}),
        r"a\.parquet, row 201: 'text' holds null",
    ),
    Wrong("text that is not UTF-8", _invalid_utf8, r"a\.parquet: .*not UTF-8 in rows 1 to 2"),
    Wrong(
        "Latin-1 text",
        _file("a.txt", b"words\n" * 99 + b"\xe9\n"),
        r"a\.txt:100: byte 594 .*not UTF-8",
    ),
    Wrong("a program by the name of a text", _file("a.txt", b"\x7fELF\0\0\0"), r"a\.txt:1: .*NUL"),
    Wrong("kinds that are not read", _mixed_folder, r"2 of its 3 files .*b\.xlsx, c\.docx"),
    Wrong("a link to nothing", _link_to_nothing, r"a\.txt is a broken symbolic link to gone\.txt"),
    Wrong("a pipe", _pipe, r"a\.txt is a pipe"),
    Wrong("a path that is not there", lambda folder: str(folder / "gone"), r"gone' does not exist"),
    Wrong(
        "a tokenizer cut off",
        _tokenizer(_TOKENIZER),
        r"tok: tokenizer\.json is not a tokenizer",
        (("tokenizer", "tok"),),
    ),
]
"""Every kind."""

ENDLESS = [
    Wrong(
        f"an endless line in {suffix}",
        make,
        rf"a\.jsonl\.{suffix}:2: a line of more than 268,435,456 bytes.*Cut the document",
    )
    for suffix, make in {
        "gz": _endless("a.jsonl.gz", gzip.compress),
        "bz2": _endless("a.jsonl.bz2", bz2.compress),
        "zst": _endless_zstd,
    }.items()
]
"""What takes a second to unpack."""

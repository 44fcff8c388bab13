"""Packed files and Parquet: the same documents as plain JSON lines, and how a wrong one is told."""

import bz2
import csv
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.formats import SECTION_BYTES
from shardyard.data.prepare import prepare
from shardyard.data.readers import json as json_lines
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.errors import RequestError, SourceError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.ipc")
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    zstd = pytest.importorskip("backports.zstd", reason="backports.zstd is an extra")

TEXTS = ["one é\u2028", "two\nlines", "", "three", *(f"text {number} " * 9 for number in range(99))]
ROWS = "".join(json.dumps({"n": number, "text": text}) + "\n" for number, text in enumerate(TEXTS))


def table_of(texts: list[Any], **more: Any) -> Any:
    return pyarrow.table({"n": list(range(len(texts))), "text": texts, **more})


def write_parquet(path: Path, texts: list[Any] = TEXTS) -> None:
    parquet.write_table(table_of(texts), path, row_group_size=10)


def write_csv(path: Path, separator: str) -> None:
    """As pandas' ``to_csv(index=False)`` and spreadsheets write it."""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file, delimiter=separator)
        rows.writerows([("n", "text"), *enumerate(TEXTS)])


def write_arrow(path: Path, writer: Any) -> None:
    table = table_of(TEXTS)
    with pyarrow.OSFile(str(path), "wb") as file, writer(file, table.schema) as batches:
        batches.write_table(table, max_chunksize=40)


WRITE: dict[str, Callable[[Path], object]] = {
    "x.jsonl": lambda path: path.write_text(ROWS),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(ROWS.encode())),
    "x.ndjson.GZ": lambda path: path.write_bytes(
        gzip.compress(ROWS[:1000].encode()) + gzip.compress(ROWS[1000:].encode())
    ),
    "x.jsonl.zst": lambda path: path.write_bytes(zstd.compress(ROWS.encode())),
    "x.NDJSON.zst": lambda path: path.write_bytes(
        zstd.compress(ROWS[:1000].encode()) + zstd.compress(ROWS[1000:].encode())
    ),
    "x.jsonl.bz2": lambda path: path.write_bytes(
        bz2.compress(ROWS[:1000].encode()) + bz2.compress(ROWS[1000:].encode())
    ),
    "x.jsonl.xz": lambda path: path.write_bytes(
        lzma.compress(ROWS[:1000].encode()) + lzma.compress(ROWS[1000:].encode())
    ),
    "x.csv": lambda path: write_csv(path, ","),
    "x.TSV": lambda path: write_csv(path, "\t"),
    "x.arrow": lambda path: write_arrow(path, pyarrow.ipc.new_stream),
    "x.feather": lambda path: write_arrow(path, pyarrow.ipc.new_file),
    "x.parquet": write_parquet,
}
"""Name -> writes the same documents under it."""


def texts_of(path: Path, text_key: str = "text", piece_bytes: int = SECTION_BYTES) -> list[str]:
    pieces = split_into_pieces(list_files(str(path)), piece_bytes)
    return [section.text for piece in pieces for section in read_sections(piece, TextOf(text_key))]


@pytest.mark.parametrize("name", WRITE)
def test_each_form_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITE[name](tmp_path / name)
    assert texts_of(tmp_path / name) == [text for text in TEXTS if text]


def test_each_form_is_prepared_into_the_same_bytes(tmp_path: Path) -> None:
    found = {}
    for name, write in WRITE.items():
        write(tmp_path / name)
        data = {"source": str(tmp_path / name), "dir": str(tmp_path / "out"), "vocab_size": 300}
        recipe = Recipe.model_validate({"data": {**data, "workers": 1}})
        found[name] = prepare(recipe, model_dir=None, progress=lambda *_: None)
    assert len({facts.dir for facts in found.values()}) == len(WRITE)
    assert len({facts.fingerprint for facts in found.values()}) == 1


def test_groups_of_rows_are_read_once_wherever_the_file_is_cut(tmp_path: Path) -> None:
    texts = [f"{number} " + "word " * (number * 37 % 3000) for number in range(200)]
    table = table_of(texts)
    path = tmp_path / "x.parquet"
    parquet.write_table(table, path, row_group_size=7, compression="none", use_dictionary=False)
    (file,) = list_files(str(path))
    pieces = split_into_pieces([file], SECTION_BYTES)
    per_piece = [[section.text for section in read_sections(p, TextOf())] for p in pieces]
    assert [text for part in per_piece for text in part] == texts
    assert sum(bool(part) for part in per_piece) > 10  # several processes have something to do


@pytest.mark.parametrize(
    "kind", [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary("int32", "string")]
)
def test_every_kind_of_text_that_arrow_knows_is_read(tmp_path: Path, kind: Any) -> None:
    write_parquet(tmp_path / "x.parquet", pyarrow.array(["a", "b", "a"]).cast(kind))
    assert texts_of(tmp_path / "x.parquet") == ["a", "b", "a"]


def test_a_column_that_is_not_there_or_holds_no_text_is_told_with_those_that_are(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path)
    with pytest.raises(SourceError, match=r"x\.parquet: no column 'body' \(its columns: n, text\)"):
        texts_of(path, "body")
    with pytest.raises(SourceError, match=r"column 'n' holds int64, not text.*data\.text_key"):
        texts_of(path, "n")
    twice = pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(twice, path)
    with pytest.raises(SourceError, match=r"2 columns 'text'"):
        texts_of(path)


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, ["a"] * 13 + [None, "b"])
    with pytest.raises(SourceError, match=r"x\.parquet, row 14: 'text' holds null, not a string"):
        texts_of(path)
    broken = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    write_parquet(path, broken)
    with pytest.raises(SourceError, match=r"'text' holds bytes that are not UTF-8 in rows 1 to 2"):
        texts_of(path)


@pytest.mark.parametrize("cut", [0, 4, -1, -9, 200])
def test_a_file_that_is_no_parquet_or_cut_off_is_told(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(b"PAR2" * 9 if cut == 0 else whole[:cut])
    with pytest.raises(SourceError, match=r"x\.parquet cannot be read as Parquet: .*again") as told:
        texts_of(path)
    assert str(told.value).isprintable()


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.jsonl.xz"])
def test_a_packed_file_that_is_cut_off_or_something_else_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITE[name](path)
    whole = path.read_bytes()
    for content in (whole[:-5], whole[:20], b"something else", whole[:30] + b"\0" * len(whole)):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=rf"{name} cannot be unpacked: .*(gzip|zstd|xz) -t"):
            texts_of(path)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_a_wrong_row_of_a_packed_file_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    pack = gzip.compress if name.endswith("gz") else zstd.compress
    path = tmp_path / name
    path.write_bytes(pack(b'{"text": "a"}\n\n{"body": "b"}\n'))
    with pytest.raises(SourceError, match=rf"{name}:3: no key 'text' \(its keys: body\)"):
        texts_of(path)
    path.write_bytes(pack(b'{"text": "a"}\n"\xff"'))
    with pytest.raises(SourceError, match=rf"{name}:2: byte 15 of the file is not UTF-8"):
        texts_of(path)


def test_a_line_that_unpacks_to_more_than_memory_takes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1000)
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * 5000 + b'"}\n'))
    with pytest.raises(SourceError, match=r"gz:1: a line of more than 1,000 bytes.*Cut the doc"):
        texts_of(path)


@pytest.mark.parametrize(
    ("name", "modules", "extra"),
    [
        ("x.parquet", ["pyarrow", "pyarrow.parquet"], "parquet"),
        ("x.jsonl.zst", ["backports.zstd", "compression.zstd"], "zstd"),
    ],
)
def test_without_its_extra_a_format_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, modules: list[str], extra: str
) -> None:
    WRITE[name](tmp_path / name)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    hint = rf"{name} is read with .* not installed.*pip install 'shardyard\[{extra}\]'"
    with pytest.raises(RequestError, match=hint):
        texts_of(tmp_path / name)

"""CSV, TSV and Arrow files: fields of every form, and the place of what is wrong."""

import csv
import json
import random
from pathlib import Path

import pytest

from shardyard.config.schema.data import Data
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.data.splits import split_by_name
from shardyard.errors import RequestError, SourceError
from tests.data.test_packed import texts_of, write_arrow

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")


def test_fields_of_random_characters_are_read_as_the_writer_had_them(tmp_path: Path) -> None:
    draw = random.Random(0)
    letters = 'ab,"\t\n é\u2028\r;'
    texts = ["".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(500)]
    texts.append("long " * 60_000)
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"x.{suffix}"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator).writerows([["id", "text"], *enumerate(texts)])
        assert texts_of(path) == texts


def whole(row: dict[str, object], _place: object) -> str:
    return json.dumps(row)


def test_a_row_has_its_columns_and_the_line_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'ask,answer\r\n"1 +\r\n1",2\r\n\r\n"2 + 2",4\r\n')
    (piece,) = split_into_pieces(list_files(str(path)), 2**20)
    found = [
        (json.loads(each.text), str(each.location))
        for each in read_sections(piece, TextOf(whole_row=f"{__name__}:whole"))
    ]
    assert found == [
        ({"ask": "1 +\r\n1", "answer": "2"}, f"{path}:2"),
        ({"ask": "2 + 2", "answer": "4"}, f"{path}:5"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text,n\na,1\nb\n", r"x\.csv:3: the row has 1 fields, and the header 2 \(n, text\)"),
        (b'text,n\na,1\n"b,2\nc,3\n', r"x\.csv:3: the row that begins here .*unexpected end"),
        (b'text,n\na,1\n"b"c,2\n', r"x\.csv:3: the row that begins here cannot be read"),
        (b"text,text\na,b\n", r"x\.csv:1: several columns are called text"),
        (b"text\tn\na\t1\n", r"x\.csv:1: the header is one column, .*rename the file to \.tsv"),
        (b"body,n\nwords,1\n", r"x\.csv:2: no key 'text' .*Set data\.text_key=body"),
        (b"text,n\na,1\n\xff,2\n", r"x\.csv:3: byte 11 of the file is not UTF-8"),
        (b"question,answer\na,b\n", r"x\.csv:2: .*dialogue: set data\.format=chat"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=words) as caught:
        texts_of(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["x.arrow", "x.feather"])
def test_an_arrow_file_that_is_cut_off_or_without_the_column_is_named(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    new = pyarrow.ipc.new_stream if name == "x.arrow" else pyarrow.ipc.new_file
    write_arrow(path, new)
    with pytest.raises(SourceError, match=r"no column 'body' \(its columns: n, text\)"):
        texts_of(path, "body")
    for size in (100, 700):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(SourceError, match=rf"{name} cannot be read as Arrow: .*again"):
            texts_of(path)


def test_a_folder_of_save_to_disk_is_its_rows(tmp_path: Path) -> None:
    """The files that datasets 4.4 writes for a DatasetDict, and for one Dataset."""
    for split in ("train", "test", "validation"):
        folder = tmp_path / "both" / split
        folder.mkdir(parents=True)
        write_arrow(folder / "data-00000-of-00001.arrow", pyarrow.ipc.new_stream)
        (folder / "state.json").write_text('{"_data_files": []}')
        (folder / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    corpus = split_by_name(list_files(str(tmp_path / "both")), Data())
    assert [(file.split, file.name) for file in corpus.files] == [
        ("train", "train/data-00000-of-00001.arrow"),
        ("eval", "validation/data-00000-of-00001.arrow"),
    ]
    alone = split_by_name(list_files(str(tmp_path / "both" / "train")), Data())
    assert [file.name for file in alone.files] == ["data-00000-of-00001.arrow"]


def test_a_table_that_is_not_read_says_how_to_turn_it_into_one(tmp_path: Path) -> None:
    (tmp_path / "x.xlsx").write_bytes(b"PK")
    with pytest.raises(RequestError, match=r"turn it into CSV or JSON lines first"):
        list_files(str(tmp_path))

"""A data format that takes whole rows: from every kind of file that has rows, and from no other."""

import json
from pathlib import Path

import pytest

from shardyard.config.data_choices import DATA_FORMATS, PLAIN_TEXT, DataFormat
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.errors import RequestError, SourceError

ROWS = [{"ask": "1 + 1", "answer": ["2"]}, {"ask": "2 + 2", "answer": ["4"]}]


def whole(row: dict[str, object], _place: object) -> str:
    return json.dumps(row)


WHOLE = TextOf(whole_row=f"{__name__}:whole")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_whole_row_is_taken_with_its_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (piece,) = split_into_pieces(list_files(str(path)), 2**20)
    sections = read_sections(piece, WHOLE)
    assert json.loads(next(sections).text) == ROWS[0]
    last = next(sections)
    assert json.loads(last.text) == ROWS[1]
    assert str(last.location) == f"{path}{', row ' if suffix == 'parquet' else ':'}2"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["a"], ["b"]], names=["ask", "ask"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet")
    (piece,) = split_into_pieces(list_files(str(tmp_path / "x.parquet")), 2**20)
    with pytest.raises(SourceError, match=r"x\.parquet: several columns are called ask\. Write"):
        list(read_sections(piece, WHOLE))


def test_a_file_without_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DataFormat(encoder=PLAIN_TEXT, whole_row=WHOLE.whole_row)
    monkeypatch.setitem(DATA_FORMATS, "rows", row)
    (tmp_path / "x.md").write_text("hello")
    with pytest.raises(RequestError, match=r"x\.md\. What to do.*data\.format=rows takes rows"):
        list_files(str(tmp_path), "rows")

"""Bad tables are refused with what is wrong, all of it at once."""

from pathlib import Path

import pytest

from benchmarks.planner_table import REQUIRED, read_table
from shardyard.errors import RequestError


def written(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n" if lines else "", encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as refused:
        read_table(path)
    return str(refused.value)


def test_a_missing_file_says_which_table_to_name(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere.csv")
    assert "nowhere.csv cannot be read as text: No such file" in message
    assert "benchmarks/groundtruth/measured_runs.csv" in message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert "cannot be read as text" in refusal(path)


def test_an_empty_file_says_what_the_header_must_name(tmp_path: Path) -> None:
    message = refusal(written(tmp_path))
    assert "is empty" in message
    assert "family, quality, framework" in message


def test_missing_columns_are_named_all_at_once_with_the_nearest_header(tmp_path: Path) -> None:
    header = [name for name in REQUIRED if name not in ("seq_len", "tp", "num_gpus")]
    message = refusal(written(tmp_path, ",".join([*header, "num_gpu", "seqlen"])))
    assert "lacks 3 of" in message
    assert "num_gpus (is 'num_gpu' meant to be it?)" in message
    assert "seq_len (is 'seqlen' meant to be it?)" in message
    assert ", tp" in message
    assert "Rename or add them" in message


def test_words_among_numbers_name_row_column_and_value(tmp_path: Path) -> None:
    def line(**cells: str) -> str:
        return ",".join(cells.get(name, "") for name in REQUIRED)

    message = refusal(
        written(
            tmp_path, ",".join(REQUIRED), line(tp="8"), line(tp="eight"),
            line(layers="2.5", mem_gb="-3"),
        )
    )  # fmt: skip
    assert "row 3, tp='eight': no number" in message
    assert "row 4, layers='2.5': no whole number" in message
    assert "row 4, mem_gb='-3': no finite number of zero or more" in message
    assert "an empty cell" in message


def test_many_wrong_cells_are_counted_and_not_all_printed(tmp_path: Path) -> None:
    lines = [",".join("x" if name == "tp" else "" for name in REQUIRED)] * 13
    message = refusal(written(tmp_path, ",".join(REQUIRED), *lines))
    assert message.count("tp='x'") == 10
    assert "and 3 more" in message


def test_a_header_without_rows_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert "a header and no rows" in refusal(written(tmp_path, ",".join(REQUIRED)))


def test_cells_that_say_nothing_are_empty(tmp_path: Path) -> None:
    cells = {"tp": "n/a", "pp": "-", "dp": "8.0", "cp": "0", "tokens_per_s_per_gpu": "1,234.5"}
    header = [*REQUIRED, "cp"]
    path = written(tmp_path, ",".join(header), ",".join(
        f'"{cells.get(name, "")}"' for name in header
    ))  # fmt: skip
    row = read_table(path)[0]
    assert (row.count("tp"), row.count("pp"), row.count("cp")) == (None, None, None)
    assert row.count("dp") == 8
    assert row.quantity("tokens_per_s_per_gpu") == 1234.5

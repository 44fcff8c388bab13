"""The fit of the published all-reduce table: its bar, its file, its page."""

import json
from pathlib import Path

import pytest

from benchmarks.all_reduce_fit import main


@pytest.mark.heavy
def test_every_row_from_64_kib_on_is_within_the_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fit.json"
    assert main(["--out", str(out)]) == 0

    result = json.loads(out.read_text())
    assert len(result["rows"]) == 28
    large = [row for row in result["rows"] if row["size_bytes"] >= 65536]
    assert len(large) == 15
    assert max(abs(row["error"]) for row in large) == result["worst_error"] <= 0.15
    # the log of the table ends with 8.24 GB/s on average, 42.04 at best
    network = result["networks"][0]
    assert network["model_average_gbs"] == pytest.approx(8.24, rel=0.05)
    assert network["model_best_gbs"] == pytest.approx(42.04, rel=0.05)

    page = capsys.readouterr().out
    assert "1,073,741,824" in page
    assert all(name in page for name in ("4 EFA", "1 EFA", "sockets"))


@pytest.mark.heavy
def test_another_table_can_be_given_and_may_miss_the_bar(tmp_path: Path) -> None:
    rows = [f"{2**power},{100 * (power % 3 + 1) + 2**power / 1e4},16" for power in range(16, 31)]
    table = tmp_path / "noisy.csv"
    table.write_text("\n".join(["size_bytes,out_time_us,ranks", *rows]) + "\n")
    assert main(["--table", str(table), "--out", str(tmp_path / "fit.json")]) == 1

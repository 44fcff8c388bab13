"""The feeder beside others: how rounds are judged, and that the program runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.image_feeder import judge, table

ROOT = Path(__file__).parents[2]
ROUND = {
    "bare": 400.0,
    "decode": 360.0,
    "crop-flip": 330.0,
    "resized-crop": 200.0,
    "folder": 300.0,
    "cold-crop-flip": 300.0,
    "cold-folder": 250.0,
    "cold-shards-bytes": 5e8,
    "cold-files-bytes": 2e8,
}


def test_the_median_of_the_rounds_is_held_to_the_bars() -> None:
    result = judge([ROUND, ROUND, {**ROUND, "decode": 10.0}])
    assert result["ratios"]["decode_per_core_decode"] == pytest.approx(0.9)
    assert result["ratios"]["cold_bytes_per_small_files"] == pytest.approx(2.5)
    assert result["is_met"]
    assert result["not_measured"] == ["crop_flip_per_litdata", "crop_flip_per_streaming"]


def test_a_missed_bar_is_told() -> None:
    result = judge([{**ROUND, "crop-flip": 310.0, "folder": 320.0}])
    assert result["missed"] == ["crop_flip_per_bare_decode", "crop_flip_per_folder"]
    assert "missed: crop_flip_per_folder" in table(result) and not result["is_met"]


@pytest.mark.slow
def test_the_program_measures_each_way_that_can_be_had(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    program = [sys.executable, "-m", "benchmarks.image_feeder", "--pictures", "40", "--rounds", "1"]
    subprocess.run([*program, "--out", str(out)], cwd=ROOT, check=False, timeout=600)
    (rates,) = json.loads(out.read_text())["rounds"]
    assert ROUND.keys() <= rates.keys() and all(rate > 0 for rate in rates.values())

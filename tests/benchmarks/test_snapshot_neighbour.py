"""The benchmark of copied snapshots runs, and says what a copy costs and what auto chooses."""

import json
from pathlib import Path

import pytest

from benchmarks.snapshot_neighbour import main


@pytest.mark.system
def test_a_small_one_tells_the_cost_of_a_copy_and_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["--mib", "0.5", "--rounds", "3", "--step-ms", "1", "--gbit", "0", "--out", str(out)]
    assert main(words) == 0
    result = json.loads(out.read_text())
    (cost,) = result["costs"]
    assert result["gbit"] is None and cost["rounds"] == 3 and cost["window_steps"] > 1
    assert cost["counts_after_s"] > cost["blocked_s"] > 0
    assert f"auto chooses every {cost['every']} steps" in capsys.readouterr().out

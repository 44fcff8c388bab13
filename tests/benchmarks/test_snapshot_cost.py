"""The benchmark of snapshots runs, and says what a snapshot costs beside a copy."""

import json
from pathlib import Path

import pytest

from benchmarks.snapshot_cost import main


@pytest.mark.heavy
def test_a_small_one_tells_both_and_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for slot in range(3):  # removed again afterwards
        monkeypatch.setenv(f"SHARDYARD_MEMORY_SNAPSHOT_0_{slot}", "")
    out = tmp_path / "out.json"
    assert main(["--mib", "0.5", "--pairs", "3", "--step-ms", "1", "--out", str(out)]) == 0
    (cost,) = json.loads(out.read_text())["costs"]
    assert cost["pairs"] == 3 and cost["plain_s"] > 0 and cost["snapshot_s"] > 0
    assert f"elastic.snapshot_every={cost['least_every']} on" in capsys.readouterr().out

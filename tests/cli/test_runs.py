"""`shardyard runs`: one row a run, the most recently changed last."""

import json
import os
from pathlib import Path

import pytest

from shardyard.cli import main


def make_run(
    runs_dir: Path, name: str, *, changed_at: float, events: list[dict[str, object]]
) -> None:
    folder = runs_dir / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1200, "loss": 2.34567}) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for file in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / file, (changed_at, changed_at))


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    started: dict[str, object] = {"kind": "attempt_started"}
    make_run(tmp_path, "b-new", changed_at=2e9, events=[started])
    make_run(tmp_path, "c-old", changed_at=1e9, events=[started, {"kind": "run_finished"}])
    (tmp_path / "no-run").mkdir()
    return tmp_path


def test_runs_are_listed_with_state_step_and_loss(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "c-old", "b-new"]
    assert lines[1].split()[1:4] == ["finished", "1,200", "2.3457"]
    assert lines[2].split()[1] == "lost"


def test_json_holds_the_same(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["state"], row["step"]) for row in rows] == [
        ("c-old", "finished", 1200),
        ("b-new", "lost", 1200),
    ]


def test_no_runs_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs-dir", str(tmp_path / "none")]) == 0
    captured = capsys.readouterr()
    assert (captured.out, "no runs in" in captured.err) == ("", True)

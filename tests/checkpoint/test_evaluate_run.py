"""`shardyard evaluate` of a run scores the checkpoint that `export` writes."""

import json
from pathlib import Path

import pytest

from shardyard.checkpoint.export import export
from shardyard.evaluation.run import main
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.layout import RunDir
from tests.checkpoint.test_export import data_dir, run_dir

__all__ = ["data_dir", "run_dir"]

pytestmark = pytest.mark.heavy
Captured = pytest.CaptureFixture[str]


def test_a_run_scores_as_its_export(
    run_dir: RunDir,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    resolved = latest_resolved(run_dir).resolved
    assert resolved is not None
    folder = tmp_path / "exported"
    export(run_dir.checkpoint(run_dir.checkpoint_steps()[-1]), resolved, folder)
    (tmp_path / "text.txt").write_text("t1")
    answers = []
    for where in (["--run", str(run_dir.path)], ["--folder", str(folder)]):
        assert main([*where, "--text", str(tmp_path / "text.txt")]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    of_run, of_folder = answers
    assert of_run["results"] == of_folder["results"]
    assert (of_run["run"], of_run["step"]) == ("tiny-run", run_dir.checkpoint_steps()[-1])
    kept = json.loads(Path(of_run["file"]).read_text())
    assert (
        kept["results"] == of_run["results"] and Path(of_run["file"]).parent.name == "evaluations"
    )
    assert not list(run_dir.path.glob(".evaluate-*")), "the exported weights are removed"


@pytest.mark.parametrize("shape", [{"model_type": "bert"}, {"label_head": "samples"}])
def test_a_run_of_another_task_is_rejected(
    shape: dict[str, str], run_dir: RunDir, capsys: Captured
) -> None:
    file = run_dir.resolved(1)
    content = json.loads(file.read_text())
    content["shape"] |= shape
    file.write_text(json.dumps(content))
    code = main(["--run", str(run_dir.path)])
    answer = json.loads(capsys.readouterr().out)
    assert code == 2 == answer["exit_code"], answer
    assert "which is no causal language model" in answer["error"]

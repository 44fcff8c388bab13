"""`shardyard evaluate` and `chat` of a run take the checkpoint that `export` writes."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.checkpoint.export import export
from shardyard.control.evaluate import ModelPlace, model_place
from shardyard.errors import RequestError
from shardyard.evaluation import chat
from shardyard.evaluation.checkpoint_folder import exported_checkpoint
from shardyard.evaluation.run import main
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import ScriptRequest, write_script
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


def test_a_run_answers_as_its_export(run_dir: RunDir, tmp_path: Path) -> None:
    resolved = latest_resolved(run_dir).resolved
    assert resolved is not None
    step = run_dir.checkpoint_steps()[-1]
    export(run_dir.checkpoint(step), resolved, tmp_path / "exported")
    settings = {"system": None, "max_tokens": 9, "temperature": 0.0, "top_k": None, "seed": None}
    asked = [json.dumps(each).encode() for each in (settings, {"ask": "t1 t2"})]
    answers = []
    for where in (["--run", str(run_dir.path)], ["--folder", str(tmp_path / "exported")]):
        sent: list[dict[str, Any]] = []

        def send(content: dict[str, Any], sent: list[dict[str, Any]] = sent) -> None:
            sent.append(content)
            if "answer" in content:
                raise KeyboardInterrupt  # ends the program

        with pytest.raises(KeyboardInterrupt):
            chat.serve(chat._parse(where), _still_open(asked), send)
        answers.append(sent)
    of_run, of_folder = answers
    assert of_run[1:] == of_folder[1:] and of_run[-1]["answer"]["tokens"] == 9
    about = of_run[0]["ready"]
    assert (about["run"], about["step"], about["has_template"]) == ("tiny-run", step, False)
    assert not list(run_dir.path.glob(".chat-*")), "the exported weights are removed"


def test_a_run_is_named_with_its_step(run_dir: RunDir, tmp_path: Path) -> None:
    def place(name: str, step: str = "latest") -> ModelPlace:
        return model_place(name, step, runs_dir=run_dir.path.parent, launchers=None)

    assert place("tiny-run@best") == place("tiny-run", "best")
    assert place(f"{run_dir.path}@2", "2") == ModelPlace(folder=run_dir.path, step="2")
    assert place(str(tmp_path)).options == [f"--folder={tmp_path}"]


def _still_open(lines: list[bytes]) -> Iterator[bytes]:
    """Lines of a caller that waits for the answers."""
    yield from lines
    threading.Event().wait()


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
    with (
        pytest.raises(RequestError, match=r"no causal language model.*`shardyard report"),
        exported_checkpoint(run_dir, "latest", None, verb="chat"),
    ):
        pass


@pytest.mark.parametrize("verb", ["evaluate", "chat"])
def test_a_run_without_a_known_model_is_rejected(verb: str, run_dir: RunDir) -> None:
    def rejected(why: str) -> None:
        with (
            pytest.raises(RequestError, match=why),
            exported_checkpoint(run_dir, "latest", None, verb=verb),
        ):
            pass

    content = json.loads(run_dir.resolved(1).read_text())
    content["settings"]["model.module"] = {"value": "mine:model", "reason": "given"}
    run_dir.resolved(1).write_text(json.dumps(content))
    rejected(f"model.module=mine:model, code of your own that `{verb}` does not run. If it is")
    run_dir.resolved(1).unlink()
    rejected(f"has no attempt whose resolved.json.*then use `shardyard {verb} FOLDER`")
    script = ScriptRequest(name="mine", config={}, tags={}, observe={})
    write_script(run_dir, 1, script)
    rejected(f"and `{verb}` needs a recipe. .* then use `shardyard {verb} FOLDER`")

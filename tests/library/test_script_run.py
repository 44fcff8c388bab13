"""A script's own loop as a run: the plain loop's numbers, read by the verbs."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardyard
from shardyard.checkpoint import export
from shardyard.cli import main
from shardyard.control.continue_from import start_overrides
from shardyard.control.job import launched_of
from shardyard.control.profile import ProfileOptions, check_profilable
from shardyard.control.resend import send_run
from shardyard.control.resume import check_has_training
from shardyard.control.run_location import locate_run
from shardyard.control.runs import list_runs
from shardyard.errors import RecipeError, RequestError
from shardyard.io.files import write_json
from shardyard.library.run_recorder import active_recorder
from shardyard.report.compare.differences import settings_that_differ
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.report.serve.details import SettingsCache
from shardyard.report.summary import summarize
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.rundir.state import read_state

pytestmark = pytest.mark.heavy
"""A manifest names the commit, which git tells."""


def train(steps: int, each: Callable[[int, torch.Tensor], None]) -> list[float]:
    """A plain loop of torch; ``each`` sees every step and its loss."""
    torch.manual_seed(0)
    model, found = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        loss = (model(torch.ones(2, 4)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        each(step, loss)
    return found


def ends(path: Path) -> list[tuple[str, str, int]]:
    """Outcome, reason and exit code of each attempt that ended with an event."""
    events = read_lines(RunDir(path).events)
    return [
        (e["outcome"], e["reason"], e["exit_code"]) for e in events if e["kind"] == "attempt_ended"
    ]


def test_a_loop_logs_what_it_computes_and_the_verbs_read_it(tmp_path: Path) -> None:
    plain = train(3, lambda *_: None)
    with shardyard.run("mine", {"lr": 0.1}, dir=tmp_path, tags={"team": "nlp"}) as run:
        assert is_locked(RunDir(run.path).lease)
        assert [each.state.state for each in list_runs(tmp_path)] == ["running"]

        def log(step: int, loss: torch.Tensor) -> None:
            extra = {"accuracy": torch.tensor(0.5), "tokens": np.int64(step * 8)}
            run.log(step=step, loss=loss, lr=0.1, **extra)  # type: ignore[arg-type]

        assert train(3, log) == plain
        run.log_evaluation(step=3, loss=0.5, accuracy=0.25)
    run_dir = RunDir(run.path)
    lines = read_steps(run_dir.metrics)
    assert [line["loss"] for line in lines] == plain
    assert lines[-1]["accuracy"] == 0.5 and lines[-1]["tokens_per_s"] > 0
    (listed,) = list_runs(tmp_path)
    assert (listed.state.state, listed.state.step, listed.state.loss) == ("finished", 3, plain[-1])
    account = listed.account()
    assert account is not None and account.tags == {"team": "nlp"}
    summary = summarize(read_run(run_dir))
    assert (summary.state, summary.steps_done, summary.tokens) == ("finished", 3, 24)
    assert summary.eval_loss == 0.5 and summary.scores == {"accuracy": 0.25}
    assert summary.tags == {"team": "nlp"} and summary.skipped_steps == 0
    assert not any(each.command.startswith("shardyard resume") for each in summary.commands)
    write_report(run_dir)
    assert "It gave this config" in run_dir.report_html.read_text()
    assert not is_locked(run_dir.lease)


def test_a_script_that_failed_continues_its_run_when_it_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="boom"), shardyard.run("a", {"lr": 1}, dir=tmp_path) as a:
        a.log(step=1, loss=3.0)
        a.log(step=2, loss=2.0)
        raise ValueError("boom")
    state = read_state(RunDir(a.path))
    assert state.state == "failed" and state.end_reason is not None
    assert state.end_reason.startswith("ValueError: boom (test_script_run.py, line ")
    assert main(["status", a.id, "--runs-dir", str(tmp_path)]) == 0
    assert "failed: ValueError: boom (test_script_run.py" in capsys.readouterr().out
    with shardyard.run("a", {"lr": 2}, dir=tmp_path) as other:
        pass
    assert other.id != a.id and not caplog.messages
    with shardyard.run("a", {"lr": 1}, dir=tmp_path) as again:
        again.log(step=2, loss=1.5, tokens=100)
    assert again.id == a.id
    (said,) = caplog.messages
    assert said.startswith(f"run {a.id} continues with attempt 1: it has this config")
    lines = read_steps(RunDir(a.path).metrics)
    assert [(line["step"], line["loss"], line["attempt"]) for line in lines] == [
        (1, 3.0, 0),
        (2, 1.5, 1),
    ]
    assert lines[-1]["tokens_per_s"] is None, "what was counted before the restart is not known"
    assert [(each[0], each[2]) for each in ends(a.path)] == [("failed", 1), ("finished", 0)]
    with shardyard.run("a", {"lr": 1}, dir=tmp_path) as new:
        pass
    assert new.id != a.id, "the run that finished is over"
    with shardyard.run("a", {"lr": 1}, id=a.id, dir=tmp_path) as asked:
        pass
    assert asked.id == a.id


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path: Path) -> None:
    with shardyard.run("a", dir=tmp_path) as first:
        parent = os.getpid()
        child = os.fork()
        if child == 0:  # as a second start of the same script
            code = 1
            try:
                from shardyard.library import run_recorder

                run_recorder.activate(None)
                with shardyard.run("a", dir=tmp_path) as second:
                    code = 0 if second.id != first.id else 2
            finally:
                os._exit(code)
        assert os.getpid() == parent
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert read_state(RunDir(first.path)).state == "running"


def test_a_signal_ends_the_run_by_name(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with shardyard.run("a", id="a", dir=tmp_path) as run:
                run.log(step=1, loss=3.0)
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    said = "SIGTERM after step 1; no checkpoint is kept"
    assert ends(tmp_path / "a") == [("failed", said, 143)]
    with pytest.raises(KeyboardInterrupt), shardyard.run("b", id="b", dir=tmp_path) as run:
        recorder = active_recorder()
        assert recorder is not None
        run.log(step=1, loss=3.0)
        recorder.save_ended(1, seconds=0.0, bytes=1)
        raise KeyboardInterrupt
    said = "Ctrl-C after step 1; the newest checkpoint is of step 1"
    assert ends(tmp_path / "b") == [("drained", said, 130)]
    assert read_state(RunDir(tmp_path / "b")).state == "drained"


def test_a_loop_that_is_left_early_is_to_be_continued(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    with shardyard.run("a", config, dir=tmp_path) as left:
        recorder = active_recorder()
        assert recorder is not None
        recorder.ready(last_step=10, parameters=5)
        left.log(step=4, loss=1.0)
        recorder.remaining_steps = 6
        recorder.save_ended(4, seconds=0.0, bytes=1)
    said = "the loop was left early, after step 4; the newest checkpoint is of step 4"
    assert ends(left.path) == [("drained", said, 143)]
    with shardyard.run("a", config, dir=tmp_path) as again:
        again.finish("the loss improves no more")
    assert again.id == left.id
    assert ends(left.path)[1] == ("finished", "the loss improves no more", 0)
    with shardyard.run("a", config, dir=tmp_path) as new:
        pass
    assert new.id != left.id


def test_exit_within_the_block_counts_by_its_code(tmp_path: Path) -> None:
    for code, state in ((0, "finished"), (3, "failed")):
        with pytest.raises(SystemExit), shardyard.run("a", id=f"a{code}", dir=tmp_path):
            raise SystemExit(code)
        assert read_state(RunDir(tmp_path / f"a{code}")).state == state
        assert ends(tmp_path / f"a{code}")[0][2] == code


def test_time_between_lines_is_that_of_all_their_steps(tmp_path: Path) -> None:
    with shardyard.run("a", dir=tmp_path) as run:
        for step in (5, 10, 15):
            run.log(step=step, loss=1.0, tokens=step * 10)
    lines = read_steps(RunDir(run.path).metrics)
    first = next(e for e in read_lines(RunDir(run.path).events) if e["kind"] == "first_step")
    assert lines[0]["step_time_s"] == pytest.approx(first["seconds"] / 5)
    for line in lines[1:]:
        assert line["tokens_per_s"] == pytest.approx(10 / line["step_time_s"])
    (time,) = summarize(read_run(RunDir(run.path))).attempts
    trained_s = sum(5 * line["step_time_s"] for line in lines)
    assert time.phases["productive"] == pytest.approx(trained_s)


def test_settings_of_scripts_are_compared_by_their_config(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        with shardyard.run(name, {"lr": lr, "opt": {"kind": "adam"}}, id=name, dir=tmp_path):
            pass
    dirs = [RunDir(tmp_path / name) for name in "ab"]
    (found,) = settings_that_differ([read_run(each) for each in dirs])
    assert (found.name, found.values) == ("lr", ("0.1", "0.2"))
    assert SettingsCache().differing(dirs) == {
        "names": ["lr"],
        "runs": {"a": [0.1], "b": [0.2]},
    }


def test_what_cannot_be_a_run_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(*words: Any, **named: Any) -> str:
        with pytest.raises(RequestError) as caught, shardyard.run(*words, dir=tmp_path, **named):
            pass
        return str(caught.value)

    assert "Did you mean my-run?" in rejected("My run")
    assert "at most 63 characters" in rejected("a", id="../b")
    assert "Did you mean team?" in rejected("a", tags={"Team": "nlp"})
    assert "vars(args)" in rejected("a", {"model": object()})
    assert "Did you mean observe.wandb.project?" in rejected("a", observe={"wandb": {"projct": 1}})
    assert "takes wandb and mlflow, not alerts" in rejected("a", observe={"alerts": []})
    recipes = RunDir(tmp_path / "by-recipe")
    recipes.resolved(0).parent.mkdir(parents=True)
    recipes.resolved(0).write_text("{}")
    assert "a recipe made that run" in rejected("a", id="by-recipe")
    with shardyard.run("a", id="a", dir=tmp_path) as run:
        assert "Leave that block first" in rejected("b")
        for numbers, said in (
            ({"step": 1, "loss": "low"}, "loss='low'): give a number"),
            ({"step": 1, "loss": None}, "loss=None"),
            ({"step": 1, "loss": torch.ones(2)}, "give a number"),
            ({"step": 0, "loss": 1.0}, "run.log(step=step + 1, ...)"),
            ({"step": 1.5, "loss": 1.0}, "give a whole number"),
            ({"step": 1, "loss": 1.0, "tokens": 1.5}, "give a whole number"),
            ({"step": 1, "loss": 1.0, "world_size": 2}, "my_world_size="),
            ({"step": 1, "loss": 1.0, "eval": 2}, "my_eval="),
        ):
            with pytest.raises(RequestError) as caught:
                run.log(**numbers)
            assert said in str(caught.value)
    assert not list(read_lines(RunDir(run.path).metrics))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "before there is a process group" in rejected("a")


def test_all_wrong_arguments_are_named_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(RecipeError) as caught,
        shardyard.run("A", tags={}, observe={"mlflow": {"url": "x"}}, dir=tmp_path),
    ):
        pass
    assert {each.path for each in caught.value.problems} == {"run.name", "observe.mlflow.url"}


def test_a_credential_in_the_config_is_not_kept(tmp_path: Path) -> None:
    token, key = "hf_" + "a" * 34, "0123456789abcdef" * 2 + "01234567"
    config = {"token": token, "wandb": {"api_key": key}, "lr": 1}
    with shardyard.run("a", config, dir=tmp_path) as run:
        pass
    content = (run.path / "attempts" / "0" / "script.json").read_text()
    assert token not in content and key not in content and json.loads(content)["config"]["lr"] == 1


def test_verbs_that_need_a_recipe_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shardyard.run("a", id="a", dir=tmp_path):
        pass
    found = RunDir(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-00000005").mkdir(parents=True)
    write_json(found.checkpoint(5) / "manifest.json", {"step": 5, "files": {}})
    with pytest.raises(RequestError, match="the script of a named no tracker"):
        send_run(found)
    with pytest.raises(RequestError, match="it continues this run from step 5"):
        check_has_training(found)
    with pytest.raises(RequestError, match=r"Use torch\.profiler"):
        check_profilable(locate_run(found, None), ProfileOptions(steps=1, ranks="all"))
    with pytest.raises(RequestError, match=r"Call shardyard\.export\(model, FOLDER\)"):
        start_overrides([], [f"run.from={found.path}"])
    assert export.main([str(found.path), "--to", str(tmp_path / "out")]) == 2
    assert "Call shardyard.export(model, FOLDER) in the script" in capsys.readouterr().err
    with pytest.raises(RequestError, match="was started by a script of your own"):
        launched_of(found)

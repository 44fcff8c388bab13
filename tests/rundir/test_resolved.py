"""A torn resolved.json costs an attempt, never a run."""

import json
from pathlib import Path

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.resume import latest_attempt
from shardyard.errors import RecipeError, RequestError
from shardyard.io.files import write_json
from shardyard.rundir.attempt_files import latest_resolved, read_resolved, write_resolved
from shardyard.rundir.layout import RunDir
from tests.config.test_fingerprint import resolved


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts, of which the second is torn."""
    run = RunDir(tmp_path)
    run.recipe.write_text("model: {preset: llama-tiny}\n")
    for number, seed in ((0, 5), (1, 6)):
        write_resolved(run.resolved(number), resolved(run={"seed": seed}))
        run.attempt_recipe(number).write_text(f"run: {{seed: {seed}}}\n")
    run.resolved(1).write_text(run.resolved(1).read_text()[:200])
    run.attempt(2).mkdir()  # killed before it began
    return run


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"settings": []}', "[" * 100_000])
def test_whatever_a_torn_file_holds_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "resolved.json").write_text(text)
    with pytest.raises(RequestError, match=r"resolved\.json (cannot|is|holds) .*resume the run"):
        read_resolved(tmp_path / "resolved.json")


def test_the_attempt_before_a_torn_one_is_taken(run: RunDir) -> None:
    newest = latest_resolved(run)
    assert newest.resolved is not None and newest.resolved.recipe.run.seed == 5
    assert newest.torn == (f"{run.resolved(1)} is torn",)


def test_a_resume_goes_on_from_what_the_torn_attempt_was_asked(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shardyard")
    number, previous, asked = latest_attempt(run)
    assert (number, asked) == (3, run.attempt_recipe(1))
    assert previous is not None and previous.recipe.run.seed == 5
    torn = f"{run.resolved(1)} is torn"
    assert caplog.messages == [f"{torn}; what that attempt was asked is resolved again"]


def test_a_resume_goes_on_from_the_recipe_where_nothing_else_is_left(run: RunDir) -> None:
    run.resolved(0).write_text("")
    run.attempt_recipe(1).unlink()
    assert latest_attempt(run) == (3, None, run.recipe)


@pytest.mark.parametrize(("loss", "target"), [(2.5, {"loss": 2.5}), (None, None)])
def test_a_run_of_before_run_target_goes_on_with_the_loss_that_it_aimed_at(
    tmp_path: Path, loss: float | None, target: dict[str, float] | None
) -> None:
    content = resolved(run={"seed": 5}).to_json()
    del content["settings"]["run.target"]
    content["settings"]["run.target_loss"] = {"value": loss, "reason": "given"}
    write_json(tmp_path / "resolved.json", content)
    assert read_resolved(tmp_path / "resolved.json").recipe.run.target == target
    asked = tmp_path / "recipe.yaml"
    asked.write_text(f"run: {{target_loss: {json.dumps(loss)}}}\nmodel: {{preset: llama-tiny}}\n")
    recipe = load_checked_recipe([asked], ["run.steps=3"], of_run=True)
    assert (recipe.run.target, recipe.run.steps) == (target, 3)
    with pytest.raises(RecipeError, match=r"Write `run: \{target: \{loss: 2\.5\}\}`"):
        load_checked_recipe([asked])


@pytest.mark.parametrize(("asked", "rules"), [("leave_out", ("slow_rank",)), ("report", ())])
def test_a_run_of_before_leave_out_for_goes_on_as_it_was_asked_about_stragglers(
    tmp_path: Path, asked: str, rules: tuple[str, ...]
) -> None:
    content = resolved(run={"seed": 5}).to_json()
    del content["settings"]["elastic.leave_out_for"]
    content["settings"]["elastic.straggler"] = {"value": asked, "reason": "given"}
    write_json(tmp_path / "resolved.json", content)
    assert read_resolved(tmp_path / "resolved.json").recipe.elastic.leave_out_for == rules


def test_a_run_of_before_that_said_how_its_queue_was_made_is_read(tmp_path: Path) -> None:
    content = resolved(run={"seed": 5}).to_json()
    content["settings"]["launch.aws_batch.subnets"] = {"value": ["subnet-1"], "reason": "given"}
    content["settings"]["launch.aws_batch.ami"] = {"value": None, "reason": "default"}
    write_json(tmp_path / "resolved.json", content)
    assert read_resolved(tmp_path / "resolved.json").recipe.run.seed == 5

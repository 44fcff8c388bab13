"""Which variables a process can be given: one rule, whatever launches it."""

import json
import os
import string
from collections.abc import Callable

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check, load_checked_recipe
from shardyard.control.request import Request
from shardyard.errors import RecipeError
from shardyard.launchers.registry import LAUNCHERS

WRONG_NAMES = (
    "A=1; touch /tmp/x; B",
    "A=B",
    "",
    "1A",
    "A B",
    "A-B",
    "A.B",
    "A\n",
    "Ä",
    "-A",
    "A\0",
)
TAKEN = (
    "RANK",
    "SLURM_JOB_ID",
    "PET_NNODES",
    "SHARDYARD_SESSION",
    "AWS_BATCH_JOB_ID",
    "MASTER_PORT",
)


def _refusal(setting: str, names: dict[str, str]) -> str:
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], ["model.preset=llama-tiny", f"{setting}={json.dumps(names)}"]))
    return str(refused.value)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_name_that_is_no_variables_is_refused_by_the_setting(name: str) -> None:
    assert f"launch.env: {name!r} is not a valid name" in _refusal("launch.env", {name: "v"})
    assert f"secrets: {name!r} is not a valid name" in _refusal("secrets", {name: "env"})


@pytest.mark.parametrize("name", TAKEN)
def test_a_variable_of_the_schedulers_is_refused_for_all_of_them(name: str) -> None:
    assert f"launch.env.{name}: is set by the scheduler" in _refusal("launch.env", {name: "2"})
    assert f"secrets.{name}: is set by the scheduler" in _refusal("secrets", {name: "env"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("verb", ["config", "plan", "launch"])
def test_it_is_refused_before_anything_is_rendered_also_in_a_dry_run(
    verb: str, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--on", launcher, "--dry-run") if verb == "launch" else ()
    env = json.dumps({WRONG_NAMES[0]: "v"})
    assert main([verb, "model.preset=llama-tiny", f"launch.env={env}", *options]) == 2
    assert (
        f"launch.env: {WRONG_NAMES[0]!r} is not a valid name of an environ"
        in capsys.readouterr().err
    )


def test_names_of_letters_digits_and_underscores_pass() -> None:
    names = ["_", "A", "a9", "HF_HOME", "UID", string.ascii_letters, "RANKS", "SLURMX", "_RANK"]
    env = json.dumps(dict.fromkeys(names, '$(x) `y` "z" \r\n\x1b'))
    check(load_recipe([], ["model.preset=llama-tiny", f"launch.env={env}"]))


def test_a_value_that_no_process_can_start_with_is_refused() -> None:
    assert "launch.env.A: has 131,073 bytes" in _refusal("launch.env", {"A": "x" * 131_071})
    check(load_recipe([], ["model.preset=llama-tiny", f"launch.env={{A: {'x' * 131_069}}}"]))
    assert "holds the character NUL" in _refusal("launch.env", {"A": "a\0b"})


def test_many_wrong_names_are_told_at_once() -> None:
    text = _refusal("launch.env", dict.fromkeys((*WRONG_NAMES, *TAKEN), "v"))
    tellers: list[Callable[[str], str]] = [repr, str]
    for told, names in zip(tellers, (WRONG_NAMES, TAKEN), strict=True):
        assert all(told(name) in text for name in names)


@pytest.mark.parametrize(
    ("written", "text"), [("1", "1"), ("0.5", "0.5"), ("true", "true"), ("offline", "offline")]
)
def test_a_number_or_a_yes_is_the_text_of_a_variable(written: str, text: str) -> None:
    recipe = load_checked_recipe((), ["model.preset=llama-tiny", f"launch.env.X={written}"])
    assert recipe.launch.env == {"X": text}


def test_train_gives_its_processes_the_environment_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    words = ["model.preset=llama-tiny", "launch.env.WANDB_MODE=offline"]
    Request.read(words)
    assert os.environ["WANDB_MODE"] == "online", "a look at a recipe changes nothing"
    Request.read(words, runs_here=True)
    assert os.environ["WANDB_MODE"] == "offline"

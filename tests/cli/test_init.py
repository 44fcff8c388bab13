"""`shardyard init`: by options, by nobody, and in a terminal."""

import json
import sys
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.rules.check import load_checked_recipe
from tests.terminal import terminal

ANSWERS = (
    "--model", "llama2-7b", "--data", "./my-text", "--where", "slurm p5.48xlarge",
    "--how-long", "500 steps",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_answer_all_that_would_be_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "mine.yaml", *ANSWERS]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("recipe: mine.yaml\n  shardyard plan mine.yaml --details\n")
    assert "plan: llama2-7b 6.74 B parameters" in captured.err
    recipe = load_checked_recipe([folder / "mine.yaml"])
    assert (recipe.model.preset, recipe.cluster.nodes, recipe.run.steps) == ("llama2-7b", 1, 500)


def test_a_dry_run_prints_the_recipe_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *ANSWERS, "--dry-run"]) == 0
    assert "model:\n  preset: llama2-7b\n" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


def test_the_answer_is_json_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *ANSWERS, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_written"] and answer["file"] == "recipe.yaml"
    assert answer["recipe"]["cluster"] == {"nodes": 1, "instance": "p5.48xlarge"}
    assert answer["plan"]["steps"] == 500 and len(answer["layouts"]) == 4
    assert answer["look_at"][0].startswith("data.source=./my-text does not exist")
    assert answer["commands"][-1] == "shardyard launch recipe.yaml --on slurm"


def test_a_file_that_is_there_is_refused_before_anything_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "recipe.yaml exists already. Name another one" in capsys.readouterr().err
    assert main(["init", *ANSWERS, "--force"]) == 0
    assert "llama2-7b" in (folder / "recipe.yaml").read_text()


def test_where_nobody_can_be_asked_the_usual_answer_is_taken_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", "llama-1b", "--where", "slurm p5.48xlarge", "--dry-run")
    assert main(["init", *words]) == 0
    told = capsys.readouterr().err
    assert "--data is missing, and no terminal is there to ask: python-stdlib" in told
    assert "--how-long is missing, and no terminal is there to ask: 300 steps" in told
    assert "--model is not given" not in told


def test_a_wrong_option_is_refused_in_the_words_of_a_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "--model", "lama-tiny"]) == 2
    assert "model.preset=lama-tiny is not a preset. Did you mean llama-tiny?" in (
        capsys.readouterr().err
    )


@pytest.mark.heavy
def test_enter_four_times_in_a_terminal_makes_a_recipe_for_this_machine(folder: Path) -> None:
    command = [sys.executable, "-m", "shardyard", "init"]
    with terminal(command, folder=folder, environ={"TERM": "dumb"}) as person:
        for name in ("model", "data", "where"):
            person.wait(rf"\n{name} \[[^]]+\]: ")
            person.type("\n")
        person.wait(r"How long\? 300 steps, 20B tokens.*\nhow-long \[300 steps\]: ")
        person.type("\n")
        person.wait(r"recipe: recipe\.yaml\n  shardyard plan recipe\.yaml\n")
        person.wait(r"shardyard train recipe\.yaml\n")
    assert load_checked_recipe([folder / "recipe.yaml"]).model.preset == "llama-tiny"


@pytest.mark.heavy
def test_a_wrong_answer_in_a_terminal_is_told_and_asked_again(folder: Path) -> None:
    command = [sys.executable, "-m", "shardyard", "init", "big.yaml", "--data", "python-stdlib"]
    with terminal(command, folder=folder, environ={"TERM": "dumb"}) as person:
        person.wait(r"model \[llama-tiny\]: ")
        person.type("lama3-70b\n")
        person.wait(
            r"error: recipe has 1 problem:\n  model\.preset=lama3-70b is not a preset\. Did"
        )
        person.wait(r"model \[llama-tiny\]: ")
        person.type("llama3.1-405b\n")
        person.wait(r"where \[here\]: ")
        person.type("slurm p5.48xlarge\n")
        person.wait(r"It fits on more of them: slurm 4 x p5\.48xlarge\.\nwhere \[here\]: ")
        person.type("slurm 4 x p5.48xlarge\n")
        person.wait(r"how-long \[300 steps\]: ")
        person.type("\x04")  # the end of what is typed: leave
        person.wait("interrupted\n")
    assert list(folder.iterdir()) == []


@pytest.mark.system
def test_the_recipe_of_four_usual_answers_trains_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init"]) == 0
    assert main(["train", "recipe.yaml", "run.steps=1", "data.workers=1", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["outcome"] == "finished"
    assert len(list((folder / "runs").iterdir())) == 1

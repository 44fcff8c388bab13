"""Jobs whose nodes run a script: what is proposed, and what is rejected before it is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.resolved import RollbackTarget
from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.job import script_of
from shardyard.control.launch_script import script_proposal
from shardyard.control.resume import check_has_training, propose_resume
from shardyard.control.submission import Proposal, describe
from shardyard.errors import RecipeError, RequestError, StorageError
from shardyard.launchers.base import Launcher, launcher_class
from shardyard.launchers.ledger import SCRIPT_DETAIL, Ledger, Submission
from shardyard.launchers.local import LocalLauncher
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.node.script import torchrun_words
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import SCRIPT_VARIABLE, ScriptCommand, take_script
from tests.launchers.kubernetes.requests import request_for

CPUS = ("cluster.device=cpu", "cluster.devices=2")


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def proposed(*words: str, command: tuple[str, ...], launcher: Launcher | None = None) -> Proposal:
    made = launcher or LocalLauncher()
    return script_proposal([*CPUS, *words], command, made, is_dry_run=True)


@pytest.mark.parametrize(
    ("command", "words", "name"),
    [
        (("python", "train.py", "--lr", "0.1"), ("train.py", "--lr", "0.1"), "train-"),
        (("/usr/bin/python3.12", "a/My_Net.py"), ("a/My_Net.py",), "my-net-"),
        (("train.py",), ("train.py",), "train-"),
        (("python", "-m", "pack.fit", "x"), ("-m", "pack.fit", "x"), "fit-"),
        (("_.py",), ("_.py",), "script-"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_is_given_to_torchrun(
    command: tuple[str, ...], words: tuple[str, ...], name: str
) -> None:
    found = proposed(command=command)
    assert found.request.script == ScriptCommand(words=words, processes=2)
    assert found.run_dir.run_id.startswith(name)
    assert found.most_usd == 0.0
    assert describe(found)[1].startswith("script: ")


def test_every_launcher_carries_the_script_in_a_variable() -> None:
    script = ScriptCommand(words=("a b.py", "it's $(x)"), processes=2)
    environ = {SCRIPT_VARIABLE: script.to_text()}
    assert take_script(environ) == script and not environ and take_script(environ) is None
    for name in ("local", "slurm"):
        found = proposed(command=script.words, launcher=launcher_class(name)())
        assert found.request.environment[SCRIPT_VARIABLE] == script.to_text()
        assert SCRIPT_VARIABLE in found.rendered.text
    pods = launcher_class("kubernetes")()
    rendered = pods.render(replace(request_for("cluster.device=cpu"), script=script))
    assert SCRIPT_VARIABLE in rendered.text


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"words": [], "processes": 1}', '{"words": ["a"], "processes": 0}']
)
def test_a_variable_of_another_version_is_named(text: str) -> None:
    with pytest.raises(RequestError, match="is not a script of this version"):
        take_script({SCRIPT_VARIABLE: text})


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        ((), ("bash", "x.sh"), "give a Python script with its arguments"),
        ((), (), "give a Python script with its arguments"),
        ((), ("python", "-m"), "give a Python script with its arguments"),
        ((), ("train.py", "--token", "hf_" + "a" * 34), "Name it in secrets"),
        (("launch.max_usd=3",), ("train.py",), "Set launch.max_usd=null"),
    ],
)
def test_what_cannot_be_launched_is_rejected(
    words: tuple[str, ...], command: tuple[str, ...], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        proposed(*words, command=command)


def test_settings_that_a_script_decides_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {preset: llama-tiny}\nrun: {steps: 3, name: a}\n")
    with pytest.raises(RecipeError) as caught:
        proposed("job.yaml", "optim.lr=1", command=("train.py",))
    assert {each.path for each in caught.value.problems} == {
        "model.preset", "run.steps", "optim.lr",
    }  # fmt: skip


def test_torchrun_gets_the_place_of_the_node() -> None:
    place = NodeAssignment(node_rank=1, nodes=2, host="a", port=7, session="s")
    script = ScriptCommand(words=("train.py", "--lr", "1"), processes=4)
    base = ["model.preset=llama-tiny", "data.source=python-stdlib", "run.steps=1"]
    words = torchrun_words(script, load_checked_recipe([], base), place)
    assert words[-3:] == ["train.py", "--lr", "1"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=a:7", "--max-restarts=0"} <= {
        *words
    }
    more = load_checked_recipe([], [*base, "elastic.max_restarts=3"])
    assert "--max-restarts=3" in torchrun_words(script, more, place)


def launched_run(tmp_path: Path, detail: str) -> RunDir:
    found = proposed("run.id=a", f"run.dir={tmp_path}", command=("train.py", "x"))
    found.run_dir.path.mkdir()
    found.run_dir.recipe.write_text(found.request.recipe_text)
    found.run_dir.attempt(0).mkdir(parents=True)
    job = Submission(
        launcher="local", run_id="a", id="7-1", name="a/job-0",
        details={"folder": str(found.run_dir.path / "logs" / "job-0"), SCRIPT_DETAIL: detail},
    )  # fmt: skip
    Ledger(found.run_dir.ledger).record(job)
    return found.run_dir


def test_a_resume_runs_the_script_again(tmp_path: Path) -> None:
    run_dir = launched_run(tmp_path, json.dumps(["train.py", "x"]))
    assert script_of(run_dir) == ("train.py", "x")
    check_has_training(run_dir)
    again = propose_resume(run_dir, ["cluster.devices=1"], LocalLauncher(), is_dry_run=True)
    assert again.request.script == ScriptCommand(words=("train.py", "x"), processes=1)
    assert again.request.is_resume and again.request.submission == 2
    with pytest.raises(RecipeError, match=r"optim\.lr: is not used"):
        propose_resume(run_dir, ["optim.lr=1"], LocalLauncher(), is_dry_run=True)
    with pytest.raises(RequestError, match="which continues from its newest checkpoint"):
        back_to = RollbackTarget(step=5)
        propose_resume(run_dir, [], LocalLauncher(), is_dry_run=True, back_to=back_to)


def test_a_damaged_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Launch the script again as a new run"):
        script_of(launched_run(tmp_path, "[7]"))


def test_a_launch_of_nothing_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "local"]) == 2
    assert "Missing argument 'RECIPE...'" in capsys.readouterr().err

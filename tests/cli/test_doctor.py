"""`shardyard doctor`: a table or JSON, and 1 as the exit code where there is a problem."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.doctor.finding import Finding
from shardyard.launchers.base import LaunchRequest
from tests.cli.fake_launcher import FakeLauncher, fake_that_can

RECIPE = ["model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=2", "run.steps=2"]


@dataclass
class CheckedLauncher(FakeLauncher):
    """A launcher that can look at its target."""

    def checks(self, request: LaunchRequest) -> list[Finding]:
        what = f"{request.nodes} nodes are wanted in {Path(request.run_dir).parent}"
        return [Finding(name="queue", verdict="problem", what=what, mend="Open the queue.")]


@pytest.mark.heavy
def test_this_machine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "x")
    code = main(["doctor", *RECIPE, "secrets={KEY: env}", "--json"])
    answer = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert {"devices", "packages", "run folder", "secrets"} <= set(found)
    assert "a checkpoint of" in found["run folder"]["what"]
    assert code == (1 if answer["problems"] else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_a_problem_is_told_with_its_remedy_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *RECIPE, "secrets={NO_SUCH_1: env}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "verdict", "what"]
    row = next(line for line in lines if line.startswith("secrets"))
    assert "problem" in row and row.endswith("Set it: export NO_SUCH_1=...")


def test_a_target_is_asked_by_its_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"  # where `launch` would put the run: its file system is checked
    arguments = ["doctor", *RECIPE, "--on", "fake", "cluster.nodes=3", f"run.dir={runs}"]
    launcher = CheckedLauncher()
    assert main(arguments, launchers={"fake": launcher}) == 1
    assert f"3 nodes are wanted in {runs}. Open the queue." in capsys.readouterr().out
    assert launcher.created == set()
    assert not runs.exists()


def test_a_target_that_cannot_be_asked_is_judged_by_the_request_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launchers = {"fake": FakeLauncher()}
    assert main(["doctor", *RECIPE, "--on", "fake"], launchers=launchers) == 0
    assert "fake can be asked for it" in capsys.readouterr().out
    wrong = ["doctor", *RECIPE, "--on", "fake", "secrets={A: 'k8s:keys/a'}"]
    assert main(wrong, launchers=launchers) == 1
    assert "secrets.A=k8s:keys/a: jobs of fake cannot read A from k8s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_here", "words"),
    [(True, "need --on and a RECIPE"), (False, ("cannot install anything on fake"))],
)
def test_nothing_is_installed_on_this_machine_nor_where_no_launcher_can(
    capsys: pytest.CaptureFixture[str], words: str, *, is_here: bool
) -> None:
    launchers = {"fake": fake_that_can(is_this_machine=is_here)}
    assert main(["doctor", *RECIPE, "--on", "fake", "--install"], launchers=launchers) == 2
    assert words in capsys.readouterr().err


def test_a_target_needs_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--on", "slurm"]) == 2
    assert "RECIPE is missing. It says what is wanted of slurm." in capsys.readouterr().err

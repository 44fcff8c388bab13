"""`shardyard doctor --probe`: a short job looks at the recipe's paths, and nothing of it stays."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.rules.check import load_checked_recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import CapacityError
from shardyard.node.side_job import SideWork, function_of
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import CAPABILITIES, AnsweringLauncher

Captured = pytest.CaptureFixture[str]
GOOD = Finding(name="data.source", verdict="ok", what="/vol/text: 3 files can be read")
BAD = Finding(name="launch.run_dir", verdict="problem", what="it is full", mend="Free some room.")


class Site:
    """A launcher that shares no folder, whose side job answers what it is told to."""

    def __init__(self, folder: Path, *findings: Finding) -> None:
        far = {"capabilities": replace(CAPABILITIES, shares_folder=False)}
        result = {"findings": [asdict(finding) for finding in findings]}
        self.fake: AnsweringLauncher = type("Far", (AnsweringLauncher,), far)(result=result)
        self.runs = folder / "runs"
        self.words = [
            "model.preset=llama-tiny", "data.source=/vol/text", "run.name=first",
            f"run.dir={self.runs}", "launch.run_dir=/vol/runs", "run.steps=3",
            "launch.volumes=[{path: /vol, claim: c}]", "cluster.instance=g5.xlarge",
            "cluster.nodes=2",
        ]  # fmt: skip

    def doctor(self, *words: str) -> int:
        words = ("--on", "fake", "--probe", *words)
        return main(["doctor", *self.words, *words], launchers={"fake": self.fake})

    def left(self) -> list[str]:
        return [path.name for path in self.runs.glob("*")] if self.runs.exists() else []


def test_what_the_node_found_stands_among_the_findings(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path, GOOD, BAD)
    assert site.doctor("--yes") == 1
    said = capsys.readouterr().out
    assert "/vol/text: 3 files can be read" in said
    assert "it is full. Free some room." in said
    (request,) = [each for each in site.fake.submitted if each.side is not None]
    assert request.side is not None and request.side.kind == "probe"
    assert request.side.arguments["mounts"] == ["/vol"]
    assert request.side.arguments["checkpoint_bytes"] > 10**6
    assert request.nodes == 1 and request.recipe.data.source == "/vol/text"


def test_nothing_of_it_stays_and_the_next_one_looks_again(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path, GOOD)
    for _ in range(2):
        assert site.doctor("--yes", "--json") == 0
        assert json.loads(capsys.readouterr().out)["problems"] == 0
        assert site.left() == [] and site.fake.created == set()
    assert len([each for each in site.fake.submitted if each.side is not None]) == 2


def test_a_dry_run_prints_the_job_and_submits_nothing(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path, GOOD)
    assert site.doctor("--dry-run") == 0
    assert capsys.readouterr().out == site.fake.render(site.fake.submitted[-1]).text
    assert site.left() == [] and site.fake.created == set()


def test_without_a_terminal_it_asks_for_yes(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path, GOOD)
    assert site.doctor() == 1
    assert "not confirmed, as this is not a terminal" in " ".join(capsys.readouterr().out.split())
    assert site.fake.created == set()


def test_a_probe_that_is_refused_is_a_problem(tmp_path: Path, capsys: Captured) -> None:
    site = Site(tmp_path, GOOD)
    site.fake.refuses = CapacityError("the cluster is full. Try again later.")
    assert site.doctor("--yes") == 1
    assert "the cluster is full" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--probe"], ["model.preset=llama-tiny", "--probe"]])
def test_it_needs_a_target_and_a_recipe(words: list[str], capsys: Captured) -> None:
    assert main(["doctor", *words]) == 2
    assert "--probe needs --on and a RECIPE" in capsys.readouterr().err


def test_on_the_node_the_answer_is_plain_and_its_folder_is_gone(tmp_path: Path) -> None:
    volume = tmp_path / "vol"
    run = RunDir(volume / "runs" / "first-probe-1")
    run.path.mkdir(parents=True)
    words = (f"data.source={volume}/text", f"launch.run_dir={volume}/runs")
    recipe = load_checked_recipe([], ["model.preset=llama-tiny", *words])
    arguments = {"shares_folder": False, "checkpoint_bytes": 1000, "mounts": [str(volume)]}
    answer = function_of("probe")(SideWork(run=run, recipe=recipe, arguments=arguments))
    found = {each["name"]: each for each in json.loads(json.dumps(answer))["findings"]}
    assert found["data.source"]["verdict"] == "problem"
    assert found["launch.run_dir"]["verdict"] == found["data.dir"]["verdict"] == "ok"
    assert [path.name for path in (volume / "runs").iterdir()] == []


@pytest.mark.slow
def test_a_probe_on_this_machine(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text").mkdir()
    words = (
        "model.preset=llama-tiny", f"data.source={tmp_path}/text", f"run.dir={tmp_path}/runs",
        "cluster.device=cpu", "cluster.devices=1", f"data.dir={tmp_path}/prepared",
    )  # fmt: skip
    assert main(["doctor", *words, "--on", "local", "--probe", "--yes"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"data.source={tmp_path}/text: it has no file in it" in said
    assert f"{tmp_path}/runs can be written by user" in said
    assert list((tmp_path / "runs").iterdir()) == []

"""Odd strings in every place of a recipe, for every launcher: refused by name, or handed on whole.

Nothing runs, nothing changes, and no error of the operating system is all that is said.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.cli import main
from shardyard.config.rules.check import load_checked_recipe
from shardyard.errors import RecipeError, RequestError
from shardyard.io.yaml import read_yaml
from shardyard.launchers.registry import LAUNCHERS
from tests.launchers.odd_strings import (
    KEY,
    STRINGS,
    Place,
    filled,
    places,
    setting_of,
    shown,
    with_string,
)

pytestmark = pytest.mark.heavy

_VOLUME = {"path": "/runs", "claim": "runs"}
_BASE: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "run": {"id": "odd", "steps": 10},
    "optim": {"global_batch": 8},
    "cluster": {"device": "cpu", "devices": 2, "nodes": 2},
}
_BASES: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {},
    "kubernetes": {
        "image": "registry.example/train@sha256:" + 64 * "0",
        "run_dir": "/runs",
        "volumes": [_VOLUME],
        "kubernetes": {"context": "test"},
    },
    "aws-batch": {
        "image": "registry.example/train@sha256:" + 64 * "0",
        "run_dir": "/runs",
        "volumes": [{"path": "/runs", "efs": "fs-0123456789abcdef0"}],
        "aws_batch": {"queue": "q", "region": "us-east-1", "vcpus": 2, "memory_gib": 4},
    },
    "ssh": {"ssh": {"hosts": ["gpu1", "gpu2"]}},
}
_NEEDED: dict[str, dict[str, Any]] = {
    "launch.volumes.0.path": {"claim": "runs"},
    "launch.volumes.0.claim": {"path": "/runs"},
    "launch.volumes.0.efs": {"path": "/runs"},
    "launch.volumes.0.host": {"path": "/runs"},
    "data.mixture.0": {"name": "a", "source": "s3://a/b", "weight": 1},
    "observe.alerts.0": {"when": ["failed"]},
}
"""What must stand beside a string for it to be looked at."""


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


class Desk:
    """An empty folder, in which nothing may change."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.canary = folder / "canary"
        self.recipes = folder / "recipes"
        self.here = folder / "here"
        self._capsys = capsys
        for made in (self.recipes, self.here):
            made.mkdir()
        for name, launch in _BASES.items():
            base = {**_BASE, "launch": launch}
            base["run"] = {**base["run"], "dir": str(self.here / "runs")}
            (self.recipes / f"{name}.yaml").write_text(json.dumps(base))

    def recipe(self, place: Place, text: str) -> Path:
        content = with_string(place, text)
        for prefix, beside in _NEEDED.items():
            if shown(place).startswith(prefix) and 0 in place:
                item: Any = content
                for part in place[: place.index(0) + 1]:
                    item = item[part]
                if isinstance(item, dict):
                    item |= {key: value for key, value in beside.items() if key not in item}
        file = self.recipes / "odd.yaml"
        file.write_text(json.dumps(content))  # JSON is YAML, and can write any of them
        return file

    def dry_run(self, launcher: str, file: Path) -> Said:
        base = str(self.recipes / f"{launcher}.yaml")
        code = main(["launch", base, str(file), "--on", launcher, "--dry-run", "--json"])
        said = self._capsys.readouterr()
        return Said(code, said.out, said.err)

    def assert_untouched(self) -> None:
        assert not self.canary.exists()
        assert not list(self.here.iterdir())


@pytest.fixture
def desk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    desk = Desk(tmp_path, capsys)
    monkeypatch.chdir(desk.here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield desk
    desk.assert_untouched()


def _assert_told(said: str, place: Place, text: str) -> None:
    """A refusal names the setting, and does nothing to the terminal that shows it."""
    setting = "launch.volumes" if "volumes" in place else setting_of(place)
    mapping = setting.removesuffix(".NAME")
    named = re.sub(r"\[\d+\]", "", said)
    is_item = mapping != setting and mapping in named
    assert setting in named or is_item, (text, said)
    for line in said.splitlines():
        assert all(c.isprintable() or c == "\t" for c in line), (text, said)
    assert "bug of shardyard" not in said and "operating system" not in said, (text, said)


def _holds(content: Any, place: Place, text: str) -> bool:
    for part in place[:-1] if place[-1] == KEY else place:
        content = content[part]
    return text in content if place[-1] == KEY else bool(content == text)


@pytest.mark.slow
@pytest.mark.parametrize("place", places(), ids=shown)
def test_an_odd_string_is_refused_by_name_or_handed_on_whole(place: Place, desk: Desk) -> None:
    for raw in STRINGS:
        text = filled(raw, desk.canary)
        file = desk.recipe(place, text)
        try:
            load_checked_recipe([desk.recipes / "local.yaml", file])
        except RecipeError as error:
            _assert_told(str(error), place, text)
            continue
        except RequestError as error:  # no key of YAML is as long as that
            assert place[-1] == KEY and len(text) > 1024
            assert f"recipe {file}, line 1, column" in str(error)
            continue
        for launcher in LAUNCHERS:
            said = desk.dry_run(launcher, file)
            assert said.code in (0, 2), (launcher, text, said.err)
            if said.code == 2:
                _assert_told(said.err, place, text)
            else:
                _assert_whole(launcher, json.loads(said.out), place, text)
            desk.assert_untouched()


def _assert_whole(launcher: str, rendered: dict[str, Any], place: Place, text: str) -> None:
    """What would be sent says the same however it is read."""
    recipe = _recipe_in(launcher, rendered)
    is_anchored = setting_of(place).startswith(
        (
            "run.dir",
            "data.",
            "model.path",
            "model.dir",
            "cluster.file",
            "launch.ssh.hostfile",
            "launch.ssh.config_file",
        )
    )
    if not is_anchored:
        assert _holds(read_yaml(recipe, source="it"), place, text), (launcher, text)
    match launcher:
        case "kubernetes":
            assert list(yaml.safe_load_all(rendered["text"])) == rendered["objects"]
        case "aws-batch":
            assert json.loads(rendered["text"]) == rendered["objects"]
        case "slurm":
            _run_head(rendered["text"])
        case "local" | "ssh":
            script = rendered["text"].partition("\n# JOB/recipe.yaml")[0]
            assert subprocess.run(["bash", "-n"], input=script.encode()).returncode == 0


def _recipe_in(launcher: str, rendered: dict[str, Any]) -> str:
    if launcher == "kubernetes":
        return str(rendered["objects"][0]["data"]["recipe.yaml"])
    if launcher == "aws-batch":
        container = rendered["objects"][0]["params"]["nodeProperties"]["nodeRangeProperties"][0]
        values = {row["name"]: row["value"] for row in container["container"]["environment"]}
        return str(values["SHARDYARD_RECIPE"])
    files = rendered["files"].items()
    return next(str(text) for name, text in files if name.endswith("recipe.yaml"))


def _run_head(script: str) -> None:
    """bash reads all of the script, and runs what stands before its own functions."""
    assert subprocess.run(["bash", "-n"], input=script.encode()).returncode == 0
    head, found, _ = script.partition("\nnewest()")
    assert found
    done = subprocess.run(
        ["bash", "-c", f'{head}\nprintf "%s\\0" "${{environment[@]}}" "${{srun[@]}}"'],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"},
        capture_output=True,
    )
    assert done.returncode == 0 and not done.stderr, done

"""A path that cannot be followed is one message with the setting's name, for every such setting."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.config.paths import PATHS, unreadable_reason
from shardyard.control import attempt
from shardyard.control import attempt as prepare
from shardyard.hardware.machine import Machine
from tests.cli.fake_launcher import FakeLauncher

HERE = sorted(name for name, row in PATHS.items() if row.opened_by is not None)
SETTINGS = [*HERE, "launch.code", "secrets.TOKEN"]
"""All but paths of other machines: no check here can say what they lead to."""
LAPTOP = Machine(device="cpu", name="a CPU", count=1, memory_bytes=2**33, cores=6, hostname="here")


def through_a_file(folder: Path) -> str:
    (folder / "file").write_text("text")
    return str(folder / "file" / "inside")


def a_loop(folder: Path) -> str:
    (folder / "loop").symlink_to(folder / "loop")
    return str(folder / "loop" / "inside")


def too_long(folder: Path) -> str:
    return f"{folder}/{'a' * 300}"


def too_deep(folder: Path) -> str:
    return f"{folder}{'/b' * 3000}"


def with_nul(folder: Path) -> str:
    return f"{folder}/a\0b"


def an_unknown_home(_folder: Path) -> str:
    return "~nobody-of-this-name/texts"


WRONG = [through_a_file, a_loop, too_long, too_deep, with_nul, an_unknown_home]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_path_that_cannot_be_followed_is_told_by_its_setting(
    setting: str,
    wrong: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tokenise(*_: object, **__: object) -> None:
        raise AssertionError("text would be read")

    monkeypatch.setattr(attempt, "local_machine", lambda _device: LAPTOP)
    monkeypatch.setattr(prepare, "run_program", tokenise)
    assert main(request_with(setting, wrong(tmp_path), tmp_path), launchers=FAKE) == 2
    said = capsys.readouterr().err
    assert setting in re.sub(r"\.\d+|\[\d+\]", "", said)  # without places in lists
    assert said.startswith("error: ") and "bug of shardyard" not in said


FAKE = {"fake": FakeLauncher()}


def request_with(setting: str, path: str, folder: Path) -> list[str]:
    """The verb that takes the setting, and a recipe in which it has the path."""
    models = {"model.path": {}, "model.config": {"path": str(folder)}}
    recipe: dict[str, Any] = {
        "model": models.get(setting, {"preset": "llama-tiny"}),
        "run": {"steps": 1, "dir": str(folder / "runs")},
        "cluster": {},
    }
    section, _, key = setting.rpartition(".")
    value: Any = {"secrets.TOKEN": f"file:{path}", "launch.code": [path]}.get(setting, path)
    if section == "data.mixture":
        share = {"name": "a", "weight": 1.0, "source": str(folder), key: value}
        section, key, value = "data", "mixture", [share]
    part = recipe
    for name in section.split("."):
        part = part.setdefault(name, {})
    part[key] = value
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    if setting != "launch.code":  # no process here reads it
        return ["train", str(file)]
    cpus = ("cluster.device=cpu", "cluster.devices=1")
    return ["launch", str(file), "--on", "fake", "--dry-run", *cpus]


def test_a_folder_that_may_not_be_entered_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", forbidden)  # root may enter any
    said = unreadable_reason(str(tmp_path / "shut" / "inside"))
    assert said is not None and "this user may not enter a folder above it" in said


def test_what_is_not_there_yet_is_no_problem(tmp_path: Path) -> None:
    assert unreadable_reason(str(tmp_path / "not" / "yet")) is None
    assert unreadable_reason(str(tmp_path)) is None

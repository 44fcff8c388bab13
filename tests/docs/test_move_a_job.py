"""The tutorial on moving a job: its files and commands, and what it shows of their output."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from tests.docs.shown import Step, not_printed, steps_of
from tests.test_docs import ROOT, files_of

PAGE = ROOT / "docs/tutorials/move-a-job.md"
STEPS = list(steps_of(PAGE))
WRITTEN = "moved.yaml"
"""Shown as a file, and written by a command."""


def _save_files(folder: Path) -> None:
    for name, text in files_of(PAGE).items():
        if name != WRITTEN:
            (folder / name).write_text(text)


def _is_import_of_a_configuration(step: Step) -> bool:
    return step.commands[0].startswith("shardyard import ") and "--like" not in step.commands[0]


@pytest.mark.heavy
def test_configurations_become_recipes_that_pass_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _save_files(tmp_path)
    made = []
    for step in filter(_is_import_of_a_configuration, STEPS):
        words = shlex.split(step.commands[0], comments=True)
        code = main(words[1:])
        said = capsys.readouterr()
        expected = re.search(r"# exit code (\d)", step.commands[0])
        assert code == (int(expected[1]) if expected else 0), said.err
        assert not_printed(step.shown, said.out + said.err) == [], said.out + said.err
        if "--to" in words:
            made.append(Path(words[words.index("--to") + 1]))
            check(load_recipe([made[-1]]))
    assert [path.name for path in made] == [WRITTEN, "from-fsdp.yaml", "from-titan.yaml"]
    shown = files_of(PAGE)[WRITTEN].splitlines()[1:]
    written = (tmp_path / WRITTEN).read_text()
    assert not_printed(shown, written) == [], written
    (tmp_path / "shown.yaml").write_text("\n".join(shown))
    assert load_recipe([tmp_path / "shown.yaml"]) == load_recipe([tmp_path / WRITTEN])


@pytest.mark.system
def test_scripts_and_runs_print_what_the_page_shows(tmp_path: Path) -> None:
    _save_files(tmp_path)
    (tmp_path / WRITTEN).write_text(files_of(PAGE)[WRITTEN])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    losses: list[list[float]] = []
    for step in STEPS:
        (line, *others) = step.commands
        if not step.is_console or _is_import_of_a_configuration(step):
            continue
        assert not others
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed = done.stdout + done.stderr
        assert not_printed(step.shown, printed, numbers=False) == [], f"{line}\n{printed}"
        losses.append(
            [float(loss) for loss in re.findall(r"^step \d+\S* +loss ([\d.]+)", printed, re.M)]
        )
    before, after, two, one = [each for each in losses if each]
    assert len(before) == 4 and before == pytest.approx(after, abs=1e-5)
    assert len(two) == 2 and two == pytest.approx(one, abs=2e-3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {*files_of(PAGE), "from-fsdp.yaml", "from-titan.yaml"}

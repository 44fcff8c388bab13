"""launch.code reaches the nodes: what was launched is what is imported there, also on a resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.cli.sent_code import take_code
from shardyard.config.load import load_recipe
from shardyard.errors import DataError
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A launched run, from a folder with a module of the user's own."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    assert launch(tmp_path, FakeLauncher(), "--yes", "launch.code=[mine]") == 0
    return RunDir(tmp_path / "runs" / "first")


def imported(cwd: Path) -> str:
    """What a process of a node imports."""
    program = "import mine; print(mine.ANSWER, mine.__file__)"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


def test_a_node_imports_what_was_launched(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "__init__.py").write_text("ANSWER = 'changed since'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    recipe = load_recipe([run.recipe])
    for _ in range(2):  # every node unpacks, or finds it unpacked
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        take_code(recipe, run)
    assert os.environ["PYTHONPATH"].endswith(f"{os.pathsep}/somewhere")
    answer, place = imported(elsewhere).split()
    assert answer == "42" and place.startswith(str(run.path / "launch" / "code-"))


def test_a_run_without_code_has_nothing_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(tmp_path, FakeLauncher(), "--yes") == 0
    run = RunDir(tmp_path / "runs" / "first")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    take_code(load_recipe([run.recipe]), run)
    assert "PYTHONPATH" not in os.environ
    assert not (run.path / "launch").exists()


def test_code_that_was_lost_on_its_way_is_told(run: RunDir) -> None:
    (run.path / "launch" / "code.json").unlink()
    with pytest.raises(DataError, match=r"code\.json is missing.*Launch again"):
        take_code(load_recipe([run.recipe]), run)


def test_code_that_is_not_there_is_refused_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeLauncher()
    assert launch(tmp_path, fake, "--yes", "launch.code=[no-such-*]") == 2
    assert "matches nothing in" in capsys.readouterr().err
    assert fake.created == set() and not (tmp_path / "runs" / "first").exists()


def test_nodes_that_share_no_folder_get_their_code_in_the_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = fake_that_can(shares_folder=False)
    assert launch(tmp_path, fake, "--yes", "launch.code=[mine]", "launch.run_dir=/runs") == 2
    assert "Put it into the image" in capsys.readouterr().err

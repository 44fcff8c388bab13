"""Files of the current folder that are called like modules of Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.own_processes import add_current_folder_to_path, python_program

SRC = Path(__file__).parents[1] / "src" / "shardyard"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where every module of Python would write down that it was taken from here."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'taken')!r}, 'a').write({name + ' '!r})\n"
            f"raise ImportError('{name} of the current folder')\n"
        )
    return tmp_path


@pytest.mark.heavy
def test_a_program_of_ours_takes_no_module_of_the_current_folder(folder: Path) -> None:
    for module in ("shardyard.elastic", "shardyard.data", "shardyard.telemetry"):
        done = subprocess.run(
            python_program(module, "--help"),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    body = (
        "import multiprocessing as m\n"
        "if __name__ == '__main__':\n"
        "    for how in ('spawn', 'forkserver'):\n"
        "        child = m.get_context(how).Process(target=print, args=(how,))\n"
        "        child.start(); child.join(); assert child.exitcode == 0\n"
    )
    (folder / "body_of_the_test.py").write_text(body)
    command = [sys.executable, "-P", str(folder / "body_of_the_test.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "taken").exists()


def test_no_program_of_ours_is_started_another_way() -> None:
    """Every start of Python goes through `python_program`, or names its options."""
    others = [
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if re.search(r'(sys\.executable|"python3?"),\s*"-m"', path.read_text())
    ]
    assert others == []


def test_the_current_folder_comes_behind_python_and_before_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    add_current_folder_to_path()
    add_current_folder_to_path()
    assert sys.path.count(str(tmp_path)) == 1
    at = sys.path.index(str(tmp_path))
    places = [place for place, each in enumerate(sys.path) if each.endswith("-packages")]
    assert at < min(places)
    assert any(each.endswith("lib-dynload") for each in sys.path[:at])

"""Packages of extras that read data: the data program imports them, when a file needs them."""

import ast
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardyard

PACKAGE = Path(shardyard.__file__).parent
ROOT = Path(__file__).parents[2]
OF_DATA = {"pyarrow", "h5py", "datasets", "backports"}


def imported_in(tree: ast.AST) -> set[str]:
    """First parts of the names of modules that are imported, wherever that is."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def asked_for_in(tree: ast.AST) -> set[str]:
    """The same of what is imported by ``extra``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [
        argument.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "extra"
        for argument in call.args[1:]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return {text.partition(".")[0] for text in texts}


def test_only_what_prepares_data_imports_them_and_late() -> None:
    asked: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not imported_in(tree) & OF_DATA, path
        for name in asked_for_in(tree):
            asked.setdefault(name, set()).add(path.relative_to(PACKAGE).parts[0])
    assert {"pyarrow", "h5py", "backports"} <= asked.keys()
    assert {place for places in asked.values() for place in places} == {"data"}


def test_an_import_that_is_hidden_in_a_function_is_seen() -> None:
    tree = ast.parse(
        "def f():\n    from pyarrow import parquet\n    extra('h5', 'h5py.x', what='')"
    )
    assert (imported_in(tree), asked_for_in(tree)) == ({"pyarrow"}, {"h5py"})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed here")
def test_every_extra_can_be_installed_beside_all_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(project["optional-dependencies"])
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, f"{ROOT}[{extras}]"], capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr

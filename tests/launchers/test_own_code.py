"""Containers get the user's own functions by launch.code, or the launch is rejected."""

from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.launchers.code_files import unsent_code

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("settings", "is_sent"),
    [
        (["task.loss=own:f"], False),
        (["task.loss=own:f", "launch.code=[own.py]"], True),
        (["task.metrics=[package.inner:f]", "launch.code=[own.py]"], False),
        (["task.metrics=[package.inner:f]", "launch.code=[package]"], True),
        (["model.module=own:f", "model.preset=null"], False),
        (["task.loss=own:f", "launch.env={PYTHONPATH: /app}"], True),
        (["task.loss=json:loads"], True),
        ([], True),
    ],
)
def test_a_function_that_would_be_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], is_sent: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("own.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text("def f(outputs, batch): ...\n")
    recipe = load_recipe([], ["model.preset=llama-tiny", *settings])
    found = unsent_code(recipe, "kubernetes")
    assert (not found) == is_sent
    for each in found:
        assert "containers of kubernetes do not have" in str(each)
        assert "Send it with launch.code=[" in str(each)

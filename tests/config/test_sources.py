"""A place elsewhere is no path: it stays as it is, and every node reaches it."""

from importlib import import_module
from pathlib import Path

import pytest

from shardyard.config.paths import (
    NodePaths,
    check_existing_paths,
    check_mounted_paths,
    check_readable_paths,
    make_paths_absolute,
    paths_of,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import LOCAL, SCHEMES, is_remote

FAR = ("s3://bucket/a b/**/*.parquet", "https://host/x.jsonl", "gs://bucket/" + "x" * 300)


@pytest.mark.parametrize("sees_this_machine", [True, False])
def test_nodes_need_no_volume_for_what_is_elsewhere(
    sees_this_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s3:").touch()  # as a path, the address would lead through this file
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.model_validate({"data": {"source": FAR}})
    sight = NodePaths(launcher="aws-batch", shares_filesystem=sees_this_machine)
    assert check_readable_paths(recipe, sight) == check_readable_paths(recipe) == []
    assert check_mounted_paths(recipe, sight) == check_existing_paths(recipe, sight) == []
    assert [path.setting for path in paths_of(recipe)] == ["run.dir", "data.dir"]
    assert make_paths_absolute(recipe).data.source == FAR


def test_beside_it_a_path_is_held_to_what_nodes_see() -> None:
    recipe = Recipe.model_validate({"data": {"source": (*FAR, "/not/there")}})
    far = NodePaths(launcher="aws-batch", shares_filesystem=False)
    near = NodePaths(launcher="slurm", shares_filesystem=True)
    for found in (check_mounted_paths(recipe, far), check_existing_paths(recipe, near)):
        assert [problem.path for problem in found] == ["data.source"]
        assert "/not/there" in found[0].text


def test_each_row_names_code_that_is_there() -> None:
    for row in (LOCAL, *SCHEMES.values()):
        module, _, name = row.code.partition(":")
        assert hasattr(import_module(module), name)
    assert is_remote("s3://b/x")
    assert not any(is_remote(text) for text in ("./s3://b", "/a://b", "C:/x", "python-stdlib"))

"""A place elsewhere is no path: it stays as it is, and every node reaches it."""

from importlib import import_module
from pathlib import Path

import pytest

from shardyard.config.paths import (
    Sight,
    absent_problems,
    anchor_paths,
    reach_problems,
    unseen_problems,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import HERE, SCHEMES, is_remote
from shardyard.doctor.paths import _data

FAR = ("s3://bucket/a b/**/*.parquet", "https://host/x.jsonl", "gs://bucket/" + "x" * 300)


@pytest.mark.parametrize("sees_this_machine", [True, False])
def test_nodes_need_no_volume_for_what_is_elsewhere(
    sees_this_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s3:").touch()  # as a path, the address would lead through this file
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.model_validate({"data": {"source": FAR}})
    sight = Sight(launcher="aws-batch", sees_this_machine=sees_this_machine)
    assert reach_problems(recipe, sight) == reach_problems(recipe) == []
    assert unseen_problems(recipe, sight) == absent_problems(recipe, sight) == []
    assert list(_data(recipe)) == []
    assert anchor_paths(recipe).data.source == FAR


def test_beside_it_a_path_is_held_to_what_nodes_see() -> None:
    recipe = Recipe.model_validate({"data": {"source": (*FAR, "/not/there")}})
    far = Sight(launcher="aws-batch", sees_this_machine=False)
    near = Sight(launcher="slurm", sees_this_machine=True)
    for found in (unseen_problems(recipe, far), absent_problems(recipe, near)):
        assert [problem.path for problem in found] == ["data.source"]
        assert "/not/there" in found[0].text


def test_each_row_names_code_that_is_there() -> None:
    for row in (HERE, *SCHEMES.values()):
        module, _, name = row.code.partition(":")
        assert hasattr(import_module(module), name)
    assert is_remote("s3://b/x")
    assert not any(is_remote(text) for text in ("./s3://b", "/a://b", "C:/x", "python-stdlib"))

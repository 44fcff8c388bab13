"""What the fork server imports; what killed agents leave behind is removed, and nothing else."""

import fcntl
import os
import time
from importlib.util import find_spec
from pathlib import Path

from shardyard.config.schema.recipe import Model, Recipe, TaskSettings
from shardyard.elastic.forkserver import preload_of, sweep


def _folder(parent: Path, name: str, *, age_s: float) -> Path:
    folder = parent / name
    (folder / "pymp-1").mkdir(parents=True)
    then = time.time() - age_s
    os.utime(folder, (then, then))
    return folder


def test_only_old_folders_that_no_agent_holds_are_removed(tmp_path: Path) -> None:
    left = _folder(tmp_path, "shardyard-agent-left", age_s=3600)
    held = _folder(tmp_path, "shardyard-agent-held", age_s=3600)
    young = _folder(tmp_path, "shardyard-agent-young", age_s=1)
    other = _folder(tmp_path, "shardyard-recipe", age_s=3600)
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sweep(tmp_path)
    assert [folder.exists() for folder in (left, held, young, other)] == [False, True, True, True]
    os.close(descriptor)
    sweep(tmp_path)
    assert not held.exists()


def test_the_server_imports_what_workers_of_the_recipe_need() -> None:
    plain = preload_of(Recipe())
    assert plain[-1] == "shardyard.tasks.causal_lm"
    compiled = preload_of(Recipe(model=Model(compile=True), task=TaskSettings(name="masked_lm")))
    assert compiled[-2:] == ("shardyard.tasks.masked_lm", "shardyard.elastic.preload_compiler")
    brought = preload_of(Recipe(task=TaskSettings(name="of-a-package")))
    assert brought == plain[:-1]
    for module in {*plain, *compiled}:
        assert find_spec(module) is not None

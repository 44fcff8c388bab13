"""A path that no node can have is refused, by its setting, with what the nodes do see."""

from pathlib import Path

import pytest

from shardyard.config.paths import NodePaths, check_existing_paths, check_mounted_paths
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.submission import launcher_named
from shardyard.launchers.base import Launcher
from shardyard.launchers.registry import LAUNCHERS

VOLUMES = "launch.volumes=[{path: /runs, claim: runs}, {path: /data/, claim: data}]"
FAR = NodePaths(launcher="far", shares_filesystem=False, folders=("/runs", "/data/"))


def recipe(*overrides: str) -> Recipe:
    return load_checked_recipe([], ["model.preset=llama-tiny", *overrides])


def unseen(*overrides: str) -> list[str]:
    return [str(problem) for problem in check_mounted_paths(recipe(*overrides), FAR)]


SEEN = (
    "data.source=/data", "data.source=/data/text", "data.source=/data/*/x.txt", "data.dir=/runs/p",
    "data.source=python-stdlib", "data.tokenizer=owner/name", "data.tokenizer=/data/tokenizer",
    "model.path=/data/../runs/weights", "data.source=[/data/a, /runs/b]",
)  # fmt: skip
ELSEWHERE = (
    "data.source=/data2", "data.source=/data/../etc", "data.source=/d*/text", "data.dir=/prepared",
    "data.tokenizer=/tokenizer", "model.path=/weights", "data.source=[/data/a, /b]",
)  # fmt: skip
RELATIVE = (
    "data.source=my-text", "data.source=./my-text", "data.source=~/my-text", "data.source=*.txt",
    "data.dir=prepared", "data.tokenizer=./tokenizer", "model.path=weights",
    "data.tokenizer=tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("override", SEEN)
def test_what_lies_on_a_volume_need_not_exist_here(override: str) -> None:
    assert unseen(override) == []


@pytest.mark.parametrize("override", ELSEWHERE)
def test_a_path_outside_the_volumes_is_refused(override: str) -> None:
    (said,) = unseen(override)
    setting, _, value = override.partition("=")
    place = {"[/data/a, /b]": "/b"}.get(value, value)
    assert said.startswith(f"{setting}={place} is in no folder that nodes of far see. They see")
    assert "/runs, /data/ (launch.volumes, launch.image_paths)" in said
    assert "Mount the volume that holds it: launch.volumes='[{path: /" in said


@pytest.mark.parametrize("override", RELATIVE)
def test_a_relative_path_is_refused_where_no_folder_is_shared(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (said,) = unseen(override)
    assert said.startswith(f"{override} is relative")
    assert "nodes of far share no folder with this machine" in said
    assert "Give the whole path on them" in said


def test_all_are_told_at_once() -> None:
    found = unseen("data.source=[a, /b]", "model.path=c", "data.dir=d")
    assert [line.partition(" ")[0] for line in found] == [
        "model.path=c", "data.source=a", "data.source=/b", "data.dir=d",
    ]  # fmt: skip


def test_what_is_not_there_is_told_where_nodes_see_this_machine(tmp_path: Path) -> None:
    here = NodePaths(launcher="near", shares_filesystem=True, folders=("/scratch",))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    for there in (f"{tmp_path}/text", f"{tmp_path}/*/a.txt", "/scratch/of/nodes", "python-stdlib"):
        assert check_existing_paths(recipe(f"data.source={there}"), here) == []
    for absent in (f"{tmp_path}/other", f"{tmp_path}/*/b.txt"):
        (said,) = check_existing_paths(recipe(f"data.source={absent}", "data.dir=/not/yet"), here)
        assert str(said).startswith(f"data.source={absent} does not exist on this machine")


def launcher(name: str) -> Launcher:
    found: Launcher = launcher_named(name)
    return found


def seen_by(name: str, *overrides: str) -> NodePaths:
    return launcher(name).node_paths(recipe(*overrides))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_says_what_its_nodes_see(name: str) -> None:
    sight = seen_by(name, VOLUMES, "launch.image_paths=[/opt/data]")
    assert sight.launcher == name
    assert sight.shares_filesystem == launcher(name).capabilities.shares_folder
    volumes = () if sight.shares_filesystem else ("/runs", "/data/")
    assert sight.folders == (*volumes, "/opt/data")


def test_a_container_on_slurm_sees_its_mounts_and_the_folder_of_the_run() -> None:
    mounts = "launch.slurm.container_mounts=[/lustre/text:/data, /scratch, '/a:/b:ro']"
    where = ("launch.slurm.container_image=image", mounts, "run.id=one", "launch.run_dir=/runs")
    sight = seen_by("slurm", *where)
    assert not sight.shares_filesystem
    assert sight.folders == ("/data", "/scratch", "/b", "/runs/one")
    (said,) = check_mounted_paths(recipe(*where, "data.source=/lustre/text"), sight)
    assert "holds it: launch.slurm.container_mounts=['/lustre:/lustre']." in str(said)
    (said,) = check_mounted_paths(recipe(*where, "secrets.HF_TOKEN=file:/home/me/token"), sight)
    assert str(said).startswith("secrets.HF_TOKEN=/home/me/token is in no folder")
    assert check_mounted_paths(recipe(*where, "secrets.HF_TOKEN=file:/data/token"), sight) == []

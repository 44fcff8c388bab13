"""Imported recipes go through a dry run of the launcher that they name, and what comes of it holds.

Kubernetes' objects are held to the official schemas, scripts to bash. What no configuration says is
given as a user would: where the text lies on the nodes, an image, a volume for runs.
"""

import json
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.importers.configs.convert import import_files
from tests.importers.configs.test_public import ALL, words_of, written
from tests.launchers.kubernetes.schemas import check_object

Captured = pytest.CaptureFixture[str]


def launcher_of(kind: str, case: dict[str, Any]) -> str:
    if kind == "kubeflow":
        return "kubernetes"
    return "slurm" if "#SBATCH" in case.get("text", "") else "local"


def imported(kind: str, case: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any]]:
    file = written(kind, case, folder)
    first = import_files([file])
    known = {
        name for each in first.outcomes for name, value in each.result.settings.items() if value
    }
    found = import_files([file], words_of(case, known), case.get("without", ()))
    recipe = folder / "recipe.yaml"
    recipe.write_text(found.text)
    return recipe, dict(found.recipe)


CASES = [
    pytest.param(
        *case.values, id=case.id,
        # it plans for this machine, which takes seconds
        marks=[pytest.mark.slow if launcher_of(*case.values) == "local" else pytest.mark.heavy],
    )
    for case in ALL
]  # fmt: skip


@pytest.mark.parametrize("kind, case", CASES)
def test_a_dry_run_of_an_imported_recipe_is_whole(
    kind: str,
    case: dict[str, Any],
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    recipe, content = imported(kind, case, tmp_path)
    launcher = launcher_of(kind, case)
    words = said_by_a_user(launcher, content, tmp_path)
    code = main(["launch", str(recipe), "--on", launcher, "--dry-run", "--json", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    check_rendered(launcher, json.loads(said.out))


def check_rendered(launcher: str, rendered: dict[str, Any]) -> None:
    """What would be sent is what its receiver takes."""
    if launcher == "kubernetes":
        for item in rendered["objects"]:
            check_object(item)
        return
    script = rendered["text"].partition("\n# JOB/recipe.yaml")[0]
    assert subprocess.run(["bash", "-n"], input=script.encode(), check=False).returncode == 0


def said_by_a_user(launcher: str, recipe: dict[str, Any], folder: Path) -> list[str]:
    words = [f"run.dir={folder / 'runs'}", "run.id=dry"]
    if {"path", "hub"} & set(recipe.get("model", {})):  # no weights are here
        words += ["model.path=null", "model.hub=null", "model.preset=llama2-7b"]
        words += ["model.revision=null"]
    slurm = recipe.get("launch", {}).get("slurm", {})
    if launcher == "kubernetes":
        return words + _on_kubernetes(recipe)
    if slurm.get("container_image") or slurm.get("container_mounts"):
        mount = slurm["container_mounts"][0].split(":")[-1]
        return [*words, f"data.source={mount}/text"]
    parallel = recipe.get("parallel", {})
    if {"tp", "pp"} & set(parallel) and "devices" not in recipe.get("cluster", {}):
        # of the machines that it was written for
        degrees = [parallel.get(axis, 1) for axis in ("tp", "pp", "dp_shard")]
        words.append(f"cluster.devices={prod(each for each in degrees if each != 'auto')}")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("words " * 50)
    return [*words, f"data.source={folder / 'text'}"]


def _on_kubernetes(recipe: dict[str, Any]) -> list[str]:
    launch = recipe.get("launch", {})
    words = ["launch.kubernetes.context=test", "launch.kubernetes.allow_host_paths=true"]
    volumes = launch.get("volumes") or [{"path": "/data", "claim": "data"}]
    if not launch.get("volumes"):
        words.append("launch.volumes=[{path: /data, claim: data}]")
    if not launch.get("image"):
        words.append("launch.image=registry.example/train:1")
    if recipe.get("cluster", {}).get("devices", "auto") == "auto":
        words.append("cluster.devices=8")
    words += [f"secrets.{name}=k8s:tokens/{name}" for name in recipe.get("secrets", {})]
    place = volumes[0]["path"]
    return [*words, f"launch.run_dir={place}/runs", f"data.source={place}/text"]

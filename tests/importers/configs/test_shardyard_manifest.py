"""What a launch here rendered gives back its recipe."""

import json
from pathlib import Path

import pytest
import yaml

from shardyard.config.load import load_recipe
from shardyard.errors import RequestError
from shardyard.importers.configs import shardyard_manifest
from shardyard.importers.configs.convert import import_files
from shardyard.launchers.aws_batch.requests import RECIPE_VARIABLE

GOLDEN = Path(__file__).parents[2] / "launchers" / "golden"
KUBERNETES = sorted(
    path for path in (GOLDEN / "kubernetes").glob("*.yaml") if "side" not in path.name
)
AWS_BATCH = sorted(
    path for path in (GOLDEN / "aws-batch").glob("*.json") if "side" not in path.name
)


def in_stream(path: Path) -> str:
    """The recipe in a stream of objects, found without the product."""
    texts = [
        each["data"]["recipe.yaml"]
        for each in yaml.safe_load_all(path.read_text())
        if each["kind"] == "ConfigMap" and "recipe.yaml" in each.get("data", {})
    ]
    assert len(texts) == 1
    return str(texts[0])


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_a_stream_of_kubernetes_gives_back_its_recipe(path: Path) -> None:
    imported = import_files([path])
    assert load_recipe([dict(imported.recipe)]) == load_recipe([yaml.safe_load(in_stream(path))])


@pytest.mark.parametrize("path", AWS_BATCH, ids=lambda path: path.stem)
def test_calls_of_aws_batch_give_back_their_recipe(path: Path) -> None:
    pairs = json.loads(path.read_text())[0]["params"]["nodeProperties"]["nodeRangeProperties"][0][
        "container"
    ]["environment"]
    text = next(pair["value"] for pair in pairs if pair["name"] == RECIPE_VARIABLE)
    assert load_recipe([dict(import_files([path]).recipe)]) == load_recipe([yaml.safe_load(text)])


def test_a_script_of_slurm_gives_back_the_recipe_that_it_names(tmp_path: Path) -> None:
    recipe = tmp_path / "it's a run" / "launch" / "recipe.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("model: {preset: llama-tiny}\ncluster: {nodes: 3}\n")
    golden = (GOLDEN / "slurm" / "llama2-7b-p5.48xlarge-2.sbatch").read_text()
    script = tmp_path / "job.sbatch"
    start = golden.index("\nnode=(")
    line = golden[start + 1 : golden.index("\n", start + 1)]
    word = next(word for word in line.split(" '") if "recipe.yaml" in word)
    named = f"""{str(recipe).replace("'", "'" + '"' + "'" + '"' + "'")}'"""
    script.write_text(golden.replace(f"'{word}", f"'{named}", 1))
    assert import_files([script], ["optim.lr=1e-4"]).recipe == {
        "model": {"preset": "llama-tiny"}, "cluster": {"nodes": 3}, "optim": {"lr": 1e-4},
    }  # fmt: skip


def test_a_script_whose_recipe_is_elsewhere_says_which_file_it_is() -> None:
    path = GOLDEN / "slurm" / "llama2-7b-p5.48xlarge-2.sbatch"
    with pytest.raises(RequestError, match=r"names it without holding it: .*recipe.yaml"):
        import_files([path])


def test_objects_of_others_hold_no_recipe_of_ours() -> None:
    assert (
        shardyard_manifest.recipe_in({"kind": "ConfigMap", "data": {"recipe.yaml": "a: 1"}}) is None
    )
    assert shardyard_manifest.recipe_of_calls([{"params": {}}, 3]) is None

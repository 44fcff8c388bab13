"""A model folder is inspected before a plan, a launch or a training, whatever asks for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardyard.config.inspection import inspect_folder, tokenizer_notes
from shardyard.config.model.source import read_shape
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.control.request import Request
from shardyard.errors import RecipeError, RequestError
from shardyard.families.presets import PRESETS
from tests.config.test_weight_files import POINTER
from tests.families.random_models import theirs
from tests.hub import saved_llama


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved_llama(tmp_path / "llama")


def inspect(folder: Path, *, has_weights: bool = True, **data: Any) -> None:
    recipe = Recipe.model_validate({"model": {"path": str(folder)}, "data": data})
    shape = read_shape(recipe.model, folder, 0)
    inspect_folder(recipe, folder, shape, has_weights=has_weights)


VERBS: dict[str, dict[str, Any]] = {
    "train": {},
    "plan": {"to_train": False, "needs_weights": False, "only_looks": True},
    "launch": {"needs_weights": False, "only_looks": True},
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("named", [(), ("model.preset=llama-tiny",)])
def test_every_verb_rejects_a_folder_without_its_head(
    verb: str, named: tuple[str, ...], llama: Path
) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, llama / "model.safetensors")
    with pytest.raises(RecipeError, match=r"model\.path: .* lacks 1 of the 21 .*lm_head\.weight"):
        Request.read([f"model.path={llama}", *named], **VERBS[verb])


def test_all_that_is_wrong_with_a_folder_is_told_together(llama: Path) -> None:
    (llama / "tokenizer.json").write_text(POINTER)
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(RecipeError, match="2 problems") as refused:
        inspect(llama)
    assert "tokenizer.json is a Git LFS pointer" in str(refused.value)
    assert "model.safetensors is a broken symbolic link to ../blobs/gone" in str(refused.value)


def test_a_config_that_is_a_pointer_is_named(llama: Path) -> None:
    (llama / "config.json").write_text(POINTER)
    with pytest.raises(RequestError, match=r"config\.json is a Git LFS pointer"):
        inspect(llama)


def test_weights_need_the_tokenizer_that_they_were_trained_with(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"no tokenizer\.json.*set data\.tokenizer=train"):
        inspect(llama)
    inspect(llama, tokenizer="train")
    inspect(llama, tokenizer="acme/other")
    recipe = Recipe.model_validate({"model": {"path": str(llama)}, "data": {"tokenizer": "train"}})
    assert "learnt with other tokens" in " ".join(tokenizer_notes(recipe, llama))
    (llama / "tokenizer.model").write_text("")
    with pytest.raises(RecipeError, match=r"only tokenizer\.model, the older form"):
        inspect(llama)


def test_random_weights_need_neither(llama: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (llama / name).unlink()
    recipe = Recipe(model=Model(path=str(llama), weights="random"))
    assert inspect_folder(recipe, llama, None) is None


def test_an_index_without_its_files_is_no_problem_before_the_hub_is_asked_for_them(
    llama: Path,
) -> None:
    names = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    inspect(llama, has_weights=False)
    with pytest.raises(RecipeError, match=r"00001\.safetensors is missing"):
        inspect(llama)


def test_another_head_than_the_table_unties_the_request(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    request = Request.read([f"model.path={llama}"])
    assert request.shape is not None and not request.shape.tie_word_embeddings
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"] = np.copy(weights["model.embed_tokens.weight"])
    save_file(weights, llama / "model.safetensors")
    request = Request.read([f"model.path={llama}"])
    assert request.shape is not None and request.shape.tie_word_embeddings


def test_adapters_leave_no_pooler_random(tmp_path: Path) -> None:
    shape = replace(PRESETS["bert-tiny"].shape, vocab_size=300)
    folder = tmp_path / "bert"
    theirs(shape).save_pretrained(folder)  # of hidden tokens: without a pooler
    labelled = replace(shape, label_head="samples", num_labels=2, tie_word_embeddings=False)

    def inspect_with(**lora: Any) -> None:
        model = {"path": str(folder), "lora": lora}
        data = {"tokenizer": "train", "tokenizer_kind": "wordpiece"}
        task = {"name": "sequence_classification"}
        recipe = Recipe.model_validate({"model": model, "data": data, "task": task})
        inspect_folder(recipe, folder, labelled)

    inspect_with()
    inspect_with(rank=4, modules_to_save=["pooler"])
    with pytest.raises(RecipeError, match=r"no bert\.pooler\.dense.*save=\[classifier, pooler\]"):
        inspect_with(rank=4, modules_to_save=["classifier"])

"""run.from and model.path of a run or an adapter: what is understood, and each rejection."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from shardyard.config.adapter_files import PREFIX, WEIGHTS, adapter_errors, adapter_shapes_of
from shardyard.config.load import dump_recipe, load_recipe
from shardyard.config.resolve import check_resume
from shardyard.config.schema.recipe import Lora
from shardyard.control.continue_from import start_overrides
from shardyard.control.request import Request
from shardyard.errors import RecipeError, RequestError
from shardyard.families.presets import PRESETS
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from tests.distributed.runs import Corpus, make_run
from tests.hub import saved_llama

MODEL = {"preset": "llama-tiny"}


@pytest.fixture
def runs(corpus: Corpus, tmp_path: Path) -> Path:
    """A folder with the run `src`, which has checkpoints of steps 1 and 2, as names go."""
    run_dir = make_run(tmp_path / "src", corpus, {"model": MODEL})
    for step in (1, 2):
        folder = run_dir.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    return tmp_path


def _rejected(runs: Path, *words: str, **model: Any) -> str:
    with pytest.raises(RequestError) as caught:
        start_overrides([{"model": model or MODEL}], [f"run.dir={runs}", *words])
    return str(caught.value)


def test_a_start_that_is_none_is_rejected_with_the_line_to_write(runs: Path) -> None:
    handle = runs / "src"
    assert "Write run.from=RUN" in _rejected(runs, "run.from=@2")
    assert "say where the runs are with run.dir." in _rejected(runs, "run.from=none")
    assert f"Write run.from={handle}@STEP" in _rejected(runs, "run.from=src@last")
    missing = _rejected(runs, "run.from=src@7")
    assert f"has those of steps 1, 2. Write run.from={handle}@2." in missing
    for step in (1, 2):
        (RunDir(handle).checkpoint(step) / "manifest.json").unlink()
    for words in (("run.from=src",), (f"model.path={handle}",)):
        assert f"`shardyard fetch {handle}`" in _rejected(runs, *words)


def test_other_weights_next_to_it_are_rejected(runs: Path) -> None:
    assert "model.hub=a/b asks for others" in _rejected(runs, "run.from=src", hub="a/b")
    random = _rejected(runs, "run.from=src", preset="llama-tiny", weights="random")
    assert "model.weights=random asks for others. Leave it out" in random
    both = _rejected(runs, "run.from=src", path="/elsewhere", module="a:b")
    assert "model.path=/elsewhere and model.module=a:b asks for others. Leave them out" in both


def test_a_rejected_resume_prints_the_line_that_starts_a_run(
    corpus: Corpus, tmp_path: Path
) -> None:
    before = read_resolved(make_run(tmp_path / "a", corpus, {"model": MODEL}).resolved(0))
    changed = {"model": MODEL, "optim": {"lr": 0.5}, "data": {"seq_len": 16}}
    now = read_resolved(make_run(tmp_path / "b", corpus, changed).resolved(0))
    with pytest.raises(RecipeError) as caught:
        check_resume(before, now, run="src")
    line = "`shardyard train RECIPE run.from=src data.seq_len=16 optim.lr=0.5`"
    assert line in str(caught.value)


def test_the_setting_is_kept_in_files_of_a_run() -> None:
    recipe = load_recipe([{"model": MODEL, "run": {"from": "src@2"}}])
    assert recipe.run.from_ == "src@2" and "  from: src@2\n" in dump_recipe(recipe)
    assert load_recipe([recipe]).run.from_ == "src@2"


def test_a_model_path_that_is_no_model_is_rejected_with_the_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").touch()
    (checkpoint / "manifest.json").touch()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    wanted = {
        run: f"run.from={run}.",
        checkpoint: f"run.from={run}@10.",
        adapter: "Give its base in model.path, and the adapter in model.lora.path",
    }
    for folder, line in wanted.items():  # as node 0 of a launch sees it
        recipe = load_recipe([{"model": {"path": str(folder)}}])
        with pytest.raises(RequestError, match=re.escape(line)):
            Request.of(recipe)


def _adapter(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {
        "peft_type": "LORA", "base_model_name_or_path": "acme/llama", "revision": "abc", "r": 4,
        "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(content | changed))
    return folder


def test_an_adapter_of_the_hub_brings_its_base_and_settings(tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter", use_rslora=True)
    found = start_overrides([{"model": {"path": str(folder)}}], [])
    recipe = load_recipe([{"model": {"path": str(folder)}}], found)
    assert (recipe.model.path, recipe.model.hub, recipe.model.revision) == (
        None, "acme/llama", "abc",
    )  # fmt: skip
    wanted = Lora(rank=4, alpha=8.0, targets=("q_proj",), rslora=True, path=str(folder))
    assert recipe.model.lora == wanted


def test_an_adapter_with_tokens_of_its_own_brings_its_tokenizer(tmp_path: Path) -> None:
    base = saved_llama(tmp_path / "base")
    saved = ["lm_head", "model.embed_tokens"]
    folder = _adapter(
        tmp_path / "adapter", base_model_name_or_path=str(base), modules_to_save=saved
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(folder)
    recipe: dict[str, Any] = {"model": {"path": str(folder)}}
    own = load_recipe([recipe], start_overrides([recipe], []))
    assert own.data.tokenizer == "auto" and list(own.model.lora.modules_to_save) == saved
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    assert f"data.tokenizer={folder}" in start_overrides([recipe], [])
    named = {**recipe, "data": {"tokenizer": str(base)}}
    assert not any("tokenizer" in each for each in start_overrides([named], []))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; LORA is. Merge it"),
        ({"use_dora": True, "bias": "all"}, "use_dora=True, bias='all': not supported. Merge"),
        ({"target_modules": "all-linear"}, "as a list of names"),
        ({"base_model_name_or_path": None}, "model.path=BASE model.lora.path="),
        ({"base_model_name_or_path": "/nowhere"}, "which does not exist here. Give the folder"),
    ],
)
def test_an_adapter_that_cannot_be_continued(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    folder = _adapter(tmp_path / "adapter", **changed)
    assert words in _rejected(tmp_path, path=str(folder))


def test_an_adapter_of_another_rank_or_base(tmp_path: Path) -> None:
    folder = _adapter(tmp_path / "adapter")
    assert "model.lora.rank=4, and the recipe has model.lora.rank=2. Leave that" in _rejected(
        tmp_path, path=str(folder), lora={"rank": 2}
    )
    assert "model.hub=a/b names another model" in _rejected(tmp_path, path=str(folder), hub="a/b")


def test_tensors_of_an_adapter_are_compared_by_name_and_shape(tmp_path: Path) -> None:
    shape, folder = PRESETS["llama-tiny"].shape, tmp_path
    lora = Lora(rank=4, targets=("q_proj",), path=str(folder))
    assert "holds no adapter_model.safetensors" in adapter_errors(shape, lora)[0]
    tensors = {
        f"{PREFIX}{name}": torch.zeros(size)
        for name, size in adapter_shapes_of(shape, lora).items()
    }
    save_file(tensors, folder / WEIGHTS)
    assert adapter_errors(shape, lora) == []
    other = adapter_errors(shape, lora.model_copy(update={"rank": 2}))
    q = "model.layers.0.self_attn.q_proj.lora_A.weight"
    size = shape.hidden_size
    assert len(other) == 1 and f"{q} has [4, {size}], not [2, {size}]" in other[0]
    wider = adapter_errors(shape, lora.model_copy(update={"targets": ("q_proj", "k_proj")}))
    assert "lacks model.layers.0.self_attn.k_proj.lora_A.weight" in wider[0]
    less = adapter_errors(shape, lora.model_copy(update={"targets": ("k_proj",)}))
    assert f"has {q}" in less[0] and "model.lora.targets" in less[0]


def test_labels_of_an_adapter_are_compared_once_those_of_the_data_are_known(tmp_path: Path) -> None:
    shape = replace(PRESETS["llama-tiny"].shape, label_head="samples", num_labels=3)
    lora = Lora(rank=4, targets=("q_proj",), path=str(tmp_path))
    sizes = adapter_shapes_of(shape, lora)
    save_file({f"{PREFIX}{name}": torch.zeros(size) for name, size in sizes.items()},
              tmp_path / WEIGHTS)  # fmt: skip
    assert adapter_errors(shape, lora) == []
    other = replace(shape, num_labels=2)
    assert adapter_errors(other, lora, knows_labels=False) == []
    (found,) = adapter_errors(other, lora)
    assert "has a head over 3 labels, and the data has 2. Name those of the adapter in " in found

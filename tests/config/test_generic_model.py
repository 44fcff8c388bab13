"""Models of transformers of no family here: which take the generic path, and what they lack."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.generic_model import MODULE, generic_type
from shardyard.control.request import Request
from shardyard.errors import RecipeError, RequestError

pytestmark = pytest.mark.usefixtures("talk_on_stderr")

OLMO = {"model_type": "olmo", "architectures": ["OlmoForCausalLM"], "vocab_size": 300}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (OLMO, "olmo"),
        ({"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]}, "openai-gpt"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, None),
        ({"model_type": "olmo"}, None),
    ],
)
def test_a_causal_model_of_no_family_takes_the_generic_path(
    config: dict[str, Any], kind: str | None
) -> None:
    assert generic_type(config, "config.json") == kind


@pytest.mark.parametrize("more", [{}, {"is_encoder_decoder": True}])
def test_t5_is_refused_with_a_sentence(more: dict[str, bool]) -> None:
    with pytest.raises(RequestError) as refused:
        generic_type({**T5, **more}, "x/config.json")
    said = str(refused.value)
    assert "model_type='t5' reads one text and writes another (encoder and decoder)" in said
    assert "Use a causal model, or a script with a module of your own" in said


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(RequestError, match="quantization_config: its weights are quantised"):
        generic_type({**OLMO, "quantization_config": {"bits": 4}}, "config.json")


GIVEN: dict[str, dict[str, Any]] = {
    "data": {"seq_len": 32, "source": "."},
    "optim": {"lr": 1e-3, "global_batch": 4, "micro_batch": 1},
    "run": {"steps": 1},
    "cluster": {"device": "cpu", "devices": 2},
    "task": {"generate_tokens": 0},
}


def request_of(folder: Path, **sections: dict[str, Any]) -> Request:
    (folder / "config.json").write_text(json.dumps(OLMO))
    model = {"path": str(folder), "weights": "random", **sections.pop("model", {})}
    asked = {name: {**GIVEN.get(name, {}), **more} for name, more in sections.items()}
    return Request.read([{"model": model, **GIVEN, **asked}], needs_weights=False)


def test_its_recipe_is_that_of_a_module_of_ours_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_of(tmp_path)
    assert request.recipe.model.module == MODULE
    assert request.shape is None
    assert "module" not in request.as_written.model.model_fields_set
    told = capsys.readouterr().err
    assert "is a model of type olmo, which is of no family here: it trains on data axes" in told
    with pytest.raises(RequestError, match=r"there is no plan: .* without cp, tp, pp and ep"):
        _ = request.known_shape


REFUSED = [
    ({"parallel": {"tp": 2}}, "parallel.tp=2: in a model of type olmo how its matrices may be"),
    ({"parallel": {"pp": 2}}, "parallel.pp=2: in a model of type olmo where it can be cut"),
    ({"parallel": {"cp": 2}}, "parallel.cp=2: in a model of type olmo attention would have to"),
    ({"optim": {"lr": "auto"}}, "optim.lr=auto follows a model's sizes, and those of a model of t"),
    ({"memory": {"offload": "activations"}}, "memory.offload=activations moves what known blocks"),
    ({"model": {"lora": {"rank": 4}}}, "model.lora.rank=4 puts adapters beside known matrices"),
    ({"model": {"compile": True}}, "model.compile=true was not tried"),
    ({"model": {"dropout": 0.1}}, "model.dropout=0.1 is put behind known parts of a block"),
    ({"task": {"generate_tokens": 4}}, "task.generate_tokens=4 needs logits"),
]


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_what_needs_to_know_its_inside_is_refused(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        request_of(tmp_path, **sections)
    assert words in str(refused.value)


APART = [{"attend_across_documents": False}, {"pack": "whole"}]


@pytest.mark.parametrize("data", APART)
def test_only_a_type_that_mixes_documents_is_refused_where_they_are_to_be_apart(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert request_of(tmp_path, data=data).recipe.model.module == MODULE
    monkeypatch.setitem(OLMO, "model_type", "mamba")
    with pytest.raises(RecipeError) as refused:
        request_of(tmp_path, data=data)
    said = str(refused.value)
    other = "data.pack=stream" if "pack" in data else "data.attend_across_documents=true"
    assert "a model of type mamba is not known to keep them apart" in said
    assert f"Set {other}, or use a model of another type, such as gemma" in said


def test_recompute_of_its_blocks_is_not(tmp_path: Path) -> None:
    request = request_of(tmp_path, memory={"recompute": "full"}, parallel={"zero": 3})
    assert request.recipe.memory.recompute == "full"

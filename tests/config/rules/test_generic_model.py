"""Models of transformers of no family here: which take the generic path, and what they lack."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.rules.custom_module import MODULE, generic_type
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
    assert generic_type(config, "config.json", task="causal_lm") == kind


ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 300,
    "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 514, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "task", "kind"),
    [
        (ROBERTA, "masked_lm", "roberta"),
        (ROBERTA, "sequence_classification", "roberta"),
        (ROBERTA, "token_classification", "roberta"),
        (OLMO, "sequence_classification", "olmo"),
        (ROBERTA, "causal_lm", None),
        ({**ROBERTA, "model_type": "bert"}, "masked_lm", None),
        ({"model_type": "swin", "architectures": ["SwinModel"]}, "image_classification", None),
    ],
)
def test_a_task_whose_head_transformers_has_takes_the_generic_path(
    config: dict[str, Any], task: str, kind: str | None
) -> None:
    assert generic_type(config, "config.json", task=task) == kind


def test_positions_behind_the_padding_token_leave_two_rows_out(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "task": {"name": "masked_lm"}, "optim": {"lr": 1e-3}, "data": {"source": "."},
    }  # fmt: skip
    request = request_of(tmp_path, ROBERTA, **sections, data_seq_len="auto")
    assert request.preview().recipe.data.seq_len == 512
    with pytest.raises(RecipeError, match=r"data.seq_len=514 is more than .* Use at most 512\."):
        request_of(tmp_path, ROBERTA, **sections, data_seq_len=514)


def test_a_task_that_only_families_learn_is_rejected(tmp_path: Path) -> None:
    task = {"name": "preference", "generate_tokens": 0}
    with pytest.raises(RecipeError) as refused:
        request_of(tmp_path, task=task, data={"format": "preference_pairs"})
    said = str(refused.value)
    assert "task.name=preference is learnt by models of known families only" in said
    assert "or task.name=causal_lm or masked_lm or sequence_classification" in said


@pytest.mark.parametrize("more", [{}, {"is_encoder_decoder": True}])
def test_t5_is_refused_with_a_sentence(more: dict[str, bool]) -> None:
    with pytest.raises(RequestError) as refused:
        generic_type({**T5, **more}, "x/config.json", task="causal_lm")
    said = str(refused.value)
    assert "model_type='t5' reads one text and writes another (encoder and decoder)" in said
    assert "Use a causal model, or a script with a module of your own" in said


def test_quantised_weights_are_refused() -> None:
    with pytest.raises(RequestError, match="quantization_config: its weights are quantised"):
        generic_type({**OLMO, "quantization_config": {"bits": 4}}, "x", task="causal_lm")


GIVEN: dict[str, dict[str, Any]] = {
    "data": {"seq_len": 32, "source": "."},
    "optim": {"lr": 1e-3, "global_batch": 4, "micro_batch": 1},
    "run": {"steps": 1},
    "cluster": {"device": "cpu", "devices": 2},
    "task": {"generate_tokens": 0},
}


def request_of(
    folder: Path, config: dict[str, Any] = OLMO, data_seq_len: int | str = 32, **sections: Any
) -> Request:
    (folder / "config.json").write_text(json.dumps(config))
    sections = {**sections, "data": {"seq_len": data_seq_len, **sections.get("data", {})}}
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
    assert (
        "is a model of type olmo, which is of no family here: it trains only on data axes" in told
    )
    with pytest.raises(RequestError, match=r"no plan is possible: .* without cp, tp, pp and ep"):
        _ = request.required_shape


REFUSED = [
    ({"parallel": {"tp": 2}}, "parallel.tp=2: in a model of type olmo how its matrices may be"),
    ({"parallel": {"pp": 2}}, "parallel.pp=2: in a model of type olmo where it can be cut"),
    ({"parallel": {"cp": 2}}, "parallel.cp=2: in a model of type olmo attention would have to"),
    ({"optim": {"lr": "auto"}}, "optim.lr=auto follows a model's sizes, and those of a model of t"),
    ({"memory": {"offload": "activations"}}, "memory.offload=activations moves what known blocks"),
    ({"model": {"lora": {"rank": 4}}}, "model.lora.rank=4 adds adapters to known matrices"),
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


SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2},
    "gemma": {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 8192},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_positions": 512},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2},
    "mpt": {"d_model": 64, "n_layers": 2, "max_seq_len": 512},
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048},
    "phi": {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048},
}
SEQ_LEN = {"bloom": 2048, "falcon": 2048, "gemma": 4096, "gptj": 512, "mpt": 512}
FOUND = ["data.seq_len=auto", "optim.lr=auto", "optim.global_batch=auto"]


def open_request(folder: Path, kind: str, weights: str) -> Request:
    """Settings are all left to auto."""
    config = {"model_type": kind, "architectures": ["XForCausalLM"], "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps({**config, **SIZES.get(kind, {})}))
    path = {"path": str(folder), "weights": weights}
    return Request.read([{"model": path, "cluster": GIVEN["cluster"]}], needs_weights=False)


@pytest.mark.parametrize("kind", SIZES)
def test_auto_follows_the_sizes_of_its_config(tmp_path: Path, kind: str) -> None:
    request = open_request(tmp_path, kind, "random")
    preview = request.preview()
    assert preview.recipe.optim.lr == 1.6e-3  # Kaplan et al.: 0.003239 - 0.0001395 ln(98,304)
    assert preview.recipe.data.seq_len == SEQ_LEN.get(kind, 2048)
    assert preview.recipe.optim.global_batch == 2**14 // SEQ_LEN.get(kind, 2048)
    assert preview.recipe.optim.micro_batch == max(1, 4096 // SEQ_LEN.get(kind, 2048))
    with pytest.raises(RequestError, match=r"It would train with:(?s:.*)optim.lr=0.0016 \(by mode"):
        _ = request.required_shape


def test_loaded_weights_learn_at_the_rate_of_fine_tuning(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    recipe = request_of(tmp_path, optim={"lr": 1.0}).recipe
    request = Request(
        recipe=recipe.model_copy(
            update={
                "model": recipe.model.model_copy(update={"weights": "load"}),
                "optim": recipe.optim.model_copy(update={"lr": "auto"}),
            }
        ),
        as_written=recipe, name="x", model_dir=tmp_path, shape=None, no_shape_reason="",
    )  # fmt: skip
    assert request.preview().recipe.optim.lr == 2e-5


def test_a_config_that_lacks_sizes_asks_for_the_settings(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        open_request(tmp_path, "openai-gpt", "random")
    assert [words for words in FOUND if words in str(refused.value)] == FOUND


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

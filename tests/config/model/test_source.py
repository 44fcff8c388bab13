"""The model's shape from a preset or a folder; what cannot be trained faithfully is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.auto import ResolveContext
from shardyard.config.model.source import (
    config_notes,
    has_tokenizer,
    head_notes,
    model_folder,
    read_shape,
    stated_shape,
    table_rows,
)
from shardyard.config.resolve import resolve_partial
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.errors import RequestError
from shardyard.families.config_json import shape_of_config
from shardyard.families.presets import PRESETS
from shardyard.families.registry import FAMILIES
from shardyard.families.shape import ModelShape
from shardyard.models.build import hf_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


BERT = {"model_type": "bert"}
GPT2 = {"model_type": "gpt2", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
QWEN3_MOE = {"model_type": "qwen3_moe", "norm_topk_prob": True}


def folder_with(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def refusal(folder: Path, **changes: Any) -> str:
    model = Model(path=str(folder_with(folder, **changes)), weights="random")
    with pytest.raises(RequestError) as refused:
        read_shape(model, folder, vocab_size=0)
    return str(refused.value)


def test_a_preset_with_an_open_vocabulary_takes_the_tokenizers() -> None:
    assert read_shape(Model(preset="llama-tiny"), None, vocab_size=777).vocab_size == 777
    assert read_shape(Model(preset="llama2-7b"), None, vocab_size=777).vocab_size == 32000


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_a_config_is_read_in_its_older_and_its_newer_form(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    shape = read_shape(Model(path="x"), folder_with(tmp_path, **rope), vocab_size=0)
    assert shape.rope_theta == 5e5
    assert (shape.vocab_size, shape.num_key_value_heads, shape.rms_norm_eps) == (1000, 2, 1e-5)


def test_what_a_config_leaves_out_means_what_transformers_means(tmp_path: Path) -> None:
    """Checked against transformers' own config classes, in the test only."""
    from transformers import LlamaConfig

    config = {
        key: LLAMA[key] for key in LLAMA if key not in ("rms_norm_eps", "num_key_value_heads")
    }
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(Model(path="x"), tmp_path, vocab_size=0)
    theirs = LlamaConfig(**config)
    for key in ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(shape, key) == getattr(theirs, key)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]


def test_a_mistral_without_a_window_is_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, model_type="mistral", sliding_window=None)
    assert read_shape(Model(path="x"), folder, vocab_size=0).model_type == "mistral"


WINDOW = {"use_sliding_window": True, "sliding_window": 64}
FULL_THEN_SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("given", "window", "types"),
    [
        ({"model_type": "mistral"}, 4096, None),  # what transformers means where nothing is said
        ({"model_type": "mistral", "sliding_window": 64}, 64, None),
        ({"model_type": "mixtral", "sliding_window": 64}, 64, None),
        ({**QWEN3_MOE, **WINDOW}, 64, None),
        ({"model_type": "qwen2", **WINDOW}, None, None),  # from block 28 on, of two
        ({"model_type": "qwen2", **WINDOW, "max_window_layers": 0}, 64, None),
        ({"model_type": "qwen2", **WINDOW, "max_window_layers": 1}, 64, FULL_THEN_SLIDING),
        (
            {"model_type": "qwen3", **WINDOW, "layer_types": FULL_THEN_SLIDING},
            64,
            FULL_THEN_SLIDING,
        ),
        ({**QWEN3_MOE, "sliding_window": 64}, None, None),  # switched off
        ({"model_type": "llama"}, None, None),
    ],
)
def test_a_sliding_window_is_read_block_by_block(
    tmp_path: Path, given: dict[str, Any], window: int | None, types: list[str] | None
) -> None:
    shape = read_shape(Model(path="x"), folder_with(tmp_path, **given), vocab_size=0)
    assert shape.sliding_window == window
    assert shape.to_dict()["layer_types"] == types
    assert ModelShape(**json.loads(json.dumps(shape.to_dict()))) == shape
    assert [shape.has_window_below(length) for length in (64, 65)] == [False, window == 64]


def test_a_mixture_of_experts_is_read_and_its_defaults_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig

    for given in ({"model_type": "mixtral"}, {**QWEN3_MOE, "sliding_window": 64}):
        folder = folder_with(tmp_path, **given)
        shape = read_shape(Model(path="x"), folder, vocab_size=0)
        theirs = AutoConfig.from_pretrained(folder)
        assert shape.num_experts == theirs.num_experts
        assert shape.num_experts_per_tok == theirs.num_experts_per_tok
        assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
        assert shape.expert_width == getattr(theirs, "moe_intermediate_size", 128)


def test_scaled_rotary_positions_keep_their_parameters(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    shape = read_shape(Model(path=str(folder)), folder, 0)
    assert shape.rope_scaling == {"rope_type": "linear", "factor": 2.0}


GEMMA3 = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"}
REFUSED = [
    ({**BERT, "hidden_act": "relu"}, "hidden_act='relu': only gelu is built"),
    ({**BERT, "type_vocab_size": 1}, "type_vocab_size=1: only 2 kinds of tokens are built"),
    ({**BERT, "is_decoder": True}, "is_decoder=true: a BERT that sees only earlier tokens"),
    ({**BERT, "tie_word_embeddings": False}, "BERT's head is its table of tokens here"),
    ({**BERT, "position_embedding_type": "relative_key"}, "only absolute ones are built"),
    (
        {"model_type": "vit"},
        "classifies images, and the task reads text. Set task.name=image_",
    ),
    ({"model_type": "opt"}, "model_type='opt' is not built yet. Blocks are known for llama, mis"),
    ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights=false: scores that are not"),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
    ({**GPT2, "activation_function": "tanh"}, "hidden_act='tanh': only gelu_new, gelu, gelu_fast"),
    ({**GPT2, "attn_pdrop": 0.1}, "attn_pdrop=0.1: dropout of attention weights is not built"),
    (
        {**GPT2, "embd_pdrop": 0.1},
        "embd_pdrop=0.1 but resid_pdrop=0.0: Shardyard drops one share e",
    ),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1: not built"),
    ({"model_type": "mixtral", "num_local_experts": 1}, "num_experts=1 and num_experts_per_tok=2"),
    ({"model_type": "qwen3_moe"}, "norm_topk_prob=false: the weights of the visited experts are"),
    ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers=[0]: blocks without experts among"),
    ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1 is built"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic': only default, lin"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type='longrope'"),
    ({"model_type": "mistral", "sliding_window": "wide"}, "no whole number for sliding_window"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "rope_type='longrope': of Phi-3 the models of short context are built",
    ),
    ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_act='relu': only gelu_pytorch"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "only attention to earlier"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling=0: not a positive number"),
    ({**GEMMA3, "use_bidirectional_attention": True}, "only attention to earlier"),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: gemma3_text has no"),
    ({**GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters without an entry for"),
    (
        {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
        "rope_type='linear' in blocks with a window: only default is built",
    ),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "{'resid_pdrop': 0.1}: set them to 0"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is built"),
    ({"mlp_bias": True}, "mlp_bias=true"),
    ({"attention_dropout": 0.1}, "Set it to 0, or say with model.dropout what is dropped instead"),
    ({**BERT, "attention_probs_dropout_prob": 0.2}, "attention_probs_dropout_prob=0.2: dropout of"),
    (BERT, "attention_probs_dropout_prob=0.1: dropout of attention weights is not built"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['sliding_attention']"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types=['full_attention']: with sliding_window=4096 no such blocks are built",
    ),
    (
        {"model_type": "qwen2", **WINDOW, "layer_types": ["sliding_attention"]},
        "layer_types has 1 blocks, num_hidden_layers=2",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: rotary positions on a part"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: llama has no such thing"),
    ({"quantization_config": {"bits": 4}}, "training needs the full ones"),
    ({"initializer_range": 0.01}, "initializer_range=0.01: random weights are drawn with 0.02"),
    ({"hidden_size": None}, "gives no whole number for hidden_size"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_model_that_cannot_be_rebuilt_faithfully_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(tmp_path, **changes)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"config.json does not exist. A Hugging Face folder"):
        read_shape(Model(path="x"), tmp_path, vocab_size=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RequestError, match="is not JSON"):
        read_shape(Model(path="x"), tmp_path, vocab_size=0)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"does not exist. Give a Hugging Face folder"):
        model_folder(Model(path=str(tmp_path / "nothing")))


def test_weights_to_be_loaded_must_be_safetensors(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(RequestError, match=r"only pytorch_model.bin, and opening a pickle runs"):
        model_folder(Model(path=str(tmp_path)))
    assert model_folder(Model(path=str(tmp_path), weights="random")) == tmp_path.resolve()
    assert model_folder(Model(path=str(tmp_path)), needs_weights=False) == tmp_path.resolve()


def test_an_impossible_hub_name_is_refused() -> None:
    with pytest.raises(RequestError, match=r"model.hub=a b c is not a name of a repository"):
        model_folder(Model(hub="a b c"))


def test_a_tokenizer_is_seen_by_its_file(tmp_path: Path) -> None:
    assert not has_tokenizer(None)
    assert not has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert has_tokenizer(tmp_path)


def test_the_dropout_of_a_bert_is_taken_unless_the_recipe_says_another(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, **BERT, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.0
    )
    asked = {"model": {"path": str(folder), "weights": "random"}}
    found = {}
    for dropout in ("auto", 0.0):
        recipe = Recipe.model_validate({"model": {**asked["model"], "dropout": dropout}})
        shape = read_shape(recipe.model, folder, 0)
        found[dropout] = resolve_partial(recipe, ResolveContext(shape=shape))
    assert found["auto"].recipe.model.dropout == 0.25
    assert found["auto"].reasons["model.dropout"] == (
        "hidden_dropout_prob of the model's config.json"
    )
    assert found[0.0].recipe.model.dropout == 0.0
    assert hf_config(shape).hidden_dropout_prob == 0.0  # ours is the hooks of models/random.py


def test_attention_that_drops_is_taken_where_the_recipe_says_what_is_dropped_instead(
    tmp_path: Path,
) -> None:
    model = Model(path=str(folder_with(tmp_path, **BERT)), dropout=0.1, weights="random")
    assert read_shape(model, tmp_path, 0).hidden_dropout == 0.1


def test_the_weight_of_another_balance_loss_is_told_and_not_taken(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = folder_with(tmp_path, model_type="mixtral", router_aux_loss_coef=0.02, **sizes)
    (note,) = config_notes(Model(path=str(folder)), folder)
    assert "config.json has router_aux_loss_coef=0.02, which weighs another loss" in note
    assert "model.router_aux_loss=0.01 is; give it in the recipe to choose" in note
    assert config_notes(Model(path=str(folder), router_aux_loss=0.01), folder) == []
    assert config_notes(Model(preset="llama-tiny"), None) == []
    dense = folder_with(tmp_path, router_aux_loss_coef=0.02)
    assert config_notes(Model(path=str(dense)), dense) == []


def test_a_folder_without_a_head_for_pairs_is_told_to_begin_with_a_random_one(
    tmp_path: Path,
) -> None:
    def notes(architecture: str, **sections: dict[str, str]) -> list[str]:
        folder = folder_with(tmp_path, **BERT, architectures=[architecture])
        given: dict[str, dict[str, str]] = {
            "model": {"path": str(folder)}, "data": {"source": "x"},
            "task": {"name": "bert_pretraining"}, **sections,
        }  # fmt: skip
        return head_notes(Recipe.model_validate(given), folder)

    (note,) = notes("BertForMaskedLM")
    assert "is of BertForMaskedLM: what judges pairs in task.name=bert_pretraining is not" in note
    assert notes("BertForPreTraining") == []
    assert notes("BertForMaskedLM", task={"name": "masked_lm"}) == []
    assert notes("BertForMaskedLM", model={"path": str(tmp_path), "weights": "random"}) == []


# What a config says that changes nothing of what is trained here, and why.
WITHOUT_EFFECT = {
    # about files, versions, memory and the form of answers
    "transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "pretraining_tp",
    # about other heads and tasks
    "id2label", "label2id", "problem_type", "is_encoder_decoder", "classifier_dropout",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
    # of GPT-2, and changes the order of the same operations
    "reorder_and_upcast_attn",
    # about text; the row of a padding token learns here too, as no sample is padded with it
    "pad_token_id", "bos_token_id", "eos_token_id",
    # told by config_notes: model.router_aux_loss weighs another loss
    "output_router_logits", "router_aux_loss_coef",
    # transformers computes it from sliding_window_pattern, which is read
    "_sliding_window_pattern",
    # read with a window alone, and written as layer_types
    "max_window_layers", "use_sliding_window",
    # of GPT-NeoX, where it changes nothing; of BERT it is refused
    "is_decoder",
    # of longrope, which is refused
    "original_max_position_embeddings",
    # of random weights; refused for them
    "initializer_range",
}  # fmt: skip

OTHER_VALUES: dict[str, Any] = {
    "hidden_act": "relu", "activation_function": "relu", "hidden_activation": "relu",
    "num_key_value_heads": 1, "num_attention_heads": 8, "head_dim": 48,
    "layer_types": ["sliding_attention"] * 2, "mlp_only_layers": [1], "sliding_window": 64,
    "final_logit_softcapping": 20.0, "num_experts_per_tok": 1, "num_local_experts": 4,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_a_config_is_honoured_or_refused(model_type: str) -> None:
    """Against the config classes of transformers: a key that they gain is noticed here."""
    from transformers import AutoConfig

    keys = AutoConfig.for_model(model_type).to_dict().keys() - WITHOUT_EFFECT
    base = {**LLAMA, "norm_topk_prob": True, "sliding_window": None, "hidden_dropout_prob": 0.0}
    base |= {"attention_probs_dropout_prob": 0.0, "model_type": model_type}
    base |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    base["max_window_layers"] = 0  # all blocks
    theirs = AutoConfig.for_model(**base).to_dict()
    for key in keys - {"model_type"}:
        value = OTHER_VALUES[key] if key in OTHER_VALUES else _another(theirs[key])
        changed = {**base, "use_sliding_window": True, key: value}
        try:
            shape = shape_of_config(changed, "config.json", is_random=False)
        except RequestError:
            continue
        if key in ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop"):
            assert shape.hidden_dropout == value
            continue
        ours = hf_config(shape).to_dict()
        expected = {**theirs[key], **value} if isinstance(value, dict) else value
        assert ours[key] == expected, f"{model_type}: {key}={value!r} would be dropped in silence"


def _another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    assert isinstance(value, int | float), value
    return value * 2 if value else 0.125


# config.json of meta-llama/Llama-2-7b-hf as published on the hub
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


def test_the_preset_of_llama_2_agrees_with_its_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    shape = read_shape(Model(preset="llama2-7b", path=str(tmp_path)), tmp_path, 4096)
    assert shape == PRESETS["llama2-7b"].shape


def test_a_folder_that_is_not_of_the_preset_is_refused_field_by_field(tmp_path: Path) -> None:
    changed = {**LLAMA_2_7B, "num_hidden_layers": 30, "vocab_size": 32001}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(RequestError) as refused:
        read_shape(Model(preset="llama2-7b", hub="owner/name"), tmp_path, 4096)
    said = str(refused.value)
    assert "is not what model.preset=llama2-7b says of the model" in said
    assert "vocab_size=32001, not 32000; num_hidden_layers=30, not 32" in said
    assert "leave it out" in said


def test_a_folder_that_is_not_what_model_config_says_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    same = Model(path=str(folder), config=dict(LLAMA))
    assert read_shape(same, folder, 0) == read_shape(Model(path=str(folder)), folder, 0)
    other = Model(path=str(folder), config={**LLAMA, "num_key_value_heads": 4})
    with pytest.raises(RequestError, match="num_key_value_heads=2, not 4"):
        read_shape(other, folder, 0)


def test_a_preset_with_an_open_vocabulary_takes_the_folders(tmp_path: Path) -> None:
    tiny = PRESETS["llama-tiny"].shape.to_dict()
    folder = folder_with(tmp_path, **{**tiny, "vocab_size": 777, "rope_scaling": None})
    shape = read_shape(Model(preset="llama-tiny", path=str(folder)), folder, 4096)
    assert shape.vocab_size == 777
    assert table_rows(Model(preset="llama-tiny", path=str(folder)), shape) == 777


@pytest.mark.parametrize("text", ["", "[1]", '{"model_type": "gpt_neox"}'])
def test_a_model_config_that_says_no_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(RequestError, match=r"model\.config|c\.json"):
        stated_shape(Model(hub="a/b", config=str(tmp_path / "c.json")), 0)

"""The model's shape from a preset or a folder; what cannot be trained faithfully is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.model_source import has_tokenizer, model_folder, read_shape
from shardyard.config.schema import Model
from shardyard.errors import RequestError

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


REFUSED = [
    ({**BERT, "hidden_act": "relu"}, "hidden_act='relu': only gelu is built"),
    ({**BERT, "type_vocab_size": 1}, "type_vocab_size=1: only 2 kinds of tokens are built"),
    ({**BERT, "is_decoder": True}, "is_decoder=true: a BERT that sees earlier tokens alone"),
    ({**BERT, "tie_word_embeddings": False}, "BERT's head is its table of tokens here"),
    ({**BERT, "position_embedding_type": "relative_key"}, "only absolute ones are built"),
    ({"model_type": "gpt2"}, "model_type='gpt2' is not built yet. Blocks are known for llama, mis"),
    ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window=4096: attention sees the"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1: not built"),
    ({"model_type": "mixtral", "num_local_experts": 1}, "num_experts=1 and num_experts_per_tok=2"),
    ({"model_type": "qwen3_moe"}, "norm_topk_prob=false: the weights of the visited experts are"),
    ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers=[0]: blocks without experts among"),
    ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1 is built"),
    ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic': only default, lin"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type='longrope'"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096: attention sees the"),
    ({"model_type": "mistral"}, "sliding_window=4096"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is built"),
    ({"mlp_bias": True}, "mlp_bias=true"),
    ({"attention_dropout": 0.1}, "set it to 0 and use model.dropout"),
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
    with pytest.raises(RequestError, match=r"model.hub=a b c: the Hugging Face hub has no such"):
        model_folder(Model(hub="a b c"))


def test_a_tokenizer_is_seen_by_its_file(tmp_path: Path) -> None:
    assert not has_tokenizer(None)
    assert not has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert has_tokenizer(tmp_path)

"""Models from a shape: the same function as transformers' own, the same weights in any slice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardyard.config.model.source import read_shape
from shardyard.config.schema.recipe import Model
from shardyard.errors import DataError
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape
from shardyard.models.attention import sample_attention
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from shardyard.models.forward import ForwardPass
from shardyard.models.local_shard import LocalShard
from shardyard.models.random import SampleKeys, key_of, normal
from shardyard.train.state import memory_by_kind

TINY = replace(PRESETS["llama-tiny"].shape, vocab_size=300)


def _model(shape: ModelShape, *, seed: int = 0, folder: Path | None = None) -> LlamaForCausalLM:
    model = build_on_meta(shape)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=folder, seed=seed)
    return model.eval()


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(24).expand(2, -1)


def test_parameters_on_the_host_leave_the_buffers_on_the_device() -> None:
    model = build_on_meta(TINY)
    materialize(model, torch.device("meta"), on_host=True)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert {each.device.type for each in model.buffers()} == {"meta"}
    tensors = {f"model.{name}": each for name, each in model.named_parameters()}
    assert memory_by_kind(tensors, torch.device("meta"))["parameters_bytes"] == 0
    assert memory_by_kind(tensors, torch.device("cpu"))["parameters_bytes"] > 0


LLAMA_3_1 = {
    # config.json of meta-llama/Llama-3.1-8B, but for the context, so that the scaling shows here
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.heavy
def test_scaled_rotary_positions_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {**LLAMA_3_1, "rope_theta": 10000.0}
    sizes = {
        name: value
        for name, value in TINY.to_dict().items()
        if value is not None and not name.startswith(("rope", "model_type"))
    }
    theirs = LlamaForCausalLM._from_config(LlamaConfig(**sizes, rope_parameters=rope)).eval()
    theirs.save_pretrained(tmp_path)
    shape = read_shape(Model(path=str(tmp_path)), tmp_path, 0)
    assert shape.rope_scaling == LLAMA_3_1
    tokens, positions = _tokens()
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        ours = _model(shape, folder=tmp_path)(input_ids=tokens, position_ids=positions).logits
        unscaled = replace(shape, rope_scaling=None)
        others = _model(unscaled, folder=tmp_path)(input_ids=tokens, position_ids=positions).logits
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(others, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers_own_model(tied: bool) -> None:
    shape = replace(TINY, tie_word_embeddings=tied)
    model = _model(shape)
    theirs = LlamaForCausalLM._from_config(hf_config(shape), attn_implementation="eager").eval()
    theirs.load_state_dict(model.state_dict())
    tokens, positions = _tokens()
    with torch.no_grad():
        ours = model(input_ids=tokens, position_ids=positions).logits
        torch.testing.assert_close(ours, theirs(input_ids=tokens).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_preset_has_the_parameters_that_its_source_states() -> None:
    # meta-llama/Llama-2-7b-hf: 6,738,415,616; Meta-Llama-3-8B: 8,030,261,248 (model cards)
    assert PRESETS["llama2-7b"].shape.parameters == 6_738_415_616
    assert PRESETS["llama3-8b"].shape.parameters == 8_030_261_248


@pytest.mark.parametrize("name", ["llama-tiny", "llama-laptop", "llama-1b"])
def test_a_shape_counts_the_parameters_of_its_model(name: str) -> None:
    shape = replace(PRESETS[name].shape, vocab_size=PRESETS[name].shape.vocab_size or 300)
    model = build_on_meta(shape)
    assert sum(param.numel() for param in model.parameters()) == shape.parameters


def test_weights_depend_on_seed_and_name_and_are_normal() -> None:
    first, again, other = _model(TINY), _model(TINY), _model(TINY, seed=1)
    weight = first.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, again.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(weight, other.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(weight, first.model.layers[1].mlp.up_proj.weight)
    assert abs(weight.std().item() - 0.02) < 0.001
    assert torch.equal(first.model.norm.weight, torch.ones(64))


def test_a_slice_gets_the_numbers_it_has_in_the_whole() -> None:
    key, whole = key_of(0, "x"), torch.empty(6, 4)
    everything = normal(key, LocalShard(whole, (0, 0), (6, 4)).linear_index())
    block = LocalShard(torch.empty(2, 3), (3, 1), (6, 4))
    assert torch.equal(normal(key, block.linear_index()), everything[3:5, 1:4])


def test_weights_are_loaded_from_a_hugging_face_folder(tmp_path: Path) -> None:
    theirs = LlamaForCausalLM._from_config(hf_config(TINY)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")  # several files and an index
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = _model(TINY, folder=tmp_path)
    tokens, positions = _tokens()
    with torch.no_grad():
        ours = model(input_ids=tokens, position_ids=positions).logits
        torch.testing.assert_close(ours, theirs(input_ids=tokens).logits)


def test_a_folder_without_safetensors_says_why_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(DataError, match=r"pickle files.*are not opened, as opening one runs code"):
        _model(TINY, folder=tmp_path)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in _model(TINY).state_dict().items()}
    short = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"lacks 5 of the model's .*input_layernorm"):
        _model(TINY, folder=tmp_path)
    save_file({**weights, "lm_head.weight": torch.zeros(10, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"lm_head.weight has shape \[10, 64\], .* \[300, 64\]"):
        _model(TINY, folder=tmp_path)


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match=r"safetensors is not a safetensors file.*Fetch or save"):
        _model(TINY, folder=tmp_path)


def test_tokens_of_other_documents_do_not_matter_when_masked() -> None:
    model = _model(TINY)
    run = ForwardPass(
        model,
        family_of("llama"),
        keys=SampleKeys(),
        attention=lambda positions_BL, _: sample_attention(
            positions_BL, is_causal=True, attend_across=False
        ),
    )
    tokens, _ = _tokens()
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    samples = torch.arange(2)
    with torch.no_grad():
        whole = run(tokens, positions, samples)
        second = run(tokens[:, 10:], positions[:, 10:], samples)
        across = model(input_ids=tokens, position_ids=positions).logits
    torch.testing.assert_close(whole[:, 10:], second)
    torch.testing.assert_close(whole[:, :10], across[:, :10])
    assert not torch.allclose(whole[:, 10:], across[:, 10:])

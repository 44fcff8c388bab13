"""Memory terms against published totals, hand arithmetic and a real block's saved tensors."""

import dataclasses

import pytest
import torch

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.config.schema import Recipe
from shardyard.models.build import hf_config
from shardyard.plan.memory import (
    block_activation_bytes,
    block_parameter_shapes,
    count,
    largest_shard,
    memory_terms,
    micro_steps,
    root_parameter_shapes,
)
from tests.plan.recipes import resolved_recipe, shape_of

GIB = 2**30


def terms(recipe: Recipe, preset: str, *, is_cpu: bool = False, **degrees: int) -> dict[str, int]:
    layout = Layout(**{"dp_replicate": 1, "dp_shard": 1, "zero": 3, **degrees})
    found = memory_terms(recipe, shape_of(preset), layout, is_cpu=is_cpu)
    assert all(term.reason for term in found)
    return {term.name: term.bytes for term in found}


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        # as counted from the published weights
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_the_parameter_shapes_add_up_to_the_published_model(preset: str, parameters: int) -> None:
    shape = shape_of(preset)
    blocks = shape.num_hidden_layers * count(block_parameter_shapes(shape))
    assert blocks + count(root_parameter_shapes(shape)) == parameters


def test_zero_3_on_64_ranks_splits_16_bytes_a_parameter() -> None:
    # Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 16 bytes a parameter over 64 ranks
    found = terms(resolved_recipe(), "llama2-7b", dp_shard=64)
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    assert states == 16 * 6_738_415_616 // 64


def test_replicas_hold_everything() -> None:
    found = terms(resolved_recipe(), "llama2-7b", dp_replicate=16)
    assert found["parameters"] == 4 * 6_738_415_616
    assert found["optimizer"] == 8 * 6_738_415_616


def test_rows_that_do_not_divide_leave_the_first_rank_with_most() -> None:
    # torch.chunk's rule: 10 rows over 4 ranks are pieces of 3, 3, 3 and 1; 5 rows: 2, 2, 1, none
    assert largest_shard([(10, 7)], 4) == 21
    assert largest_shard([(5,)], 4) == 2
    assert torch.ones(10, 7).chunk(4)[0].numel() == 21


def test_the_micro_batches_of_a_rank_are_rounded_up() -> None:
    recipe = resolved_recipe(optim={"global_batch": 10, "micro_batch": 2})
    assert micro_steps(recipe, Layout(dp_replicate=1, dp_shard=3, zero=3)) == 2


@pytest.mark.parametrize(
    ("optim", "bytes_per_parameter"),
    [
        ({"name": "adamw"}, 8),
        ({"name": "sgd", "momentum": 0.9}, 4),
        ({"name": "sgd", "momentum": 0.0}, 0),
    ],
)
def test_the_optimizer_decides_its_bytes_a_parameter(
    optim: dict[str, object], bytes_per_parameter: int
) -> None:
    found = terms(resolved_recipe(optim=optim), "llama2-7b")
    assert found.get("optimizer", 0) == bytes_per_parameter * 6_738_415_616


def test_zero_1_and_2_keep_the_whole_model_in_the_compute_format() -> None:
    found = terms(resolved_recipe(), "llama2-7b", dp_shard=8, zero=2)
    assert found["gathered parameters"] == 2 * 6_738_415_616
    # zero 3: two blocks of 202,383,360 parameters and one table of 131,072,000
    found = terms(resolved_recipe(), "llama2-7b", dp_shard=8, zero=3)
    assert found["gathered parameters"] == 2 * (2 * 202_383_360 + 131_072_000)


def test_zero_1_keeps_whole_gradients_while_micro_batches_accumulate() -> None:
    found = terms(resolved_recipe(), "llama2-7b", dp_shard=8, zero=1)
    assert found["unreduced gradients"] == 4 * 6_738_415_616


def test_recompute_leaves_block_inputs_and_one_block() -> None:
    recipe = resolved_recipe(memory={"recompute": "full"})
    found = terms(recipe, "llama2-7b", dp_shard=8)
    one_block = 4096 * block_activation_bytes(shape_of("llama2-7b"), 2)
    assert found["activations"] == 32 * 4096 * 4096 * 2 + one_block


def test_less_recompute_keeps_more() -> None:
    levels: list[object] = ["full", 1, 2, 4, "none"]
    sizes = [
        terms(resolved_recipe(memory={"recompute": level}), "llama2-7b", dp_shard=8)["activations"]
        for level in levels
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1], "every block is every first block"
    selective = resolved_recipe(memory={"recompute": "selective"})
    kept = terms(selective, "llama2-7b", dp_shard=8)["activations"]
    assert sizes[0] < kept < sizes[-1]


def test_a_module_whose_saving_is_not_known_is_said_to_be_left_out() -> None:
    recipe = resolved_recipe(memory={"recompute": ["mlp"]})
    layout = Layout(dp_replicate=1, dp_shard=8, zero=3)
    found = memory_terms(recipe, shape_of("llama2-7b"), layout, is_cpu=False)
    [activations] = [term for term in found if term.name == "activations"]
    assert "what recomputing mlp saves is not predicted" in activations.reason


def test_a_cpu_process_also_holds_python_and_the_copy_that_a_checkpoint_is_written_from() -> None:
    recipe = resolved_recipe(precision={"compute": "fp32", "output": "fp32"})
    found = terms(recipe, "llama2-7b", is_cpu=True, dp_shard=2)
    assert found["checkpoint copy"] == found["parameters"] + found["optimizer"]
    assert found["process"] > 300 * 2**20
    assert "process" not in terms(recipe, "llama2-7b", dp_shard=2)


def test_the_logits_of_a_large_vocabulary_are_gigabytes() -> None:
    # 4,096 tokens x 128,256 entries: 2 bytes, and three times 4 bytes
    recipe = resolved_recipe(model={"preset": "llama3-8b"})
    found = terms(recipe, "llama3-8b", dp_shard=8)
    assert found["logits and loss"] == 4096 * 128_256 * 14
    assert found["logits and loss"] > 6 * GIB


BLOCK = ModelShape(
    model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=176,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "kv_heads"), [(torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_a_real_block_saves_as_many_bytes_as_predicted(dtype: torch.dtype, kv_heads: int) -> None:
    shape = dataclasses.replace(BLOCK, num_key_value_heads=kv_heads)
    saved = measure_saved_bytes(shape, dtype, tokens=64)
    predicted = 64 * block_activation_bytes(shape, dtype.itemsize)
    # the rotary table (64 tokens x 16 numbers, twice) and RMSNorm's reciprocals are left out
    assert predicted <= saved <= 1.12 * predicted


def measure_saved_bytes(shape: ModelShape, dtype: torch.dtype, *, tokens: int) -> int:
    """Bytes of distinct storages that autograd saves for one block, parameters aside."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = hf_config(shape)
    config._attn_implementation = "sdpa"
    block = LlamaDecoderLayer(config, layer_idx=0).to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    x_BLD = torch.randn(1, tokens, shape.hidden_size, dtype=dtype, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotary = LlamaRotaryEmbedding(config)(x_BLD, positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x_BLD, position_embeddings=rotary, attention_mask=None)
    assert out is not None
    return sum(storage.nbytes() for storage in saved.values())

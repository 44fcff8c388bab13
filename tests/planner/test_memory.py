"""Memory against published formulas and totals, a real block's saved tensors, and real steps."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import hf_config
from shardyard.planner.memory import (
    CONTEXT_BYTES,
    Fit,
    block_bytes,
    device_of,
    fit,
    memory,
    needs,
    peak,
    reserved_of,
    saved_activation_bytes,
)
from shardyard.planner.stages import block_elements, in_flight, stage_blocks
from shardyard.planner.workload import Techniques, Workload, workload_of
from tests.planner.recipes import resolved_recipe
from tests.planner.workloads import EAGER, MEGATRON_2022, OURS, ZERO_PAPER, layout, workload

GIB = 2**30
LLAMA2_7B = 6_738_415_616
"""Parameters, as counted from the published weights."""


def states(w: Workload) -> float:
    """Bytes a parameter of weights, gradients and optimizer."""
    found = memory(w)
    sizes = (found.term(name) for name in ("parameters", "gradients", "optimizer"))
    return sum(sizes) / w.shape.parameters


# --- parameters, gradients, optimizer -----------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        # as counted from the published weights
        ("llama2-7b", LLAMA2_7B),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
    ],
)
def test_one_rank_holds_the_published_model(preset: str, parameters: int) -> None:
    assert memory(workload(preset)).term("parameters") == 4 * parameters


@pytest.mark.parametrize("preset", ["gpt3-175b", "bert-large", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_count_of_every_kind_of_model_is_that_of_its_shape(preset: str) -> None:
    held = memory(workload(preset, seq_len=512)).term("parameters")
    assert held == 4 * PRESETS[preset].shape.parameters


@pytest.mark.parametrize(
    ("degrees", "gigabytes"),
    [
        # Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 7.5 B parameters, 64 ranks
        ({"dp_replicate": 64, "zero": 1}, 120.0),
        ({"dp_shard": 64, "zero": 1}, 31.4),
        ({"dp_shard": 64, "zero": 2}, 16.6),
        ({"dp_shard": 64, "zero": 3}, 1.9),
    ],
)
def test_zero_splits_states_as_its_paper_says(degrees: dict[str, Any], gigabytes: float) -> None:
    w = workload(formats=ZERO_PAPER, **degrees)
    assert 7.5 * states(w) == pytest.approx(gigabytes, abs=0.05)


def test_zero_3_on_64_ranks_splits_16_bytes_a_parameter() -> None:
    assert states(workload(dp_shard=64)) == pytest.approx(16 / 64)


@pytest.mark.parametrize(("zero", "passes"), [(1, 1), (1, 2), (2, 2), (3, 2)])
def test_fully_shard_splits_weights_and_optimizer_at_every_level(zero: int, passes: int) -> None:
    found = memory(workload(dp_shard=16, zero=zero, passes=passes))
    assert found.term("parameters") == pytest.approx(4 * LLAMA2_7B / 16)
    assert found.term("optimizer") == pytest.approx(8 * LLAMA2_7B / 16)


def test_context_ranks_split_the_optimizer_too() -> None:
    found = memory(workload(dp_shard=2, cp=2)).term("optimizer")
    assert found == memory(workload(dp_shard=4)).term("optimizer")
    assert found == pytest.approx(8 * LLAMA2_7B / 4)


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages() -> None:
    w = workload(pp=4, passes=8)
    rotary = 4096 * 4 * 128  # cosines and sines of a token, fp16 of 128 each
    one = (
        8 * 4096 * saved_activation_bytes(w)[0]
    )  # blocks of the stage x tokens x bytes kept a token
    assert memory(w).term("activations") == 4 * one + rotary
    last, flying = needs(w, 3)[1], 1
    assert last.activations == flying * one + rotary


def test_at_the_end_of_a_backward_pass_the_largest_group_is_on_its_way_and_a_bucket_too() -> None:
    w = workload(dp_shard=2, techniques=replace(EAGER, bucket_bytes=1e6))
    # bf16 gradients of a block of 202,383,360 elements, and their sum in fp32
    assert needs(w, 0)[2].unreduced == 1e6 + (2 + 4) * 202_383_360


def test_zero_1_keeps_whole_gradients_while_micro_batches_accumulate() -> None:
    found = memory(workload(dp_shard=8, zero=1))
    assert found.term("unreduced gradients") == pytest.approx(4 * LLAMA2_7B, rel=1e-5)
    assert found.term("gradients") == 0


def test_zero_1_and_2_keep_the_whole_model_in_the_compute_format() -> None:
    found = memory(workload(dp_shard=8, zero=2))
    assert found.term("gathered parameters") == pytest.approx(2 * LLAMA2_7B, rel=1e-5)


def test_tensor_and_pipeline_ranks_split_the_blocks() -> None:
    shape = PRESETS["llama2-70b"].shape
    one = block_elements(shape, layout())
    # Llama 2 70B: attention 8192 x (2 x 8192 + 2 x 1024), three MLP matrices, two norms
    assert one == 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 2 * 8192
    # each rank has the two norms whole
    assert block_elements(shape, layout(tp=8)) == (one - 2 * 8192) / 8 + 2 * 8192
    assert stage_blocks(workload("llama2-70b", pp=4), 0) == 20


def test_expert_ranks_split_experts_and_nothing_else() -> None:
    shape = PRESETS["mixtral-8x7b"].shape
    expert = 3 * 4096 * 14336
    saved = block_elements(shape, layout()) - block_elements(shape, layout(dp_shard=8, ep=8))
    assert saved == 7 * expert


@pytest.mark.parametrize(("depth", "blocks"), [(0, 2), (1, 2), (3, 4), (40, 32)])
def test_of_offloaded_activations_those_of_a_few_blocks_are_on_the_device(
    depth: int, blocks: int
) -> None:
    def activations(**techniques: Any) -> int:
        eager = Techniques(kernels="eager", loss="in place", **techniques)
        return memory(workload(techniques=eager)).term("activations")

    ends = activations() - 32 * (kept := block_bytes(workload()) * 4096)
    found = activations(offload="activations", offload_depth=depth)
    assert found - ends == pytest.approx(blocks * kept, rel=1e-3)


def test_averages_in_bf16_take_four_bytes_of_a_parameter() -> None:
    formats = dataclasses.replace(OURS, optimizer_bytes=4)
    # 4 weight + 4 gradient + 2 x 2 averages: 12 bytes of a parameter where fp32 has 16
    found = memory(workload(formats=formats, dp_shard=8))
    assert found.term("optimizer") == pytest.approx(4 * LLAMA2_7B / 8, rel=1e-4)
    assert found.term("parameters") == pytest.approx(4 * LLAMA2_7B / 8, rel=1e-4)


def test_offload_leaves_the_optimizer_on_the_host() -> None:
    on_host = memory(workload(techniques=Techniques(kernels="eager", offload="optimizer")))
    assert on_host.term("optimizer") == 0
    assert on_host.term("parameters") == 4 * LLAMA2_7B


# --- activations --------------------------------------------------------------------------------

GPT = PRESETS["gpt3-175b"].shape
S, B, H, A = 2048, 1, 12288, 96
"""Letters of Korthikanti et al. 2022, arXiv:2205.05198: sequence, micro-batch, hidden, heads."""


def korthikanti(recompute: Any = "none") -> float:
    """Activations of one block in bytes: what 48 blocks more keep."""

    def kept(blocks: int) -> int:
        shape = dataclasses.replace(GPT, num_hidden_layers=blocks)
        w = workload(shape, formats=ZERO_PAPER, techniques=MEGATRON_2022, seq_len=S,
                     micro_batch=B, recompute=recompute)  # fmt: skip
        return memory(w).term("activations")

    return (kept(96) - kept(48)) / 48


def test_a_block_keeps_what_korthikanti_et_al_count() -> None:
    # equation 1: sbh (34 + 5 a s / h)
    assert korthikanti() == pytest.approx(S * B * H * (34 + 5 * A * S / H))


def test_tensor_parallelism_splits_all_but_norms_and_dropout() -> None:
    # equation 2: sbh (10 + 24 / t + 5 a s / (h t))
    expected = S * B * H * (10 + 24 / 8 + 5 * A * S / (H * 8))
    w = workload(GPT, formats=ZERO_PAPER, techniques=MEGATRON_2022, seq_len=S, tp=8)
    assert S * B * block_bytes(w) == pytest.approx(expected)


def test_sequence_parallelism_splits_all() -> None:
    # equation 4: sbh / t (34 + 5 a s / h)
    tech = dataclasses.replace(MEGATRON_2022, sequence_parallel=True)
    w = workload(GPT, formats=ZERO_PAPER, techniques=tech, seq_len=S, tp=8)
    assert S * B * block_bytes(w) == pytest.approx(S * B * H / 8 * (34 + 5 * A * S / H))


def test_recomputed_attention_keeps_34_bytes() -> None:
    # table 2: selective recompute of the core of attention, 34 sbh (/ t with sequences split)
    assert korthikanti("attention") == pytest.approx(S * B * H * 34)


def test_full_recompute_keeps_the_inputs_of_blocks() -> None:
    # table 2: full recompute, 2 sbh a block
    assert korthikanti("full") == pytest.approx(S * B * H * 2)


def test_flash_attention_does_not_keep_scores() -> None:
    long = workload(seq_len=32768)
    assert block_bytes(long) == block_bytes(workload(seq_len=1024))
    unfused = dataclasses.replace(long, techniques=Techniques(attention="unfused"))
    assert block_bytes(unfused) > 4 * block_bytes(long)


def test_a_mask_is_kept_where_lengths_cannot_be_told() -> None:
    def kept(cp: int, **techniques: Any) -> float:
        return block_bytes(workload(seq_len=8192, cp=cp, techniques=Techniques(**techniques)))

    for cp in (1, 2):
        masked, free = kept(cp, mask=True), kept(cp)
        assert masked > free
        # told lengths it needs none, but where a sample is split it has one all the same
        assert kept(cp, mask=True, uses_varlen=True) == (free if cp == 1 else masked)


def test_less_recompute_keeps_more() -> None:
    levels: list[Any] = ["full", 1, 2, 4, "none"]
    sizes = [memory(workload(dp_shard=8, recompute=level)).allocated_bytes for level in levels]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1], "every block is every first block"
    selective = memory(workload(dp_shard=8, recompute="selective")).allocated_bytes
    assert sizes[0] < selective < sizes[-1]


def test_context_parallelism_splits_activations_and_logits() -> None:
    whole, half = (memory(workload("llama3-8b", dp_shard=8, cp=cp)) for cp in (1, 2))
    for name in ("activations", "logits and loss"):
        assert half.term(name) == pytest.approx(whole.term(name) / 2)


def test_a_doubled_micro_batch_doubles_activations() -> None:
    one, two = (memory(workload(dp_shard=8, micro_batch=n)) for n in (2, 4))
    assert (
        one.peak_phase == two.peak_phase
    )  # beside the activations, other things are held at others
    assert two.term("activations") == 2 * one.term("activations")


# --- pipeline -----------------------------------------------------------------------------------


def pipeline(stage: int, *, pp: int = 8, passes: int = 64, **techniques: Any) -> float:
    tech = dataclasses.replace(MEGATRON_2022, **techniques)
    return in_flight(workload(GPT, pp=pp, passes=passes, techniques=tech), stage)


def test_1f1b_holds_as_many_micro_batches_as_stages_follow() -> None:
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1
    assert [pipeline(stage) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert pipeline(0, passes=3) == 3


def test_gpipe_holds_all_micro_batches() -> None:
    assert pipeline(0, schedule="gpipe") == 64


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_an_interleaved_schedule_holds_more_on_the_first_stage(chunks: int) -> None:
    # Korthikanti et al. 2022, section 4.2.3: L blocks x (1 + (p - 1) / (p m)), m chunks a rank
    flying = pipeline(0, schedule="interleaved", virtual_stages=chunks)
    assert flying / 8 == pytest.approx(1 + 7 / (8 * chunks))


def test_the_stage_that_needs_most_is_named() -> None:
    first = memory(workload("llama3-70b", pp=8, tp=8, dp_shard=2, passes=16))
    assert first.stage == 0
    assert first.term("logits and loss") == 0
    # a table of 128,256 entries beside two blocks, and next to no activations in flight
    last = memory(workload("llama3-8b", pp=2, passes=4, recompute="full", seq_len=16384))
    assert last.stage == 1
    assert last.term("logits and loss") > 6 * GIB
    assert any("of stage 1" in term.reason for term in last.terms)


# --- logits -------------------------------------------------------------------------------------


def test_the_logits_of_a_large_vocabulary_are_gigabytes() -> None:
    # 4,096 tokens x 128,256 entries: bf16 logits and one fp32 copy; torch's own loss keeps three
    found = memory(workload("llama3-8b", dp_shard=8))
    assert found.term("logits and loss") == (2 + 4) * 4096 * 128_256
    assert found.peak_phase == "at the loss"
    torchs = memory(workload("llama3-8b", dp_shard=8, techniques=Techniques(kernels="eager")))
    assert torchs.term("logits and loss") == 3 * 4 * 4096 * 128_256
    known = replace(EAGER, logit_bytes=10.0)
    given = memory(workload("llama3-8b", techniques=known, dp_shard=8))
    assert given.term("logits and loss") == 10 * 4096 * 128_256


def test_a_chunked_loss_holds_a_part_of_them() -> None:
    tech = Techniques(kernels="eager", chunked_loss=True)
    found = memory(workload("llama3-8b", dp_shard=8, techniques=tech, recompute="none"))
    assert found.term("logits and loss") < GIB


IN_CHUNKS = dataclasses.replace(EAGER, loss_chunk=2048)


def test_our_own_chunks_hold_their_logits_and_the_heads_gradient() -> None:
    given: dict[str, Any] = {"seq_len": 32_768, "dp_shard": 8, "recompute": "full"}
    whole = memory(workload("llama3-8b", **given))
    found = memory(workload("llama3-8b", **given, techniques=IN_CHUNKS))
    assert found.term("logits and loss") == (2 + 4) * 2048 * 128_256
    saved = whole.term("logits and loss") - found.term("logits and loss")
    # the head's gradient in fp32, the buffer the head was gathered in, and the hidden state's
    added = (4 + 2) * 4096 * 128_256 + 2 * 32_768 * 4096
    assert whole.allocated_bytes - found.allocated_bytes == pytest.approx(saved - added, rel=1e-3)
    (reason,) = [term.reason for term in found.terms if term.name == "logits and loss"]
    assert reason == (
        "a chunk of 2,048 tokens x 128,256 entries; 23.5 GiB without memory.loss_chunk"
    )


def test_masked_language_models_score_masked_tokens_alone() -> None:
    # Devlin et al. 2019, section 3.1: 15 % of the tokens
    bert = PRESETS["bert-large"].shape
    causal = dataclasses.replace(bert, model_type="gpt2")
    masked, every = (
        memory(workload(shape, seq_len=512, micro_batch=32)).term("logits and loss")
        for shape in (bert, causal)
    )
    assert masked == pytest.approx(0.15 * every, rel=1e-3)


# --- against the real model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "given", "gib"),
    [
        # peaks of the real model on fake devices: python -m benchmarks.dry_run_memory, 2026-11-21
        ("llama2-7b", {"dp_shard": 16}, 30.80),
        ("llama2-7b", {"dp_shard": 16, "zero": 2}, 42.94),
        ("llama2-7b", {"dp_shard": 16, "zero": 1, "passes": 1}, 40.88),
        ("llama2-7b", {"dp_shard": 16, "micro_batch": 2, "recompute": "selective"}, 33.56),
        ("llama2-7b", {"dp_replicate": 4, "dp_shard": 8, "recompute": "full"}, 16.02),
        ("llama3-8b", {"dp_shard": 64, "seq_len": 8192, "recompute": "full"}, 12.93),
        ("llama3-8b", {"dp_shard": 32, "recompute": 2}, 22.50),
        ("llama-1b", {"dp_replicate": 8, "zero": 1, "micro_batch": 2}, 41.22),
        ("llama-1b", {"dp_shard": 8, "zero": 1,
                      "formats": dataclasses.replace(OURS, reduce_bytes=2)}, 16.23),
        ("llama3.2-1b", {"dp_shard": 8, "recompute": "full"}, 7.02),
        ("llama2-70b", {"dp_shard": 128, "recompute": "full"}, 21.86),
        # the same with the loss in chunks: `shardyard plan RECIPE --dry-run`, 2026-11-23
        ("llama3-8b", {"dp_shard": 64, "seq_len": 8192, "recompute": "full",
                       "techniques": IN_CHUNKS}, 11.53),
        ("llama3-8b", {"dp_shard": 64, "zero": 1, "micro_batch": 4, "recompute": "full",
                       "techniques": IN_CHUNKS}, 54.33),
        ("llama3-8b", {"dp_shard": 8, "tp": 8, "seq_len": 8192, "recompute": "full",
                       "techniques": IN_CHUNKS}, 3.20),
        ("llama-1b", {"dp_shard": 8, "seq_len": 8192, "recompute": "full",
                      "techniques": IN_CHUNKS}, 4.62),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_real_model(preset: str, given: dict[str, Any], gib: float) -> None:
    assert memory(workload(preset, **given)).allocated_bytes / GIB == pytest.approx(gib, rel=0.03)


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
    formats = dataclasses.replace(OURS, compute_bytes=dtype.itemsize)
    predicted = 64 * block_bytes(workload(shape, seq_len=64, formats=formats))
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


# --- three numbers, and a word ------------------------------------------------------------------


def test_terms_add_up_to_what_is_allocated_and_each_has_a_reason() -> None:
    for preset in ("llama2-7b", "mixtral-8x7b", "bert-large"):
        found = memory(workload(preset, seq_len=512, dp_shard=8))
        assert sum(term.bytes for term in found.terms) == pytest.approx(found.allocated_bytes)
        assert all(term.reason and term.bytes for term in found.terms)


def test_a_search_sees_the_same_peak() -> None:
    w = workload("llama2-70b", dp_shard=4, tp=8, pp=4, passes=8)
    allocated, stage, _, _ = peak(w)
    assert (round(allocated), stage) == (memory(w).allocated_bytes, memory(w).stage)


def test_the_allocator_and_the_driver_take_more_than_tensors() -> None:
    w = workload(dp_shard=8, tp=2)
    found = memory(w)
    assert found.allocated_bytes < found.reserved_bytes < found.device_bytes
    assert found.reserved_bytes == round(reserved_of(found.allocated_bytes))
    assert found.device_bytes == round(device_of(peak(w)[0], w.layout, has_standby=False))
    # a context, and the buffers of a communicator for each of two axes
    assert GIB < found.device_bytes - found.reserved_bytes < 3 * GIB


def test_a_parked_process_has_a_context_of_its_own_on_the_device() -> None:
    plain = workload(dp_shard=8)
    parks = replace(plain, techniques=replace(plain.techniques, has_standby=True))
    assert memory(parks).terms == memory(plain).terms
    more_bytes = memory(parks).device_bytes - memory(plain).device_bytes
    assert more_bytes == pytest.approx(CONTEXT_BYTES, abs=1)


def test_how_near_a_use_comes_to_the_memory_has_a_word_and_a_reason() -> None:
    assert fit(70 * GIB, 80 * GIB).verdict == "fits"
    tight = fit(78 * GIB, 80 * GIB)
    assert tight == Fit(
        verdict="tight",
        reason="78.0 GiB are 98% of 80.0 GiB, which leaves less free than this prediction's error, "
        "8%",
    )
    assert fit(83 * GIB, 80 * GIB).verdict == "does not fit", "more than the device has"
    beyond = fit(100 * GIB, 80 * GIB)
    assert (beyond.verdict, beyond.reason) == ("does not fit", "100.0 GiB are 125% of 80.0 GiB")
    assert fit(GIB, None).verdict == "unknown"
    assert "not known" in fit(GIB, None).reason


# --- monotonic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("passes", [1, 4])
def test_more_splitting_never_needs_more(recompute: Any, passes: int) -> None:
    def sizes(axis: str, values: tuple[int, ...], **rest: Any) -> list[int]:
        return [
            memory(
                workload("llama2-70b", recompute=recompute, passes=passes, **{axis: value, **rest})
            ).allocated_bytes
            for value in values
        ]

    for found in (
        sizes("zero", (1, 2, 3), dp_shard=16),
        sizes("dp_shard", (1, 2, 8, 64)),
        sizes("tp", (1, 2, 4, 8), dp_shard=8),
        sizes("cp", (1, 2, 4, 8), dp_shard=8),
        sizes("micro_batch", (4, 2, 1), dp_shard=8),
        sizes("seq_len", (8192, 4096, 2048), dp_shard=8),
    ):
        assert found == sorted(found, reverse=True)


def test_one_rank_in_bf16_holds_a_copy_and_sends_nothing() -> None:
    recipe = resolved_recipe(
        model={"preset": "llama-tiny"},
        data={"seq_len": 64},
        optim={"lr": 1e-3, "weight_decay": 0.1, "global_batch": 4, "micro_batch": 2},
        precision={"compute": "bf16", "reduce": "fp32"},
        cluster={"device": "cpu"},
    )
    shape = PRESETS["llama-tiny"].shape
    one = Layout(dp_replicate=1, dp_shard=1, zero=3)
    for need in needs(workload_of(recipe, shape, one), 0):
        assert need.parameters == 4 * shape.parameters
        assert need.optimizer == 8 * shape.parameters
        assert need.gathered >= 2 * shape.parameters
    assert needs(workload_of(recipe, shape, one), 0)[1].unreduced == 0
    two = workload_of(recipe, shape, Layout(dp_replicate=2, dp_shard=1, zero=3))
    assert needs(two, 0)[1].unreduced > 0  # they cast block by block, and sum each
    update = workload_of(recipe, shape, one).formats
    # read: gradient twice (its norm), weight, averages; written: weight, averages, copy
    assert update.one_pass_bytes == 4 + 4 + 4 + 8 + 4 + 8 + 2

"""Times of a block: what is computed, by shape, and what waits for the network, by axis."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.block_time import BlockTimes, Pass
from shardyard.planner.workload import Techniques
from tests.planner.workloads import EAGER, OURS, dgx, layout, p5

LLAMA = PRESETS["llama2-7b"].shape
LLAMA_70B = PRESETS["llama2-70b"].shape
MIXTRAL = PRESETS["mixtral-8x7b"].shape
BERT = PRESETS["bert-large"].shape


def times(
    shape: ModelShape = LLAMA,
    cluster: ClusterHardware | None = None,
    *,
    seq_len: int = 4096,
    **given: Any,
) -> BlockTimes:
    settings = {"formats": OURS, "techniques": EAGER, **given}
    return BlockTimes(shape, cluster or p5(), seq_len=seq_len, **settings)


def forward(
    shape: ModelShape = LLAMA, cluster: ClusterHardware | None = None, *, micro_batch: int = 1,
    degrees: dict[str, int] | None = None, **given: Any,
) -> Pass:  # fmt: skip
    return times(shape, cluster, **given).block(layout(**degrees or {}), micro_batch)[0]


def test_products_take_at_least_their_flop_at_the_best_rate_ever_measured() -> None:
    first, second = times().block(layout(), 1)
    # Llama 2 7B: 202,375,168 weights in the products of a block, 4,096 tokens
    flop = 2 * 202_375_168 * 4096
    assert 1 < first.matmul_s / (flop / (0.803 * 989e12)) < 1.7
    assert second.matmul_s == pytest.approx(2 * first.matmul_s, rel=0.1)


def test_attention_grows_with_the_square_of_the_length() -> None:
    short, long = (forward(seq_len=length).attention_s for length in (8192, 16384))
    assert long == pytest.approx(4 * short)


def test_a_causal_mask_halves_attention() -> None:
    whole = replace(BERT, num_key_value_heads=16)
    masked = replace(whole, model_type="gpt2")
    ratio = forward(masked, seq_len=512).attention_s / forward(whole, seq_len=512).attention_s
    assert ratio == pytest.approx(0.5)


def test_the_backward_pass_of_flash_attention_takes_two_to_four_times_the_forward() -> None:
    # Dao 2023, arXiv:2307.08691: 2.5 times the FLOP at a lower rate
    first, second = times().block(layout(), 1)
    assert 2.5 <= second.attention_s / first.attention_s <= 4


def test_unfused_attention_is_slower_and_dropout_slower_still() -> None:
    kinds = [
        Techniques(attention="fused"),
        Techniques(attention="flash"),
        Techniques(attention="unfused"),
        Techniques(attention="unfused", dropout=True),
    ]
    found = [forward(techniques=kind).attention_s for kind in kinds]
    assert found == sorted(set(found))


def test_a_compiler_moves_fewer_bytes_than_one_kernel_an_operator() -> None:
    found = {
        kernels: forward(techniques=Techniques(kernels=kernels))
        for kernels in ("compiled", "fused", "eager")
    }  # fmt: skip
    memory_s = [each.elementwise_s for each in found.values()]
    assert memory_s == sorted(set(memory_s))
    assert found["compiled"].host_s < found["eager"].host_s


def test_the_host_takes_as_long_for_a_small_batch_as_for_a_large_one() -> None:
    small, large = forward(seq_len=128), forward(seq_len=4096, micro_batch=4)
    assert small.host_s == large.host_s > small.compute_s
    assert large.host_s < large.compute_s


def test_fp8_speeds_up_products_and_pays_for_casts() -> None:
    half = forward(LLAMA_70B)
    quarter = forward(LLAMA_70B, formats=replace(OURS, compute="fp8"))
    assert half.matmul_s / 2.1 < quarter.matmul_s < half.matmul_s / 1.5
    assert quarter.elementwise_s > half.elementwise_s
    assert quarter.attention_s == half.attention_s
    rows = forward(
        LLAMA_70B,
        formats=replace(OURS, compute="fp8"),
        techniques=replace(EAGER, fp8_rows=True),
    )
    assert quarter.compute_s < rows.compute_s


# --- axes ---------------------------------------------------------------------------------------


def test_without_axes_nothing_waits_for_the_network() -> None:
    assert forward().network_s == 0


def test_tensor_ranks_split_the_work_and_exchange_activations() -> None:
    one, eight = forward(LLAMA_70B), forward(LLAMA_70B, degrees={"tp": 8})
    assert 6 < one.matmul_s / eight.matmul_s < 8, "smaller products are slower"
    # by hand: two all-reduces of 4,096 x 8,192 x 2 bytes, each 2 x 7 / 8 of them at 450 GB/s
    least_s = 2 * 2 * 7 / 8 * 4096 * 8192 * 2 / 450e9
    assert least_s < eight.tensor_s < 3 * least_s


def test_tensor_collectives_beside_products_wait_less() -> None:
    waits = [
        forward(degrees={"tp": 8}, techniques=replace(EAGER, overlap_tensor=beside)).tensor_s
        for beside in (False, True)
    ]
    assert 0 < waits[1] < waits[0]


def test_tensor_ranks_of_one_nvlink_domain_do_not_use_the_network_between_nodes() -> None:
    rack = replace(dgx("GB200", devices=72), devices_per_node=4, nodes=18)
    assert rack.reach == 72
    alone = replace(rack, accelerator=replace(rack.accelerator, nvlink_domain=None))
    assert alone.reach == 4
    inside = forward(LLAMA_70B, rack, degrees={"tp": 8})
    across = forward(LLAMA_70B, alone, degrees={"tp": 8})
    assert inside.tensor_s < 0.5 * across.tensor_s
    assert inside.matmul_s == across.matmul_s


def test_context_ranks_split_tokens_and_exchange_keys() -> None:
    one, four = forward(seq_len=32768), forward(seq_len=32768, degrees={"cp": 4})
    assert one.attention_s == pytest.approx(4 * four.attention_s)
    assert one.context_s == 0
    # within a node the exchange hides behind attention over 32,768 tokens; across nodes less
    far = forward(seq_len=32768, degrees={"cp": 16})
    assert four.context_s <= far.context_s
    assert forward(seq_len=2048, degrees={"cp": 4}).context_s > 0


def test_tokens_visit_two_of_eight_experts() -> None:
    # Jiang et al. 2024: a token visits 2 experts: twice the MLP of one expert, and the attention
    dense = replace(MIXTRAL, model_type="mistral", num_experts=0, intermediate_size=2 * 14336)
    ratio = forward(MIXTRAL).matmul_s / forward(dense).matmul_s
    assert 1 < ratio < 1.4, "a router, uneven experts, eight smaller products"


def test_expert_ranks_deal_tokens_over_the_network() -> None:
    assert forward(MIXTRAL, degrees={"dp_shard": 8}).expert_s == 0
    inside = forward(MIXTRAL, degrees={"dp_shard": 8, "ep": 8})
    # by hand: to the experts and back, 2 visits x 4,096 tokens x 4,096 x 2 bytes, 7 / 8 of them
    least_s = 2 * 7 / 8 * 2 * 4096 * 4096 * 2 / 450e9
    assert least_s < inside.expert_s < 3 * least_s
    across = replace(p5(), devices_per_node=2, nodes=8)
    assert forward(MIXTRAL, across, degrees={"dp_shard": 8, "ep": 8}).expert_s > inside.expert_s


# --- head and loss ------------------------------------------------------------------------------


def head(shape: ModelShape, **given: Any) -> float:
    both = times(shape, seq_len=512, **given).vocabulary(layout(), 32)
    return sum(each.compute_s for each in both)


def test_the_head_of_bert_counts_masked_tokens_alone() -> None:
    # Devlin et al. 2018: 15 % of the tokens are predicted
    every = replace(BERT, model_type="gpt2")
    assert head(BERT) == pytest.approx(0.15 * head(every), rel=0.25)


def test_tensor_ranks_split_the_vocabulary() -> None:
    one, eight = (
        times(PRESETS["llama3-8b"].shape).vocabulary(layout(tp=tp), 1)[0].compute_s for tp in (1, 8)
    )
    assert one == pytest.approx(8 * eight, rel=0.15)


def test_a_shape_asked_for_twice_is_computed_once() -> None:
    asked = times()
    first = asked.block(layout(dp_shard=8), 1)
    assert asked.block(layout(dp_shard=2, dp_replicate=4, zero=1), 1) is first
    assert asked.block(layout(tp=2), 1) is not first
    assert asked.vocabulary(layout(), 1) is asked.vocabulary(layout(dp_shard=8), 1)

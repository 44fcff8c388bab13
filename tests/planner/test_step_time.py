"""A step's terms: they add up, each answers to what causes it, and only to that."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import Link
from shardyard.planner.calibration import Calibration
from shardyard.planner.memory import block_bytes
from shardyard.planner.step_time import NAMES, Parts, StepModel, step_terms
from shardyard.planner.workload import Techniques, Workload
from tests.planner.workloads import EAGER, OURS, dgx, p5, with_rates, workload

SHAPE_70B = PRESETS["llama2-70b"].shape


def parts(
    w: Workload, cluster: ClusterHardware | None = None, calibration: Calibration | None = None
) -> Parts:
    model = StepModel(
        w.shape, cluster or p5(), seq_len=w.seq_len, formats=w.formats, techniques=w.techniques,
        calibration=calibration,
    )  # fmt: skip
    return model.parts(
        w.layout,
        micro_batch=w.micro_batch,
        micro_batches=w.micro_batches,
        recompute=w.recompute,
    )


def compute_s(found: Parts) -> float:
    return found.matmul_s + found.attention_s + found.elementwise_s + found.vocabulary_s


# --- the sum ------------------------------------------------------------------------------------


def test_terms_add_up_to_the_step_and_have_reasons() -> None:
    w = workload("llama2-70b", dp_shard=2, tp=4, pp=2, passes=8, recompute="full")
    found = parts(w)
    terms = step_terms(w, found)
    assert sum(term.seconds for term in terms) == pytest.approx(found.step_s)
    assert all(term.reason and term.seconds > 0 for term in terms)
    assert {"recompute", "tensor parallel", "pipeline bubble"} <= {term.name for term in terms}
    assert "8 micro-batches of 1" in terms[0].reason


def test_muon_takes_the_time_of_its_products_and_sends_shared_by_those_who_split() -> None:
    plain = workload(dp_shard=16)
    muon = replace(plain, techniques=replace(plain.techniques, orthogonalizes=True))
    alone = replace(muon, layout=replace(muon.layout, dp_shard=1, dp_replicate=16, zero=1))
    extra = parts(muon).optimizer_s - parts(plain).optimizer_s
    # 6.5 G elements x 24 x 4,096 at 600 to 989 TFLOP/s, and twice 2 bytes of each over the network
    flops = 6.476e9 * 24 * 4096 / 16
    sent = 2 * 2 * 6.476e9 / 16
    assert flops / 989e12 + sent / 450e9 < extra < flops / 500e12 + sent / 20e9
    assert parts(alone).optimizer_s > 16 * flops / 989e12  # each copy computes all


def test_every_part_of_a_step_has_a_name() -> None:
    assert tuple(NAMES) == Parts._fields
    assert len({name for name, _ in NAMES.values()}) == len(NAMES)


def test_a_step_takes_longer_than_its_flop_at_the_best_rate_ever_measured() -> None:
    w = workload(dp_shard=16, passes=4)
    flop = 4 * 4096 * (6 * 6.607e9 + 6 * 32 * 4096 * 4096)  # of one rank, causal attention
    assert 1.2 < parts(w).step_s / (flop / (0.803 * 989e12)) < 2.5


def test_twice_the_batch_takes_twice_the_compute() -> None:
    few, many = (parts(workload(dp_shard=16, passes=passes)) for passes in (4, 8))
    assert compute_s(many) == pytest.approx(2 * compute_s(few))
    assert few.step_s < many.step_s <= 2 * few.step_s


# --- monotonic ----------------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 16},
    {"dp_shard": 16, "zero": 1},
    {"dp_shard": 8, "dp_replicate": 2},
    {"dp_shard": 2, "tp": 8},
    {"dp_shard": 2, "pp": 8, "passes": 8},
    {"dp_shard": 2, "cp": 8},
]


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_a_faster_network_never_takes_longer(degrees: dict[str, Any]) -> None:
    w, cluster = workload(**degrees), p5()
    found = [
        parts(w, replace(cluster, between=replace(cluster.between, bytes_per_s=rate))).step_s
        for rate in (1e9, 1e10, 1e11, 1e12)
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_faster_memory_and_arithmetic_never_take_longer(degrees: dict[str, Any]) -> None:
    w, cluster = workload(**degrees), p5()
    memory = [
        parts(w, with_rates(cluster, bandwidth_bytes_per_s=rate)).step_s
        for rate in (1e12, 2e12, 4e12)
    ]
    assert memory == sorted(memory, reverse=True)
    power = [parts(w, with_rates(cluster, power_share=share)).step_s for share in (0.6, 0.8, 1.0)]
    assert power == sorted(power, reverse=True)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_more_micro_batches_never_take_less(degrees: dict[str, Any]) -> None:
    given = {name: value for name, value in degrees.items() if name != "passes"}
    found = [parts(workload(passes=passes, **given)).step_s for passes in (8, 16, 32)]
    assert found == sorted(found)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_an_infinitely_fast_network_leaves_the_starts_of_collectives(
    degrees: dict[str, Any],
) -> None:
    free = Link(name="free", bytes_per_s=1e30, latency_s=0.0, source="a thought")
    found = parts(workload(seq_len=8192, **degrees), replace(p5(), inside=free, between=free))
    assert found.data_s + found.context_s + found.send_s < 0.005 * found.step_s
    # ranks of a tensor group still wait for each other: less than 0.5 ms for each of 4 all-reduces
    passes = degrees.get("passes", 2)
    assert found.tensor_s < passes * 32 * 4 * 0.5e-3


# --- recompute ----------------------------------------------------------------------------------


def test_full_recompute_costs_about_a_third_more_compute() -> None:
    # a forward pass again beside one forward and two backward: Chen et al. 2016, arXiv:1604.06174
    for preset in ("llama2-7b", "llama2-70b", "gpt3-175b"):
        found = parts(workload(preset, dp_shard=16, recompute="full"))
        assert 0.25 < found.recompute_s / compute_s(found) < 0.40


def test_what_recomputes_less_takes_less() -> None:
    levels: list[Any] = ["none", "attention", "selective", "full"]
    found = [parts(workload(dp_shard=16, recompute=level)).recompute_s for level in levels]
    assert found[0] == 0
    assert found[0] < min(found[1:3]) <= max(found[1:3]) < found[3]
    every_second = parts(workload(dp_shard=16, recompute=2)).recompute_s
    assert every_second == pytest.approx(found[3] / 2)
    tech = replace(EAGER, selective_products=0.5)
    half = parts(workload(dp_shard=16, recompute="selective", techniques=tech)).recompute_s
    assert found[2] < half < found[3], "half of the products are computed again"


# --- pipeline -----------------------------------------------------------------------------------


def pipeline(
    *, shape: ModelShape = SHAPE_70B, passes: int = 16, pp: int = 8, **techniques: Any
) -> Parts:
    tech = replace(EAGER, **techniques)
    return parts(workload(shape, pp=pp, passes=passes, techniques=tech), p5())


def even_pipeline(**given: Any) -> Parts:
    """All stages have the same work: the head has none."""
    return pipeline(shape=replace(SHAPE_70B, vocab_size=1), **given)


def bubble(found: Parts) -> float:
    """Against the work of the micro-batches."""
    return found.bubble_s / (compute_s(found) + found.launch_s)


@pytest.mark.parametrize(("pp", "passes"), [(2, 8), (8, 16), (8, 64)])
def test_the_bubble_of_1f1b_is_that_of_its_paper(pp: int, passes: int) -> None:
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1: (p - 1) / m
    assert bubble(even_pipeline(pp=pp, passes=passes)) == pytest.approx((pp - 1) / passes, rel=1e-3)
    assert bubble(even_pipeline(pp=pp, passes=passes, schedule="gpipe")) == pytest.approx(
        (pp - 1) / passes, rel=1e-3
    )


def test_interleaving_divides_the_bubble_by_its_chunks() -> None:
    # the same, section 2.2.2: (p - 1) / (m v)
    found = even_pipeline(schedule="interleaved", virtual_stages=5)
    assert bubble(found) == pytest.approx(7 / 16 / 5, rel=1e-3)


def test_a_zero_bubble_schedule_has_less_than_half_the_bubble() -> None:
    # Qi et al. 2023, arXiv:2401.10241: ZB-H1 has a third of 1F1B's
    assert bubble(even_pipeline(schedule="zero-bubble")) == pytest.approx(7 / 16 / 3, rel=1e-3)


def test_stages_cut_by_number_of_blocks_wait_for_the_longest() -> None:
    # 80 blocks over 7 stages: 12 on the longest, and the head on the last besides; cut by cost,
    # 12 on six of them leave room for the head
    even, uneven = pipeline(pp=7), pipeline(pp=7, balanced_stages=False)
    assert uneven.matmul_s == pytest.approx(even.matmul_s)
    assert even.vocabulary_s == 0 < uneven.vocabulary_s


def test_stages_have_whole_blocks() -> None:
    # 80 blocks over 32 stages: 3 on the longest, as over 27
    assert pipeline(pp=32).matmul_s == pytest.approx(pipeline(pp=27).matmul_s)


def test_stages_send_activations() -> None:
    assert pipeline(pp=1).send_s == 0
    # by hand: both ways, 4,096 tokens x 8,192 x 2 bytes at 450 GB/s, for each of 16 micro-batches
    assert pipeline(passes=16).send_s > 16 * 2 * 4096 * 8192 * 2 / 450e9


# --- data axes ----------------------------------------------------------------------------------


def test_one_rank_exchanges_nothing() -> None:
    found = parts(workload("llama-1b"))
    exchanges = ("data_s", "tensor_s", "context_s", "expert_s", "send_s", "bubble_s")
    assert [getattr(found, name) for name in exchanges] == [0] * 6


def test_what_runs_beside_compute_is_exposed_less() -> None:
    for zero in (1, 2, 3):
        exposed = [
            parts(
                workload(dp_shard=16, zero=zero, techniques=replace(EAGER, overlap_data=beside))
            ).data_s
            for beside in (False, True)
        ]
        assert 0 < exposed[1] < exposed[0]


def test_exposed_gathers_take_what_the_wire_takes() -> None:
    tech = replace(EAGER, overlap_data=False)
    found = parts(workload(dp_shard=16, passes=1, techniques=tech)).data_s
    # Rajbhandari et al. 2020, section 7.2.2: two gathers (bf16) and a reduction (fp32) of all
    # parameters; eight devices share 400 GB/s each way out of a node of p5
    least_s = 15 / 16 * 6.738e9 * (2 * 2 + 4) / 400e9
    assert least_s < found < 1.5 * least_s


def test_copies_over_a_slow_network_exchange_less_than_one_split_over_it() -> None:
    slow = replace(p5(), between=replace(p5().between, bytes_per_s=1e9))
    split = parts(workload(dp_shard=16), slow)
    hybrid = parts(workload(dp_shard=8, dp_replicate=2), slow)
    assert hybrid.data_s < 0.5 * split.data_s


def test_zero_2_sums_every_micro_batch_and_zero_1_once() -> None:
    tech = replace(EAGER, overlap_data=False)
    found = {
        zero: parts(workload(dp_shard=16, zero=zero, passes=4, techniques=tech)).data_s
        for zero in (1, 2)
    }
    # gather 2 bytes + reduce 4 against gather 2 + 4 x reduce 4
    assert found[2] / found[1] == pytest.approx(18 / 6, rel=0.05)


def test_fp8_gathers_send_half() -> None:
    formats = replace(OURS, compute="fp8")
    exposed = [
        parts(
            workload(
                dp_shard=16, formats=formats,
                techniques=replace(EAGER, overlap_data=False, fp8_gather=gather),
            )
        ).data_s
        for gather in (False, True)
    ]  # fmt: skip
    # two gathers of 2 bytes and a sum of 4, against two of 1 and the same sum
    assert exposed[1] / exposed[0] == pytest.approx(6 / 8, rel=0.05)


# --- the rest -----------------------------------------------------------------------------------


def test_more_shards_update_fewer_parameters_each() -> None:
    whole, split = (parts(workload(dp_shard=n, zero=1)).optimizer_s for n in (1, 16))
    assert 5 < whole / split <= 16
    # Adam in fp32 reads and writes at least weight and two moments, and reads the gradient
    assert whole > 28 * 6.738e9 / 3350e9


def test_an_update_takes_as_long_as_its_optimizer_moves_bytes() -> None:
    adam = workload(dp_shard=1, zero=1)
    none, one, two = (
        parts(replace(adam, formats=replace(adam.formats, update_bytes=number))).optimizer_s
        for number in (24, 32, 40)
    )
    # an average is read and written once in fp32
    assert one - none == pytest.approx(two - one) == pytest.approx(8 * 6.738e9 / 3350e9, rel=0.2)
    assert two == parts(adam).optimizer_s  # AdamW's two, unless a recipe says otherwise


@pytest.mark.parametrize("what", ["params", "optimizer", "activations"])
def test_offload_costs_what_the_link_to_the_host_leaves_exposed(what: Any) -> None:
    slow, fast = (with_rates(p5(1), host_link_bytes_per_s=rate) for rate in (1e9, 64e9))
    w = workload(dp_shard=8, techniques=replace(EAGER, offload=what))
    assert parts(workload(dp_shard=8), slow).offload_s == 0
    assert 0 <= parts(w, fast).offload_s < parts(w, slow).offload_s


def test_offloaded_activations_go_down_and_up_once_a_pass() -> None:
    slow = with_rates(p5(1), host_link_bytes_per_s=1e9)
    w = workload(dp_shard=8, passes=2, techniques=replace(EAGER, offload="activations"))
    # by hand: 32 blocks x 4,096 tokens x the bytes that a block keeps, two passes, both ways
    moved_s = 2 * 2 * 32 * 4096 * block_bytes(w) / 1e9
    found = parts(w, slow)
    beside_s = compute_s(found) + found.tensor_s - found.vocabulary_s
    assert found.offload_s == pytest.approx(moved_s - beside_s)
    twice = parts(replace(w, micro_batch=2, global_batch=32), slow)
    assert twice.offload_s == pytest.approx(2 * found.offload_s, rel=0.02)


def test_a_small_model_waits_for_the_host_that_launches_it() -> None:
    small = workload("llama-1b", seq_len=128)
    assert parts(small).launch_s > 0.2 * compute_s(parts(small))
    assert parts(workload()).launch_s == 0
    compiled = workload("llama-1b", seq_len=128, techniques=Techniques(kernels="compiled"))
    assert parts(compiled).launch_s < parts(small).launch_s


def test_experts_over_ranks_have_a_term() -> None:
    w = workload("mixtral-8x7b", dp_shard=8, ep=8)
    names = {term.name for term in step_terms(w, parts(w, p5(1)))}
    assert "expert parallel" in names
    whole = workload("mixtral-8x7b", dp_shard=8)
    assert "expert parallel" not in {term.name for term in step_terms(whole, parts(whole, p5(1)))}


def test_a_rack_that_nvlink_joins_gathers_faster_than_nodes_of_four() -> None:
    rack = replace(dgx("GB200", devices=72), devices_per_node=4, nodes=18)
    alone = replace(rack, accelerator=replace(rack.accelerator, nvlink_domain=None))
    tech = replace(EAGER, overlap_data=False)
    w = workload(dp_shard=72, techniques=tech)
    assert parts(w, rack).data_s < 0.5 * parts(w, alone).data_s


def test_a_measured_step_scales_every_term() -> None:
    w = workload(dp_shard=16)
    plain, scaled = parts(w), parts(w, calibration=Calibration(step_scale=1.25))
    assert list(scaled) == pytest.approx([1.25 * seconds for seconds in plain])

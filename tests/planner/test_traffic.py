"""Traffic per step against the volumes of the papers that each technique comes from."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.planner.memory import memory
from shardyard.planner.traffic import traffic_terms
from shardyard.planner.workload import workload_of
from tests.planner.recipes import resolved_recipe, shape_of
from tests.planner.workloads import EAGER, workload

PARAMETERS = 6_738_415_616
TABLE = 32_000 * 4_096


def sent(**given: Any) -> dict[str, int]:
    found = traffic_terms(workload(**{"passes": 2, **given}))
    assert all(term.reason for term in found)
    return {term.name: term.bytes for term in found}


def test_one_rank_sends_nothing() -> None:
    assert sent() == {}


def test_replicas_all_reduce_once_a_step() -> None:
    # a ring all-reduce sends 2 (n - 1) / n of its data; gradients are summed in fp32
    assert sent(dp_replicate=4, zero=1) == {"all-reduce": round(1.5 * PARAMETERS * 4)}


def test_zero_3_gathers_twice_and_reduces_once_a_micro_batch() -> None:
    # Rajbhandari et al. 2020, section 7.2.2: 2 gathers and 1 reduction, 3 times the parameters;
    # two micro-batches; less one gather of norm and head, which stay whole until the backward pass
    head = TABLE + 4_096
    assert sent(dp_shard=4) == {
        "all-gather": round(0.75 * 2 * (2 * PARAMETERS - head) * 2),
        "reduce-scatter": round(0.75 * 2 * PARAMETERS * 4),
    }


@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (2, 2)])
def test_zero_1_and_2_gather_once_a_step(zero: int, reductions: int) -> None:
    assert sent(dp_shard=4, zero=zero) == {
        "all-gather": round(0.75 * PARAMETERS * 2),
        "reduce-scatter": round(0.75 * PARAMETERS * 4 * reductions),
    }


def test_hybrid_adds_an_all_reduce_of_shards() -> None:
    assert sent(dp_shard=4, dp_replicate=2)["all-reduce"] == round(PARAMETERS / 4 * 4)


NORMS = 32 * 2 * 4_096 + 4_096
STREAM = 4_096 * 4_096 * 2  # tokens of a micro-batch x width, in bf16


def test_tensor_ranks_send_their_share_of_the_model_with_the_norms_whole() -> None:
    found, held = sent(dp_shard=4, tp=2), (PARAMETERS - NORMS) / 2 + NORMS
    assert found["reduce-scatter"] == round(0.75 * 2 * held * 4)


def test_tensor_ranks_gather_and_sum_the_tokens() -> None:
    # Korthikanti et al. 2022, section 4.2.2: a block gathers and sums twice in each pass, and
    # gathers twice more for the gradients of its matrices: 10; embedding 2, head 3
    found = sent(tp=2)
    assert found["tokens of tp"] == round(0.5 * 2 * (32 * 10 + 5) * STREAM)
    # all-reduces: three fp32 numbers a token for the loss, and gradients of norms, once a step
    assert found["sums of tp"] == round(2 * 0.5 * (2 * 4_096 * 12 + NORMS * 2))
    # recomputed, a block gathers twice and sums once more
    assert sent(tp=2, recompute="full")["tokens of tp"] - found["tokens of tp"] == round(
        0.5 * 2 * 32 * 3 * STREAM
    )


def test_context_ranks_split_the_model_too_and_send_keys_and_values() -> None:
    found = sent(cp=4)
    assert {name: found[name] for name in ("all-gather", "reduce-scatter")} == sent(dp_shard=4)
    # of 4,096 tokens, 32 heads of 128 in bf16: gathered in both passes, and gradients; 32 blocks
    assert found["attention of cp"] == round(0.75 * 3 * 2 * 32 * 2 * 4096 * 4096 * 2)
    assert sent(cp=4, tp=2)["attention of cp"] == found["attention of cp"] // 2


def test_exchanged_heads_send_less_the_more_ranks_there_are() -> None:
    # Jacobs et al. 2023, section 3: 4 N h / P a block and pass, here of (P - 1) / P each
    tech = replace(EAGER, cp_exchange="heads")
    assert sent(cp=4, techniques=tech)["attention of cp"] == round(
        0.75 * 2 * 32 * 2 * 4 * 4096 * 4096 * 2 / 4
    )


def test_a_pipeline_hands_hidden_states_on_and_gradients_back() -> None:
    # Narayanan et al. 2021, section 3.2: b s h each way; a stage between two others sends both
    found = sent(pp=4, passes=8)
    assert found["hidden states of pp"] == 8 * 2 * STREAM
    assert sent(pp=2, passes=8)["hidden states of pp"] == 8 * STREAM


def test_ends_that_share_a_table_exchange_its_gradient_once_a_step() -> None:
    # Narayanan et al. 2021: embedding and head are tied over the first and the last stage; each
    # has a half of the fp32 gradient on two shards
    found = sent(preset="llama3.2-1b", pp=2, dp_shard=2)
    assert found["tied table of pp"] == 128_256 * 2_048 // 2 * 4


def test_visits_go_to_experts_and_back_in_both_passes() -> None:
    found = sent(preset="mixtral-8x7b", dp_shard=8, ep=8)
    assert found["visits of ep"] == round(7 / 8 * 2 * 32 * 4 * 2 * STREAM)
    # each rank of eight has one expert of eight whole: no shard of it is sent
    shape = PRESETS["mixtral-8x7b"].shape
    dense = shape.parameters - 32 * 8 * shape.expert_parameters
    assert found["reduce-scatter"] == round(7 / 8 * 2 * dense * 4)


def test_sums_as_integers_send_and_hold_twice_the_bytes() -> None:
    layout, shape = Layout(dp_replicate=2, dp_shard=4, zero=3), shape_of("llama2-7b")
    rounded, exact = (
        workload_of(resolved_recipe(precision={"reduce": reduce}), shape, layout)
        for reduce in ("fp32", "exact")
    )
    sent = [{term.name: term.bytes for term in traffic_terms(each)} for each in (rounded, exact)]
    assert sent[1]["reduce-scatter"] == 2 * sent[0]["reduce-scatter"] > 0
    assert sent[1]["all-reduce"] == 2 * sent[0]["all-reduce"] > 0
    assert sent[1]["all-gather"] == sent[0]["all-gather"]
    assert exact.formats.gradient_bytes == 2 * rounded.formats.gradient_bytes
    assert memory(exact).allocated_bytes > memory(rounded).allocated_bytes

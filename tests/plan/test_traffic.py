"""Traffic per step against the ZeRO paper's volumes."""

from typing import Any

import pytest

from shardyard.plan.traffic import traffic_terms
from tests.plan.workloads import workload

PARAMETERS = 6_738_415_616
TABLE = 32_000 * 4_096


def sent(**given: Any) -> dict[str, int]:
    found = traffic_terms(workload(passes=2, **given))
    assert all(term.reason for term in found)
    return {term.name: term.bytes for term in found}


def test_one_rank_sends_nothing() -> None:
    assert sent() == {}


def test_replicas_all_reduce_once_a_step() -> None:
    # a ring all-reduce sends 2 (n - 1) / n of its data; gradients are summed in fp32
    assert sent(dp_replicate=4, zero=1) == {"all-reduce": round(1.5 * PARAMETERS * 4)}


def test_zero_3_gathers_twice_and_reduces_once_a_micro_batch() -> None:
    # Rajbhandari et al. 2020, section 7.2.2: 2 gathers and 1 reduction, 3 times the parameters;
    # two micro-batches; less one gather of the head, which stays whole until the backward pass
    assert sent(dp_shard=4) == {
        "all-gather": round(0.75 * 2 * (2 * PARAMETERS - TABLE) * 2),
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


def test_tensor_and_pipeline_ranks_send_their_parts_alone() -> None:
    whole, part = sent(dp_shard=4), sent(dp_shard=4, tp=2, pp=2)
    assert part == {name: round(nbytes / 4) for name, nbytes in whole.items()}


def test_context_ranks_split_the_model_too_and_send_keys_and_values() -> None:
    found = sent(cp=4)
    assert {name: found[name] for name in ("all-gather", "reduce-scatter")} == sent(dp_shard=4)
    # of 4,096 tokens, 32 heads of 128 in bf16: gathered in both passes, and gradients; 32 blocks
    assert found["keys and values"] == round(0.75 * 3 * 2 * 32 * 2 * 4096 * 4096 * 2)
    assert sent(cp=4, tp=2)["keys and values"] == found["keys and values"] // 2

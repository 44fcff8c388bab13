"""What a plan says of a model of which a part is frozen."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.planner.estimate import estimate
from shardyard.planner.kernels import flops_per_token
from shardyard.planner.memory import memory
from shardyard.planner.stages import stage_trained
from shardyard.planner.traffic import stage_traffic
from shardyard.planner.trainable_parameters import Elements, trainable_after_freezing
from shardyard.planner.workload import Workload
from tests.planner.workloads import layout, p5, workload

SHAPE = PRESETS["llama-1b"].shape
L, D, V = SHAPE.num_hidden_layers, SHAPE.hidden_size, SHAPE.vocab_size
HALF = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(L // 2)))
BLOCK = SHAPE.block_parameters


def _workload(frozen: tuple[str, ...], where: Layout, **given: Any) -> Workload:
    asked = workload(SHAPE, layout=where, **given)
    return replace(asked, trained=trainable_after_freezing(SHAPE, frozen))


def test_elements_are_counted_apart() -> None:
    trained = trainable_after_freezing(SHAPE, HALF)
    assert trained is not None
    assert trained.parameters == SHAPE.parameters - V * D - L // 2 * BLOCK
    assert trained.lowest == L // 2 and trained.passes_head and trained.head_is_trained
    assert trained.blocks[0] == Elements(0, 0, 0)
    assert trained.blocks[-1] == Elements(2 * D, BLOCK - 2 * D, 0)
    assert trainable_after_freezing(SHAPE, ()) is None


def test_experts_are_dealt_and_a_tied_table_is_one() -> None:
    mixture = PRESETS["mixtral-8x7b"].shape
    trained = trainable_after_freezing(mixture, ("model.layers.*.self_attn",))
    assert trained is not None
    experts = mixture.num_experts * mixture.expert_parameters
    assert trained.blocks[0].experts == experts
    where = layout(dp_shard=8, ep=8)
    assert trained.blocks[0].on_rank(where) == trained.blocks[0].whole + experts / 8
    tied = PRESETS["llama3.2-1b"].shape
    for name in ("lm_head", "model.embed_tokens"):
        found = trainable_after_freezing(tied, (name,))
        assert found is not None and not any(found.table) and not found.head_is_trained


def test_flops_lack_gradients_of_what_is_frozen() -> None:
    everything = flops_per_token(SHAPE, 1024)["full"]
    # of the table nothing was counted: a look-up
    assert flops_per_token(SHAPE, 1024, trainable_after_freezing(SHAPE, ("model.embed_tokens",)))[
        "full"
    ] == pytest.approx(everything - 0, rel=1e-3)
    pairs = L * D * 1024
    blocks = SHAPE.matmul_parameters - V * D
    half = flops_per_token(SHAPE, 1024, trainable_after_freezing(SHAPE, HALF))["full"]
    assert half == pytest.approx(4.0 * blocks + 6.0 * V * D + 8 * pairs)
    head = flops_per_token(SHAPE, 1024, trainable_after_freezing(SHAPE, ("model",)))["full"]
    assert head == pytest.approx(2.0 * blocks + 4.0 * V * D + 4 * pairs)
    norms = flops_per_token(SHAPE, 1024, trainable_after_freezing(SHAPE, ("model.layers.*.mlp",)))[
        "full"
    ]
    mlp = 3 * D * SHAPE.intermediate_size * L
    assert norms == pytest.approx(everything - 2.0 * mlp, rel=1e-3)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_those_of_what_is_trained(zero: int) -> None:
    where = layout(dp_shard=4, zero=zero)
    free, half = (memory(_workload(frozen, where, global_batch=8)) for frozen in ((), HALF))
    trained = trainable_after_freezing(SHAPE, HALF)
    assert trained is not None
    frozen = SHAPE.parameters - trained.parameters
    assert half.term("optimizer") == pytest.approx(8 * trained.parameters / 4)
    assert half.term("parameters") == pytest.approx((4 * trained.parameters + 2 * frozen) / 4)
    if zero > 1:
        assert half.term("gradients") == pytest.approx(4 * trained.parameters / 4)
    assert half.term("unreduced gradients") <= free.term("unreduced gradients")
    assert half.term("activations") < 0.6 * free.term("activations")


def test_each_stage_of_a_pipeline_counts_its_own() -> None:
    asked = _workload(HALF, layout(pp=4, dp_shard=2), global_batch=16)
    found = [stage_trained(asked, rank) for rank in range(4)]
    assert [each.elements > 0 for each in found if each] == [False, False, True, True]
    trained = trainable_after_freezing(SHAPE, HALF)
    assert trained is not None
    assert sum(each.elements for each in found if each) == trained.parameters
    assert memory(asked).stage >= 2
    sent = [{term.name: term.bytes for term in stage_traffic(asked, stage)} for stage in (0, 3)]
    assert "reduce-scatter" not in sent[0] and sent[1]["reduce-scatter"] > 0


def test_a_step_is_shorter() -> None:
    where = layout(dp_shard=8)
    times = [
        estimate(_workload(frozen, where, global_batch=64), p5()).parts
        for frozen in ((), ("model.layers.*.mlp",), HALF)
    ]
    free, inside, half = times
    assert half.matmul_s < inside.matmul_s < free.matmul_s
    assert half.optimizer_s < free.optimizer_s
    assert inside.attention_s == free.attention_s > half.attention_s
    # a third of a product is its forward pass, and half of the blocks do no more
    assert half.matmul_s == pytest.approx(2 / 3 * free.matmul_s, rel=0.02)

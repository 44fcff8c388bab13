"""Which layouts are legal: a table of what each name stands for, and of what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.layout import Layout
from shardyard.config.rules.layout import (
    check_axes,
    check_experts,
    check_layout,
    check_stages,
    resolve_layout,
)
from shardyard.config.schema.recipe import Parallel
from shardyard.errors import RecipeError
from shardyard.families import shape as shape_module
from shardyard.families.llama import LLAMA
from shardyard.families.presets import PRESETS
from shardyard.families.registry import FAMILIES, family_of

# strategy, world size, devices per node -> zero, dp_shard, dp_replicate
MEANINGS = [
    ({}, 8, 4, (3, 8, 1)),
    ({}, 1, 1, (1, 1, 1)),
    ({"strategy": "FULL_SHARD"}, 8, 4, (3, 8, 1)),
    ({"strategy": "ZERO_3"}, 8, 4, (3, 8, 1)),
    ({"strategy": "SHARD_GRAD_OP"}, 8, 4, (2, 8, 1)),
    ({"strategy": "ZERO_2"}, 8, 4, (2, 8, 1)),
    ({"strategy": "ZERO_1"}, 3, 3, (1, 3, 1)),
    ({"strategy": "NO_SHARD"}, 8, 4, (1, 1, 8)),
    ({"strategy": "HYBRID_SHARD"}, 8, 4, (3, 4, 2)),
    ({"strategy": "HYBRID_SHARD"}, 4, 4, (3, 4, 1)),
    ({"strategy": "HYBRID_SHARD", "tp": 2}, 16, 8, (3, 4, 2)),  # tp takes half of a node
    ({"strategy": "HYBRID_SHARD", "cp": 4}, 16, 8, (3, 2, 2)),
    ({"strategy": "HYBRID_SHARD", "dp_shard": 2}, 4, 4, (3, 2, 2)),
    ({"strategy": "HYBRID_SHARD", "dp_replicate": 4}, 8, 4, (3, 2, 4)),
    ({"zero": 2, "dp_shard": 2}, 8, 4, (2, 2, 4)),
    ({"dp_replicate": 2}, 8, 4, (3, 4, 2)),
    ({"dp_shard": 1}, 4, 4, (1, 1, 4)),
    ({"dp_shard": 1, "cp": 4}, 4, 4, (3, 1, 1)),  # cp ranks split the parameters too
]


@pytest.mark.parametrize(("settings", "world_size", "devices", "expected"), MEANINGS)
def test_each_name_stands_for_its_degrees(
    settings: dict[str, object], world_size: int, devices: int, expected: tuple[int, int, int]
) -> None:
    layout, reasons = resolve_layout(
        Parallel.model_validate(settings), world_size=world_size, devices_per_node=devices
    )
    assert (layout.zero, layout.dp_shard, layout.dp_replicate) == expected
    assert layout.world_size == world_size
    assert {f"parallel.{key}" for key in settings} & set(reasons) == set()
    assert all(reasons.values())


REFUSED = [
    ({"dp_shard": 3}, r"parallel.dp_shard=3 does not divide the 8 .* Use 1, 2, 4 or 8, or auto"),
    ({"dp_replicate": 5}, r"parallel.dp_replicate=5 does not divide the 8 "),
    ({"dp_shard": 2, "dp_replicate": 2}, r"dp_shard 2 x dp_replicate 2 makes 4 ranks, .* are 8"),
    ({"strategy": "FULL_SHARD", "dp_shard": 4}, r"FULL_SHARD is one copy .* use HYBRID_SHARD"),
    ({"strategy": "FULL_SHARD", "zero": 2}, r"parallel.zero=2 contradicts strategy FULL_SHARD"),
    ({"strategy": "NO_SHARD", "dp_shard": 2}, r"parallel.dp_shard=2 contradicts strategy NO_SHARD"),
    ({"strategy": "ZERO_1", "dp_replicate": 2}, r"dp_replicate=2 contradicts strategy ZERO_1"),
    ({"tp": 3}, r"parallel.tp=3 does not divide the 4 devices of a node.* Use 1, 2 or 4\."),
    ({"pp": 3}, r"pp=3 makes 3, which does not divide the 8 ranks. .* 1, 2, 4 or 8"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_refused_layout_names_value_reason_and_legal_values(
    settings: dict[str, object], message: str
) -> None:
    parallel = Parallel.model_validate(settings)
    with pytest.raises(RecipeError, match=message):
        resolve_layout(parallel, world_size=8, devices_per_node=4)


def test_a_strategy_accepts_the_values_it_stands_for() -> None:
    parallel = Parallel(strategy="FULL_SHARD", zero=3, dp_shard=8, dp_replicate=1)
    assert check_layout(parallel, world_size=8, devices_per_node=8) == []


@pytest.mark.parametrize("settings", [row[0] for row in MEANINGS])
def test_a_resolved_layout_resolves_to_itself(settings: dict[str, object]) -> None:
    """The training half resolves again what the command line has resolved."""
    parallel = Parallel.model_validate(settings)
    layout, _ = resolve_layout(parallel, world_size=8, devices_per_node=4)
    degrees = {key: getattr(layout, key) for key in ("zero", "dp_shard", "dp_replicate")}
    again, reasons = resolve_layout(
        parallel.model_copy(update=degrees), world_size=8, devices_per_node=4
    )
    assert (again, reasons) == (layout, {})


def test_model_axes_are_held_against_the_shape() -> None:
    shape = PRESETS["llama2-70b"].shape  # 64 heads, 8 key-value heads, 80 blocks
    found = check_layout(Parallel(tp=16), world_size=16, devices_per_node=16, shape=shape)
    assert "64 heads and 8 key-value heads" in str(found[0])
    found = check_layout(Parallel(pp=96), world_size=96, devices_per_node=8, shape=shape)
    assert "Use at most 80." in str(found[0])


def test_more_ranks_than_samples_of_a_step_are_refused() -> None:
    found = check_layout(
        Parallel(), world_size=8, devices_per_node=8, global_batch=6, micro_batch=8
    )
    assert [problem.path for problem in found] == ["optim.micro_batch", "optim.global_batch"]
    assert "fewer samples than the 8 data-parallel ranks" in str(found[1])
    assert "at least 8, or at most 6 ranks" in str(found[1])


def test_expert_ranks_are_taken_from_the_data_ranks() -> None:
    assert Layout(dp_replicate=2, dp_shard=4, tp=2, pp=2, ep=4, zero=3).world_size == 32


# --- model axes ---------------------------------------------------------------------------------

# preset, degrees (of 64 ranks on nodes of 8 unless given) -> what is said
SPLITS = [
    ("llama2-70b", {"tp": 16, "devices_per_node": 16}, r"64 heads and 8 key-value heads.* 4 or 8"),
    ("llama2-13b", {"tp": 16, "devices_per_node": 16}, r"40 heads.*Use 1, 2, 4, 5, 8, 10, 20 or"),
    (
        "llama2-7b",
        {"tp": 16},
        r"parallel\.tp=16 does not divide the 8 devices.*the network\. Use 1",
    ),
    ("llama2-7b", {"pp": 64}, r"parallel\.pp=64 is more stages than the model has.*at most 32"),
    ("llama2-7b", {"ep": 2}, r"parallel\.ep=2 but the model has no experts to split\. Use 1\."),
    (
        "mixtral-8x7b",
        {"ep": 3, "world_size": 24},
        r"ep=3 does not divide 8 experts\. Use 1, 2, 4 or 8\.",
    ),
    ("mixtral-8x7b", {"ep": 16}, r"ep=16 does not divide 8 experts"),
    ("mixtral-8x7b", {"ep": 8, "tp": 8, "pp": 4}, r"ep=8 does not divide the 2 ranks .without tp"),
    ("llama2-7b", {"cp": 4, "seq_len": 4100}, r"multiple of 8 tokens.* Use data\.seq_len=4104, or"),
    ("llama2-7b", {"cp": 2, "seq_len": 4098}, r"cp=2 needs .* multiple of 4 tokens.* is 4098"),
    (
        "llama2-7b",
        {"cp": 4, "seq_len": 4098, "cp_exchange": "heads"},
        r"cp=4 needs .* multiple of 4 tokens.* Each rank takes an equal part.*seq_len=4100, or",
    ),
    (
        "llama2-7b",
        {"cp": 16, "tp": 4, "cp_exchange": "heads"},
        r"parallel\.cp_exchange=heads but cp=16 does not divide the 8 heads that a rank has with "
        r"tp=4\. A head .* Use keys_values, or a cp of 1, 2, 4 or 8\.",
    ),
    (
        "llama3.2-1b",
        {"cp": 3, "seq_len": 4104, "cp_exchange": "heads"},
        r"cp=3 does not divide the 32 heads of the model\.",
    ),
]


def axes(preset: str, degrees: dict[str, Any]) -> dict[str, Any]:
    ordinary = {"cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": 64, "devices_per_node": 8}
    return {**ordinary, "seq_len": 4096, "shape": PRESETS[preset].shape, **degrees}


@pytest.mark.parametrize(("preset", "degrees", "message"), SPLITS)
def test_what_a_model_cannot_be_split_by_is_named_with_what_it_can(
    preset: str, degrees: dict[str, int], message: str
) -> None:
    (found,) = check_axes(**axes(preset, degrees))
    assert re.search(message, str(found)), str(found)


LEGAL_SPLITS = [
    ("llama2-70b", {"tp": 8, "pp": 8}),
    ("llama2-7b", {"pp": 32}),
    ("llama3.2-1b", {"tp": 8}),
    ("mixtral-8x7b", {"ep": 8, "pp": 2, "tp": 4}),
    ("llama2-7b", {"cp": 4, "seq_len": 4104}),
    ("llama2-7b", {"cp": 1, "seq_len": 4097}),
    ("llama2-7b", {"cp": 1, "seq_len": 4097, "cp_exchange": "heads"}),
    ("llama2-7b", {"cp": 2, "seq_len": 4098, "cp_exchange": "heads"}),
    ("llama3.2-1b", {"cp": 16, "tp": 2, "cp_exchange": "heads"}),  # more ranks than KV heads
]


@pytest.mark.parametrize(("preset", "degrees"), LEGAL_SPLITS)
def test_what_a_model_can_be_split_by_is_let_through(preset: str, degrees: dict[str, Any]) -> None:
    assert check_axes(**axes(preset, degrees)) == []


def test_experts_are_dealt_over_the_ranks_of_one_copy_only() -> None:
    (found,) = check_layout(
        Parallel(ep=4, dp_shard=2, dp_replicate=4),
        world_size=8, devices_per_node=8, shape=PRESETS["mixtral-8x7b"].shape,
    )  # fmt: skip
    assert str(found) == (
        "parallel.ep=4 does not divide the 2 ranks (dp_shard x cp) that split one copy of the "
        "model; experts are dealt over these. Use 1 or 2."
    )
    assert check_experts(dp_shard=2, cp=2, ep=4) == []


def test_everything_wrong_with_the_axes_is_told_at_once() -> None:
    found = check_axes(**axes("llama3.2-1b", {"tp": 3, "pp": 32, "ep": 2, "cp": 3}))
    assert [problem.path for problem in found] == [
        "parallel.tp", "parallel.cp", "parallel.tp", "parallel.pp", "parallel.ep",
    ]  # fmt: skip


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (4, 4), (4, 9)])
def test_a_pipeline_with_enough_micro_batches_is_let_through(pp: int, micro_batches: int) -> None:
    assert check_stages(pp=pp, micro_batches=micro_batches) == []


@pytest.mark.parametrize(
    ("preset", "schedule", "words"),
    [
        (
            "llama3.2-1b",
            "zb-v",
            r"=zb-v but the model's head is its embedding.* another sch",
        ),
        (
            "bert-large",
            "zero-bubble",
            r"zero-bubble with a model of type bert: .* let go before it\..*1f1b",
        ),
    ],
)
def test_schedules_that_a_tied_head_or_bert_cannot_have(
    preset: str, schedule: str, words: str
) -> None:
    how: dict[str, Any] = {"pp": 2, "shape": PRESETS[preset].shape}
    virtual_stages = 2 if schedule == "zb-v" else 1
    (found,) = check_stages(schedule=schedule, virtual_stages=virtual_stages, **how)
    assert re.search(words, str(found))
    assert check_stages(schedule="1f1b", **how) == []


def test_a_pipeline_that_never_fills_is_refused() -> None:
    (found,) = check_stages(pp=4, micro_batches=3)
    text = str(found)
    assert "parallel.pp=4 stages but 3 micro-batches a step" in text
    assert "larger optim.global_batch, a smaller optim.micro_batch, or at most 3 stages" in text


def test_the_batch_of_a_rank_is_what_fills_the_pipeline() -> None:
    """8 ranks, 2 stages: 4 data ranks, each with 8 of the 32 samples in a step."""
    asked: dict[str, Any] = {"world_size": 8, "devices_per_node": 8, "global_batch": 32}
    assert check_layout(Parallel(pp=2), micro_batch=4, **asked) == []
    (found,) = check_layout(Parallel(pp=2), micro_batch=8, **asked)
    assert "2 stages but 1 micro-batches" in str(found)


# --- schedules ----------------------------------------------------------------------------------

WRONG_SCHEDULES = [
    ({"schedule": "interleaved"}, r"virtual_stages=1 does not go .* gives each rank 2 or more st"),
    (
        {"virtual_stages": 2},
        r"virtual_stages=2 does not go with parallel\.schedule=1f1b.* Use 1, or",
    ),
    ({"schedule": "gpipe", "virtual_stages": 3}, r"schedule=gpipe: that one gives each rank 1 st"),
    (
        {"schedule": "zb-v"},
        r"virtual_stages=1 does not go with .*zb-v: that one gives each rank 2 ",
    ),
    (
        {"schedule": "interleaved", "virtual_stages": 5},
        r"=5 on each of 2 ranks makes 10 stages, and the model has 8 blocks.* Use at most 4\.",
    ),
    (
        {"schedule": "zero-bubble", "zero": 3},
        r"parallel\.zero=3 with parallel\.schedule=zero-bubble would lose gradients.* Use "
        r"parallel\.zero=1 or 2, or parallel\.schedule=1f1b or interleaved",
    ),
    (
        {"schedule": "zb-v", "virtual_stages": 2, "strategy": "FULL_SHARD"},
        r"parallel\.strategy=FULL_SHARD with parallel\.schedule=zb-v would lose gradients",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SCHEDULES)
def test_a_schedule_that_cannot_be_carried_out_is_refused(
    settings: dict[str, object], message: str
) -> None:
    parallel = Parallel.model_validate({"pp": 2, **settings})
    shape = PRESETS["llama-tiny-deep"].shape
    (found,) = check_layout(parallel, world_size=8, devices_per_node=8, shape=shape)
    assert re.search(message, str(found)), str(found)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("zero-bubble", 1), ("zb-v", 2)])
def test_a_split_backward_pass_resolves_to_the_highest_level_that_is_right(
    schedule: str, virtual_stages: int
) -> None:
    settings = {"pp": 2, "schedule": schedule, "virtual_stages": virtual_stages}
    parallel = Parallel.model_validate(settings)
    layout, reasons = resolve_layout(parallel, world_size=8, devices_per_node=8)
    assert layout.zero == 2
    assert reasons["parallel.zero"] == f"{schedule} would lose gradients at 3"
    layout, _ = resolve_layout(parallel, world_size=2, devices_per_node=2)
    assert layout.zero == 1


@pytest.mark.parametrize(
    "whole", ["self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp.up_proj"]
)
def test_what_tp_does_not_split_keeps_it_at_1_before_anything_starts(
    whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very rows that ``parallel/tensor.py`` splits: without a split it dies in a step."""
    rows = tuple(
        replace(row, split=None) if f"{row.module}.".startswith(f"{whole}.") else row
        for row in LLAMA.block
    )
    family = replace(LLAMA, block=rows)
    monkeypatch.setattr(shape_module, "family_of", lambda _: family)
    shape = replace(PRESETS["llama-tiny"].shape)  # one of its own: a shape keeps its family

    def found(tp: int) -> list[str]:
        wrong = check_layout(
            Parallel(tp=tp), world_size=2, devices_per_node=2, shape=shape, seq_len=64
        )
        return [f"{problem}" for problem in wrong]

    assert found(1) == []
    (said,) = found(2)
    assert said.startswith("parallel.tp=2: tensor parallelism does not split ")
    assert whole.split(".")[0] in said and said.endswith("Use 1.")


def test_tp_splits_what_every_family_gathers() -> None:
    assert {name: family_of(name).unsplit for name in FAMILIES} == dict.fromkeys(FAMILIES, ())

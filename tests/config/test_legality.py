"""Which layouts are legal: a table of what each name stands for, and of what is refused."""

import pytest

from shardyard.config.legality import Layout, problems, resolve_layout
from shardyard.config.presets import PRESETS
from shardyard.config.schema import Parallel
from shardyard.errors import RecipeError

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
    ({"strategy": "HYBRID_SHARD", "dp_shard": 2}, 4, 4, (3, 2, 2)),
    ({"strategy": "HYBRID_SHARD", "dp_replicate": 4}, 8, 4, (3, 2, 4)),
    ({"zero": 2, "dp_shard": 2}, 8, 4, (2, 2, 4)),
    ({"dp_replicate": 2}, 8, 4, (3, 4, 2)),
    ({"dp_shard": 1}, 4, 4, (1, 1, 4)),
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
    assert problems(parallel, world_size=8, devices_per_node=8) == []


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
    found = problems(Parallel(tp=16), world_size=16, devices_per_node=16, shape=shape)
    assert "64 heads and 8 key-value heads" in str(found[0])
    found = problems(Parallel(pp=96), world_size=96, devices_per_node=8, shape=shape)
    assert "Use at most 80." in str(found[0])


def test_more_ranks_than_samples_of_a_step_are_refused() -> None:
    found = problems(Parallel(), world_size=8, devices_per_node=8, global_batch=6, micro_batch=8)
    assert [problem.path for problem in found] == ["optim.micro_batch", "optim.global_batch"]
    assert "fewer samples than the 8 data-parallel ranks" in str(found[1])
    assert "at least 8, or at most 6 ranks" in str(found[1])


def test_expert_ranks_are_taken_from_the_data_ranks() -> None:
    assert Layout(dp_replicate=2, dp_shard=4, tp=2, pp=2, ep=4, zero=3).world_size == 32

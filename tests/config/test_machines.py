"""`cluster.capacity`: reservations and capacity blocks, and what a block's end is for a run."""

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.machines import (
    TERMINATED_BEFORE_S,
    PurchaseOption,
    block_remaining_s,
    capacity_of,
)
from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Cluster
from shardyard.errors import RecipeError, RequestError

P5 = ("model.preset=llama-tiny", "cluster.instance=p5.48xlarge")
BLOCK = "cluster.capacity=block:cr-0123456789abcdef0"
ENDS = "cluster.block_ends=2027-01-31T11:30:00Z"
END_S = 1801395000.0


def cluster(*overrides: str) -> Cluster:
    recipe = load_recipe([], [*P5, *overrides])
    check(recipe)
    return recipe.cluster


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], overrides))
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "capacity"),
    [
        ((), None),
        (("cluster.capacity=on-demand",), PurchaseOption(kind="on-demand")),
        (("cluster.capacity=spot",), PurchaseOption(kind="spot")),
        (
            ("cluster.capacity=reservation:cr-0123456789abcdef0",),
            PurchaseOption(kind="reservation", id="cr-0123456789abcdef0"),
        ),
        (
            (BLOCK, ENDS),
            PurchaseOption(
                kind="block",
                id="cr-0123456789abcdef0",
                usable_until=END_S - TERMINATED_BEFORE_S,
            ),
        ),
    ],
)
def test_a_capacity_reservation_or_block_can_be_said_in_the_recipe(
    overrides: tuple[str, ...], capacity: PurchaseOption | None
) -> None:
    assert capacity_of(cluster(*overrides)) == capacity


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*P5, BLOCK), "--capacity-reservation-ids cr-0123456789abcdef0 --query"),
        ((*P5, ENDS), "cluster.capacity names no block that ends then"),
        ((*P5, BLOCK, "cluster.block_ends=soon"), "is not a time with its time zone"),
        ((*P5, BLOCK, "cluster.block_ends='2027-01-31T11:30:00'"), "is not a time with its time"),
        ((P5[0], "cluster.capacity=spot"), "cluster.instance names no EC2 type"),
    ],
)
def test_what_a_capacity_lacks_is_told_with_how_it_is_found(
    overrides: tuple[str, ...], words: str
) -> None:
    assert words in refusal(*overrides)


@pytest.mark.parametrize("wrong", ["reserved", "block", "block:cr-", "reservation:p5", "Spot"])
def test_another_word_for_capacity_is_refused(wrong: str) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.capacity.*block:cr-"):
        load_recipe([], [*P5, f"cluster.capacity={wrong}"])


def test_a_block_is_usable_until_ec2_begins_to_end_its_instances() -> None:
    asked = cluster(BLOCK, ENDS)
    assert block_remaining_s(asked, least_s=180, now=END_S - 7200) == 7200 - 1800
    assert block_remaining_s(cluster(), least_s=180, now=END_S) is None


@pytest.mark.parametrize(
    ("left_s", "state"), [(1800 + 170, "is usable for 2 min 50 s more"), (1800, "is over")]
)
def test_a_block_that_leaves_no_time_to_save_is_refused(left_s: float, state: str) -> None:
    with pytest.raises(RequestError, match=f"{state}.*Name another block, or extend"):
        block_remaining_s(cluster(BLOCK, ENDS), least_s=180, now=END_S - left_s)

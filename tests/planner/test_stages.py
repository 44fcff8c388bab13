"""Where a pipeline is cut: whole blocks, the head in the place of some."""

from dataclasses import replace

import pytest

from shardyard.config.layout import Cut, blocks_by_stage
from shardyard.families.presets import PRESETS
from shardyard.planner.stages import cut
from shardyard.planner.workload import Techniques

BY_COST, BY_NUMBER = Techniques(), Techniques(balanced_stages=False)


@pytest.mark.parametrize(
    ("preset", "stages", "expected"),
    [
        ("llama3.1-405b", 16, Cut(8, 7)),  # 126 blocks, as published: 8 each, the ends one less
        ("llama3-70b", 1, Cut(80, 80)),
        ("llama3-70b", 32, Cut(3, 1)),  # the head is worth more than a block; one stays beside it
        ("llama3-70b", 4, Cut(21, 19)),  # the head is worth 1.2 blocks: 20 and 20 are 21.2,
        ("llama2-7b", 8, Cut(4, 4)),
    ],
)
def test_the_head_takes_the_place_of_blocks(preset: str, stages: int, expected: Cut) -> None:
    assert cut(PRESETS[preset].shape, stages, BY_COST) == expected


def test_no_block_is_lost_and_none_is_split() -> None:
    shape = PRESETS["llama3-70b"].shape
    for stages in range(1, 81):
        for techniques in (BY_COST, BY_NUMBER):
            first, last = cut(shape, stages, techniques)
            assert (stages - 1) * first + last >= 80
            assert (stages - 1) * (first - 1) < 80
            assert max(first, last) <= 80 // stages + 2


@pytest.mark.parametrize("preset", ["llama-1b", "llama3-70b", "llama3.1-405b"])
def test_every_block_is_on_one_stage_in_order(preset: str) -> None:
    shape = PRESETS[preset].shape
    for stages in range(1, shape.num_hidden_layers + 1):
        ranges = blocks_by_stage(shape, stages)
        assert [n for blocks in ranges for n in blocks] == list(range(shape.num_hidden_layers))
        sizes = [len(blocks) for blocks in ranges]
        first, last = cut(shape, stages, BY_COST)
        assert min(sizes) >= 1 and sizes[-1] == last
        assert stages == 1 or max(sizes[:-1]) - min(sizes[:-1]) <= 1
        assert stages == 1 or (sizes[:-1] == sorted(sizes[:-1]) and sizes[-2] <= first)


def test_the_stage_of_the_embedding_is_a_short_one() -> None:
    sizes = [len(blocks) for blocks in blocks_by_stage(PRESETS["llama3-70b"].shape, 8)]
    assert sizes == [10, 10, 10, 10, 10, 10, 11, 9]


def test_a_large_head_has_a_stage_of_its_own() -> None:
    shape = replace(PRESETS["llama-1b"].shape, vocab_size=1_000_000)
    assert cut(shape, 2, BY_COST).last < cut(shape, 2, BY_NUMBER).last

"""Which rank has which stages, and how many micro-batches a schedule takes."""

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from shardyard.parallel.pipeline import StagePlan


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "style"), [("interleaved", 3, "loop"), ("zb-v", 2, "v")]
)
def test_ranks_have_the_stages_that_the_schedule_expects(
    schedule: str, virtual_stages: int, style: str
) -> None:
    for pp in (2, 3, 4):
        plan = StagePlan(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
        theirs = generate_stage_to_rank_mapping(pp, plan.num_stages, style=style)
        assert {stage: plan.rank_of(stage) for stage in range(plan.num_stages)} == theirs
        assert sorted(s for rank in range(pp) for s in plan.stages_of(rank)) == sorted(theirs)


def test_first_and_last_stage_meet_on_the_first_rank_of_a_v() -> None:
    plan = StagePlan(pp=4, schedule="zb-v", virtual_stages=2)
    assert [plan.stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(
    ("schedule", "pp", "given", "taken"),
    [
        ("1f1b", 4, 5, 5),
        ("gpipe", 4, 3, 4),
        ("interleaved", 2, 3, 3),
        ("interleaved", 2, 5, 6),  # two rounds of 2.5 are none: three of 2
        ("zero-bubble", 4, 9, 10),
        ("interleaved", 4, 10, 10),
        ("zb-v", 2, 5, 5),
    ],
)
def test_a_schedule_takes_at_least_the_micro_batches_of_the_step(
    schedule: str, pp: int, given: int, taken: int
) -> None:
    plan = StagePlan(pp=pp, schedule=schedule, virtual_stages=2)
    assert plan.passes(given) == taken

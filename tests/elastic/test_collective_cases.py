"""Collectives on real process groups: right values are right, and each altered one is counted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardyard.elastic.bench_worker import CollectiveCase, measure_row
from shardyard.rundir.network import COLLECTIVES, Collective, NetworkBench
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")
SIZES = (8, 64, 1024, 4096)
ALTERED = 5


def _bench() -> NetworkBench:
    return NetworkBench(
        collectives=COLLECTIVES, begin_bytes=8, end_bytes=4096, warmup=1, iterations=2,
        is_pairs=False, processes=1,
    )  # fmt: skip


def _measure() -> dict[tuple[str, int], Any]:
    found: dict[tuple[str, int], Any] = {}
    for collective in COLLECTIVES:
        for size in SIZES:
            case = CollectiveCase(collective, size, device=CPU)
            if case.count:
                row = measure_row(case, _bench(), CPU)
                found[collective, size] = (case.size_bytes, case.count, row)
    return found


def _measure_altered(collective: Collective) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row as it is, and with the first values that rank 1 sends altered."""
    case = CollectiveCase(collective, 4096, device=CPU)
    sound = measure_row(case, _bench(), CPU)
    fill = case.fill

    def spoil() -> None:
        fill()
        case._source[:ALTERED] += 1
        own = case._own_part(case._target) if collective == "all_gather" else case._target
        own[:ALTERED] += 1

    if dist.get_rank() == 1:
        case.fill = spoil  # type: ignore[method-assign]
    return sound, measure_row(case, _bench(), CPU)


def test_all_values_of_sound_collectives_are_right_at_every_size() -> None:
    found = run_on_ranks(_measure, 3)
    assert all(each.keys() == found[0].keys() for each in found)
    for (collective, size), (bytes_, count, row) in found[0].items():
        whole = size // 4 if collective == "all_reduce" else size // 12 * 3
        assert bytes_ == 4 * whole
        assert count == (whole if collective == "all_reduce" else whole // 3)
        assert row["out_wrong"] == 0, (collective, size)
        assert row["in_wrong"] == (None if collective == "alltoall" else 0), (collective, size)
        assert row["out_s"] > 0 and row["in_s"] > 0
    assert ("all_gather", 8) not in found[0]  # two numbers over three ranks


@pytest.mark.parametrize(
    ("collective", "wrong"),
    [
        ("all_reduce", 2 * ALTERED),  # each rank has the wrong sums
        ("all_gather", 2 * ALTERED),  # each rank has the wrong part
        ("reduce_scatter", ALTERED),  # rank 0 alone has these sums
        ("alltoall", ALTERED),  # rank 0 alone was sent these
    ],
)
def test_each_value_that_one_rank_altered_is_counted(collective: Collective, wrong: int) -> None:
    for sound, altered in run_on_ranks(_measure_altered, 2, collective):
        assert sound["out_wrong"] == 0 and not sound["in_wrong"]
        assert altered["out_wrong"] == wrong
        assert altered["in_wrong"] == (None if collective == "alltoall" else wrong)

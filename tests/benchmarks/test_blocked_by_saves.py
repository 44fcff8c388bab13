"""A small one measures all three ways."""

from pathlib import Path

import pytest

from benchmarks.blocked_by_saves import RANKS, WAYS, blocked_s
from tests.distributed.ranks import run_on_ranks


@pytest.mark.heavy
def test_a_small_one_measures_all_three_ways(tmp_path: Path) -> None:
    size, found = run_on_ranks(blocked_s, RANKS, str(tmp_path), 1, 32)[0]
    assert size > 0 and list(found) == list(WAYS)
    for times in found.values():
        assert [0 < stood < written for stood, written in times] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]

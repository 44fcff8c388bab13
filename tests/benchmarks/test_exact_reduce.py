"""The benchmark of exact sums runs, small, and counts twice the bytes."""

import pytest

from benchmarks.exact_reduce import Case, measure

pytestmark = pytest.mark.slow


def test_it_measures_both_and_counts_their_bytes() -> None:
    case = Case(bar=1e9, seq_len=32, micro_batch=1, micro_batches=2)
    found = measure(case, pairs=2, warm_up=1, strategy="FULL_SHARD")
    assert found["is_met"] and found["ratio"] > 0
    assert len(found["step_times_s"]["exact"]) == len(found["step_times_s"]["fp32"]) == 2
    # the largest contributions, squares and losses come on top
    assert 2.0 <= found["sent_bytes"]["exact"] / found["sent_bytes"]["fp32"] < 2.1

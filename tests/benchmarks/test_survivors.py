"""The prototype of survivors that keep their process, small."""

import pytest

from benchmarks.survivors import WAYS, measure, summarize

pytestmark = pytest.mark.slow


def test_one_kill_of_each_way_is_measured() -> None:
    rows = measure(1, compiles=False)
    assert [row["way"] for row in rows] == list(WAYS)
    assert all(row["seconds"] > 0 for row in rows)
    told = summarize(rows)
    assert told["shorter_by"] == pytest.approx(1 - told["kept"] / told["replaced"], abs=1e-3)

"""The measurement of memory at import and export, of a small model."""

from pathlib import Path

import pytest

from benchmarks.folder_memory import measure

pytestmark = pytest.mark.slow

FIXED_BYTES = 32 * 2**20
"""What does not grow with a model, which of one so small is more than a tensor of it."""


def test_a_rank_takes_its_share_and_one_tensor_and_an_export_one_tensor(tmp_path: Path) -> None:
    found = measure(layers=2, hidden=256, place=tmp_path)
    assert [row["share_bytes"] for row in found["import"]] == [found["model_bytes"] // 2] * 2
    rows = [*found["import"], *found["export"]]
    assert len(rows) == 3 and all(row["samples"] > 3 for row in rows)
    wrong = [row for row in rows if row["peak_bytes"] > row["bar_bytes"] + FIXED_BYTES]
    assert wrong == []
    # a whole second copy would be seen
    assert all(row["peak_bytes"] >= row["share_bytes"] // 2 for row in found["import"])

"""The table of a profile: predicted beside measured, by the names that the plan has."""

import pytest

from shardyard.observe.step_breakdown import COMPUTE, PARTS, ROWS, TERMS, table
from shardyard.planner.step_time import NAMES


def zeros(**seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(TERMS, 0.0), **{k.replace("_", " "): s for k, s in seconds.items()}}


def test_every_term_of_the_plan_has_one_row_and_its_name() -> None:
    planned = [name for row in (COMPUTE, *ROWS) for name in row.planned]
    assert sorted(planned) == sorted(name for name, _ in NAMES.values())
    assert {name for row in PARTS for name in row.planned} < set(COMPUTE.planned)


def test_predicted_stands_beside_measured_and_the_extremes_are_named() -> None:
    by_rank = {
        0: zeros(matrix_products=0.3, data_parallel=0.1),
        4: zeros(matrix_products=0.5, attention=0.1, data=0.2),
    }
    predicted = {"matrix products": 0.2, "vocabulary": 0.05, "data parallel": 0.3, "offload": 0.1}
    rows = {row.name: row for row in table(by_rank, predicted)}
    assert list(rows) == [
        "compute", "matrix products", "attention", "data parallel", "offload", "data",
    ]  # fmt: skip
    compute = rows["compute"]
    assert compute.predicted_s == pytest.approx(0.25)
    assert compute.measured_s == pytest.approx(0.45)
    assert (compute.lowest_rank, compute.highest_rank) == (0, 4)
    assert rows["data"].predicted_s == 0.0  # the plan knows the term and expects nothing
    assert rows["data parallel"].measured_s == pytest.approx(0.05)
    assert rows["offload"].highest_s == 0.0
    assert [name for name, row in rows.items() if row.is_part] == ["matrix products", "attention"]
    whole = [row for row in rows.values() if not row.is_part]
    assert sum(row.measured_s for row in whole) == pytest.approx(0.6)


def test_without_a_plan_nothing_is_predicted() -> None:
    (row, _) = table({0: zeros(attention=1.0)}, {})
    assert row.predicted_s is None

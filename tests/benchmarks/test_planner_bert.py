"""BERT on A100s: what is published with its settings is met, what is not says what is missing."""

import json
from pathlib import Path

import pytest

from benchmarks import planner_bert


@pytest.mark.heavy
def test_the_published_rates_of_bert_4b_are_met_on_every_number_of_nodes(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert planner_bert.main(["--out", str(out)]) == 0
    rows = json.loads(out.read_text())["nemo_4b"]
    assert [row["nodes"] for row in rows] == [1, 2, 4, 8, 16]
    assert [row["is_within_bar"] for row in rows] == [True] * 5
    assert max(abs(row["error"]) for row in rows) > 0.05, "nothing is fitted to them"


def test_what_is_missed_or_cannot_be_said_names_the_term() -> None:
    found = planner_bert.mosaic()
    assert not found["baseline"]["is_within_bar"]
    assert found["baseline"]["predicted_hours"] < planner_bert.BASELINE_HOURS
    assert "its head scores every token" in found["baseline"]["missing"]
    assert "how many steps 1.13 h are" in found["mosaicbert"]["missing"]
    assert "predicted_hours" not in found["mosaicbert"]

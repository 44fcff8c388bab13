"""What a real run measured stands beside what the plan of its settings predicts."""

from typing import Any

import pytest

from tests.e2e.shardyard import Answer, Place

OWN = "run.dir=advised"  # in which no run of another test lies
DETAILS = ("plan", "tiny.yaml", OWN, "--details", "--layouts=0", "--json")


def advice(place: Place, *settings: str) -> dict[str, Any]:
    answer = place.run(*DETAILS, *settings)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = answer.json["advice"]
    return found


@pytest.mark.slow
def test_a_run_is_found_by_the_settings_it_was_trained_with(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    full = "memory.recompute=full"
    done = place.run("train", "tiny.yaml", OWN, full, "run.id=recomputed", "run.steps=12")
    assert done.code == 0, done.err
    found = advice(place)
    assert found["measured"] is None
    measured = {row["name"]: row["measured"] for row in found["levers"] if row["measured"]}
    assert list(measured) == ["recompute full"]
    assert measured["recompute full"]["run_id"] == "recomputed"
    assert measured["recompute full"]["step_s"] > 0
    again = advice(place, full)["measured"]
    assert again == measured["recompute full"]

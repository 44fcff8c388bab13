"""Pairs of answers: steps are those of transformers' model beside a frozen copy of it, one pair at
a time and unpacked, in every layout; no copy is held."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_steps
from tests.distributed.preference_runs import (
    next_to_a_plain_loop,
    preference_run,
    prepare_pairs,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "smoothed": {"label_smoothing": 0.2},
    "ipo": {"loss_type": "ipo"},
    "orpo": {"loss_type": "orpo"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Pairs, prepared."""
    return prepare_pairs(tmp_path_factory.mktemp("pairs") / "data")


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_a_plain_loop(prepared: Corpus, tmp_path: Path, name: str) -> None:
    run_dir = preference_run(tmp_path / "run", prepared, task=LOSSES[name])
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == len(losses)
    assert max(apart.values()) < 1e-4, apart
    assert run_dir.reference.exists() == (name != "orpo")

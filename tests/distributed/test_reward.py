"""Reward models: steps are those of transformers' classifier on one dialogue at a time, unpacked,
in every layout, and an export gives the same rewards in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.rundir.jsonl import read_evaluations, read_steps
from tests.distributed.label_runs import LAYOUTS, saved_weights
from tests.distributed.preference_runs import train_until_killed
from tests.distributed.ranks import run_on_ranks
from tests.distributed.reward_runs import (
    next_to_a_plain_loop,
    prepare_rated,
    reward_run,
    scores_of_export,
)
from tests.distributed.runs import Corpus, train_here


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Pairs, prepared."""
    return prepare_rated(tmp_path_factory.mktemp("rated") / "data")


@pytest.mark.parametrize("center_rewards", [0.0, 0.05])
def test_steps_are_those_of_a_plain_loop(
    prepared: Corpus, tmp_path: Path, center_rewards: float
) -> None:
    run_dir = reward_run(tmp_path / "run", prepared, task={"center_rewards": center_rewards})
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == len(losses)
    assert max(apart.values()) < 1e-5, apart
    assert not run_dir.reference.exists()


LORA = {"preset": "llama-tiny", "lora": {"rank": 4, "alpha": 8}}


@pytest.mark.parametrize("layout", [None, "zero-3", pytest.param("tp", marks=pytest.mark.slow)])
def test_adapters_and_their_head_take_the_steps_of_peft(
    prepared: Corpus, tmp_path: Path, layout: str | None
) -> None:
    """PEFT's adapters of SEQ_CLS, whose head is trained whole, on one dialogue at a time."""
    whole = reward_run(tmp_path / "whole", prepared, model=LORA)
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, whole)[0]
    losses = [line["loss"] for line in read_steps(whole.metrics)]
    if layout is None:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert len(set(losses)) == len(losses)
        assert "score.weight" in apart and max(apart.values()) < 1e-5, apart
        return
    processes, parallel = LAYOUTS[layout]
    split = reward_run(tmp_path / layout, prepared, processes, model=LORA, parallel=parallel)
    run_on_ranks(train_here, processes, split)
    found = [line["loss"] for line in read_steps(split.metrics)]
    assert found == pytest.approx(losses, rel=1e-5)


QUICK = ["zero-3", "tp"]


@pytest.mark.parametrize(
    "layouts",
    [
        QUICK,
        pytest.param([each for each in LAYOUTS if each not in QUICK], marks=pytest.mark.slow),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(
    prepared: Corpus, tmp_path: Path, layouts: list[str]
) -> None:
    """With dropout, and micro-batches that do not divide evenly over the ranks."""
    model: dict[str, Any] = {"model": {"preset": "llama-tiny", "dropout": 0.1}}
    one = reward_run(tmp_path / "one", prepared, **model)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    for layout in layouts:
        processes, parallel = LAYOUTS[layout]
        other = reward_run(tmp_path / layout, prepared, processes, **model, parallel=parallel)
        run_on_ranks(train_here, processes, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        assert again[0] == pytest.approx(evaluated[0], rel=1e-4, abs=1e-5), layout


def test_an_interrupted_run_ends_with_the_same_bits(prepared: Corpus, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "parallel": {"dp_shard": 2, "zero": 3},
    }
    whole, cut = (reward_run(tmp_path / name, prepared, 2, **sections) for name in ("whole", "cut"))
    run_on_ranks(train_here, 2, whole)
    with pytest.raises(Exception, match="rank"):
        run_on_ranks(train_until_killed, 2, cut)
    assert cut.checkpoint_steps() == [2]
    run_on_ranks(train_here, 2, cut)
    weights = [saved_weights(run_dir) for run_dir in (whole, cut)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    lines = [list(read_steps(run_dir.metrics)) for run_dir in (whole, cut)]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


@pytest.mark.parametrize("merged", [False, True])
def test_an_export_gives_the_same_rewards_in_transformers(
    prepared: Corpus, tmp_path: Path, *, merged: bool
) -> None:
    sections: dict[str, Any] = {"model": LORA} if merged else {}
    run_dir = reward_run(tmp_path / "run", prepared, **sections)
    rows, to = Path(prepared.source), tmp_path / "out"
    expected = run_on_ranks(scores_of_export, 1, run_dir, rows, to, merged)[0]
    found = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < expected["accuracy"] < 1 and expected["margin"] != 0
    again = reward_run(
        tmp_path / "again", prepared, run={"steps": 1}, optim={"lr": 1e-30},
        model={"preset": None, "path": str(to)}, data={"tokenizer": "auto"},
    )  # fmt: skip
    run_on_ranks(train_here, 1, again)
    kept = next(iter(read_evaluations(again.metrics)))["eval"]
    assert kept["loss"] == pytest.approx(found["loss"], rel=1e-5), "the head is kept"

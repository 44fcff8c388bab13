"""Heads over labels: steps are those of transformers' own models in a plain loop, in every layout;
evaluations are those of their outputs, and an export opens with equal logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardyard.rundir.confusion import read_confusion
from shardyard.rundir.jsonl import read_evaluations, read_steps
from tests.distributed.label_runs import (
    LAYOUTS,
    labelled_run,
    loss_of_transformers_on_export,
    next_to_a_plain_loop,
    prepare_rows,
    saved_weights,
    train_until_killed,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, train_here

CASES = {
    "pairs": ("pairs", "bert-tiny"),
    "numbers": ("numbers", "bert-tiny"),
    "last token": ("single", "llama-tiny"),
    "tokens": ("tokens", "bert-tiny"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    """Rows of each case, prepared."""
    return {
        name: prepare_rows(tmp_path_factory.mktemp(name.replace(" ", "-")) / "data", *case)
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_transformers_own_model(
    prepared: dict[str, Corpus], tmp_path: Path, name: str
) -> None:
    run_dir = labelled_run(tmp_path / "run", prepared[name], *CASES[name])
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    # no softmax sees a bias of keys: its gradient is rounding alone
    seen = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
    assert max(seen.values()) < 1e-4, seen


QUICK = {"pairs": ["zero-3", "tp"], "last token": ["tp"], "tokens": ["tp"]}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *QUICK.items(),
        *(
            pytest.param(name, [each for each in LAYOUTS if each not in QUICK.get(name, [])],
                         marks=pytest.mark.slow)
            for name in CASES
        ),
    ],
)  # fmt: skip
def test_every_layout_takes_the_steps_of_one_process(
    prepared: dict[str, Corpus], tmp_path: Path, name: str, layouts: list[str]
) -> None:
    """With dropout, and micro-batches that do not divide evenly over the ranks."""
    model: dict[str, Any] = {"model": {"preset": CASES[name][1], "dropout": 0.1}}
    one = labelled_run(tmp_path / "one", prepared[name], *CASES[name], **model)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    confusion = read_confusion(one)
    assert (confusion is None) == (name == "numbers")
    if confusion is not None:
        accuracy = confusion.right / confusion.predictions
        assert accuracy == pytest.approx(evaluated[0]["accuracy"])
    for layout in layouts:
        processes, parallel = LAYOUTS[layout]
        other = labelled_run(
            tmp_path / layout, prepared[name], *CASES[name], processes, **model, parallel=parallel
        )
        run_on_ranks(train_here, processes, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        # a correlation is of differences, which cancel
        assert again[0] == pytest.approx(evaluated[0], rel=1e-5, abs=2e-3), layout
        assert read_confusion(other) == confusion, layout


def test_an_interrupted_run_ends_with_the_same_bits(
    prepared: dict[str, Corpus], tmp_path: Path
) -> None:
    """Ranks die after a checkpoint, without a word, and a second attempt continues from it."""
    sections: dict[str, Any] = {
        "model": {"preset": "bert-tiny", "dropout": 0.1},
        "checkpoint": {"every": 2},
        "parallel": {"dp_shard": 2, "zero": 3},
    }
    whole, cut = (
        labelled_run(tmp_path / name, prepared["pairs"], *CASES["pairs"], 2, **sections)
        for name in ("whole", "cut")
    )
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


@pytest.mark.parametrize("name", ["pairs", "numbers", "last token", "tokens"])
def test_an_export_opens_in_transformers_with_equal_logits(
    prepared: dict[str, Corpus], tmp_path: Path, name: str
) -> None:
    run_dir = labelled_run(tmp_path / "run", prepared[name], *CASES[name])
    loss = run_on_ranks(loss_of_transformers_on_export, 1, run_dir, tmp_path / "out")[0]
    evaluated = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    assert loss == pytest.approx(evaluated["loss"], rel=1e-5)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    names = dict(enumerate(prepared[name].facts.label_names or ["LABEL_0"]))
    assert config.id2label == names
    assert config.label2id == {each: number for number, each in names.items()}
    problem = {"numbers": "regression", "tokens": None}
    assert config.problem_type == problem.get(name, "single_label_classification")
    again = labelled_run(
        tmp_path / "again", prepared[name], *CASES[name], run={"steps": 1},
        model={"preset": None, "path": str(tmp_path / "out")},
        optim={"name": "sgd", "lr": 1e-30, "betas": (0.9, 0.95), "eps": 1e-8},
        data={"tokenizer": "auto", "tokenizer_kind": "bpe"},
    )  # fmt: skip
    run_on_ranks(train_here, 1, again)
    kept = next(iter(read_evaluations(again.metrics)))["eval"]
    assert kept["loss"] == pytest.approx(evaluated["loss"], rel=1e-5), "the head is kept"

"""A run of a mixture reads the same stream on any processes, and judges each source by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.data.text_datasets import prepare_text
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

DIALOGUES = {"chat_template": "alpaca", "seq_len": 64, "pack": "whole", "too_long": "cut"}


def mixture(folder: Path, corpus: Corpus, **data: Any) -> DatasetMetadata:
    """The usual text, and other text, or dialogues, of which there is little."""
    if data:
        rows = [{"prompt": f"What is {n}^2?", "completion": f"{n * n}."} for n in range(400)]
    else:
        rows = [{"text": f"{n} {n * n} {n**3} {n**4}"} for n in range(400)]
    (folder / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shares = [
        {"name": "code", "source": corpus.source, "weight": 2.0},
        {"name": "numbers", "source": str(folder / "numbers.jsonl"), "weight": 1.0},
    ]
    if data:
        shares[1]["format"] = "chat"
    usual = {"dir": str(folder / "out"), "vocab_size": 512, "workers": 1, "eval_fraction": 0.2}
    recipe = Recipe.model_validate({"data": {"mixture": shares, **usual, **data}})
    return prepare_text(recipe, model_dir=None, progress=lambda *_: None)


def drained_at(run_dir: RunDir, step: int) -> str:
    """Train until a step, as a drain that every rank knows of."""
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= step

    return train(run_dir, 0, Hooks(generation=0, drain_requested=drain_requested, events=None))


@pytest.mark.parametrize(
    "data", [{}, pytest.param(DIALOGUES, marks=pytest.mark.system)], ids=["text", "dialogues"]
)
def test_a_mixture_goes_on_with_other_processes(
    corpus: Corpus, tmp_path: Path, data: dict[str, Any]
) -> None:
    mixed = Corpus(corpus.source, str(tmp_path / "out"), mixture(tmp_path, corpus, **data))

    run_data = {name: value for name, value in data.items() if name != "chat_template"}

    def sections(processes: int) -> dict[str, dict[str, Any]]:
        return {
            "run": {"steps": 6},
            "task": {"eval_every_steps": 3},
            "cluster": {"devices": processes},
            "data": {"eval_fraction": 0.2, **run_data},
        }

    whole = make_run(tmp_path / "whole", mixed, sections(1))
    parts = make_run(tmp_path / "parts", mixed, sections(2))
    assert run_on_ranks(train_here, 1, whole) == [FINISHED]
    assert run_on_ranks(drained_at, 2, parts, 3) == [DRAINED] * 2
    make_run(parts.path, mixed, sections(3), attempt=1)
    assert run_on_ranks(train_here, 3, parts, 1) == [FINISHED] * 3

    losses = [[line["loss"] for line in read_steps(run.metrics)] for run in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 6
    expected, found = (read_evaluations(run.metrics)[-1] for run in (whole, parts))
    assert found["eval"]["loss"] == pytest.approx(expected["eval"]["loss"], rel=1e-5)
    by_source = {name: scores["loss"] for name, scores in expected["eval_sources"].items()}
    low, high = sorted(by_source.values())
    assert set(by_source) == {"code", "numbers"} and low < expected["eval"]["loss"] < high
    for name, loss in by_source.items():
        assert found["eval_sources"][name]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.system
def test_a_dataset_of_ones_own_in_a_mixture_goes_on_with_other_processes(
    corpus: Corpus, tmp_path: Path
) -> None:
    shares = [
        {"name": "code", "source": corpus.source, "weight": 2.0},
        {"name": "own", "module": "tests.data.own.own_datasets:noisy", "weight": 1.0},
    ]
    data = {
        "mixture": shares, "dir": str(tmp_path / "out"), "tokenizer": corpus.facts.dir,
        "vocab_size": 512, "workers": 1, "seq_len": 32, "module_workers": 1,
    }  # fmt: skip
    recipe = Recipe.model_validate({"data": data})
    facts = prepare_text(recipe, model_dir=None, progress=lambda *_: None)
    mixed = Corpus(corpus.source, str(tmp_path / "out"), facts)

    def sections(processes: int) -> dict[str, dict[str, Any]]:
        task = {"eval_every_steps": 3}
        return {"run": {"steps": 6}, "task": task, "cluster": {"devices": processes}, "data": data}

    whole = make_run(tmp_path / "whole", mixed, sections(1))
    parts = make_run(tmp_path / "parts", mixed, sections(2))
    assert run_on_ranks(train_here, 1, whole) == [FINISHED]
    assert run_on_ranks(drained_at, 2, parts, 3) == [DRAINED] * 2
    make_run(parts.path, mixed, sections(3), attempt=1)
    assert run_on_ranks(train_here, 3, parts, 1) == [FINISHED] * 3
    losses = [[line["loss"] for line in read_steps(run.metrics)] for run in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 6
    expected, found = (read_evaluations(run.metrics)[-1] for run in (whole, parts))
    assert set(expected["eval_sources"]) == {"code", "own"}
    for name, scores in expected["eval_sources"].items():
        assert found["eval_sources"][name]["loss"] == pytest.approx(scores["loss"], rel=1e-5)

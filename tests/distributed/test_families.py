"""What a family has that Llama has not: every step of it on two processes is that of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.families.random_models import small_shape, theirs

ROWS = 512
"""Of the table of tokens: as many as the corpus has."""
STEPS = 3

SPLIT: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
    "zero-bubble": {"pp": 2, "schedule": "zero-bubble", "zero": 1},
}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mistral": ({"sliding_window": 5}, ["FULL_SHARD", "tp", "pp", "cp"]),
    "phi3": ({"sliding_window": 5}, ["FULL_SHARD", "tp", "pp", "cp"]),
    "olmo2": ({}, ["FULL_SHARD", "tp", "pp", "cp"]),
    "granite": ({}, ["FULL_SHARD", "tp", "pp", "cp"]),
    "gemma2": (
        {"sliding_window": 5, "final_logit_softcapping": 1.0, "attn_logit_softcapping": 1.0},
        ["FULL_SHARD", "tp", "pp", "cp"],
    ),
    "gemma3_text": ({"sliding_window": 5}, ["FULL_SHARD", "tp", "pp", "cp"]),
    "gpt2": ({}, ["FULL_SHARD", "tp", "pp", "cp", "zero-bubble"]),
    "gpt_neox": ({}, ["FULL_SHARD", "tp", "pp", "cp", "zero-bubble"]),
}
"""Sizes, beside those of the smallest model, and how it is split."""


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


@pytest.mark.parametrize(
    "model_type",
    [name if name == "phi3" else pytest.param(name, marks=pytest.mark.system) for name in CASES],
)
def test_a_step_of_a_family_does_not_depend_on_how_it_is_split(
    corpus: Corpus, tmp_path: Path, model_type: str
) -> None:
    more, splits = CASES[model_type]
    source = tmp_path / "source"
    shape = replace(small_shape(model_type), vocab_size=ROWS, **more)
    theirs(shape).save_pretrained(source)
    layouts = {"whole": dict[str, Any](), **{name: SPLIT[name] for name in splits}}
    runs = {
        name: make_run(
            tmp_path / name,
            corpus,
            {
                "run": {"steps": STEPS},
                "model": {"preset": None, "path": str(source), "weights": "load"},
                "optim": {"lr": 1e-3, "global_batch": 4, "name": "sgd", "weight_decay": 0.0},
                "parallel": parallel,
                "cluster": {"devices": 2 if parallel else 1},
            },
        )
        for name, parallel in layouts.items()
    }
    run_on_ranks(_train_all, 1, [runs.pop("whole")])
    run_on_ranks(_train_all, 2, list(runs.values()))
    expected = _numbers(RunDir(tmp_path / "whole"))
    for name, run_dir in runs.items():
        assert _numbers(run_dir) == pytest.approx(expected, rel=1e-5), name


def _numbers(run_dir: RunDir) -> list[float]:
    steps = read_steps(run_dir.metrics)
    assert len(steps) == STEPS
    return [line[name] for line in steps for name in ("loss", "grad_norm")]

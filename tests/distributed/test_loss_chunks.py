"""A loss in chunks takes the same steps as one of all logits, in every layout."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

EXACT = 1e-5
BF16 = 3e-2

CASES: dict[str, tuple[int, dict[str, dict[str, Any]], float]] = {
    # processes, sections, how near to one process with all logits
    "zero 3": (2, {"parallel": {"dp_shard": 2}}, EXACT),
    "tp": (2, {"parallel": {"tp": 2}}, EXACT),
    "pp": (2, {"parallel": {"pp": 2}, "optim": {"micro_batch": 3}}, EXACT),
    "bert, tied": (
        2,
        {
            "parallel": {"tp": 2},
            "model": {"preset": "bert-tiny"},
            "task": {"name": "masked_lm"},
        },
        EXACT,
    ),
    "bf16": (2, {"parallel": {"dp_shard": 2}, "precision": {"compute": "bf16"}}, BF16),
}
"""The others: cut, gathered, or scheduled in other ways."""
MORE: dict[str, tuple[int, dict[str, dict[str, Any]], float]] = {
    "zero 1": (2, {"parallel": {"dp_shard": 2, "zero": 1}}, EXACT),
    "zero 2": (2, {"parallel": {"dp_shard": 2, "zero": 2}}, EXACT),
    "cp": (2, {"parallel": {"cp": 2}}, EXACT),
    "gpipe": (2, {"parallel": {"pp": 2, "schedule": "gpipe"}, "optim": {"micro_batch": 3}}, EXACT),
    "zero-bubble": (
        2,
        {"parallel": {"pp": 2, "schedule": "zero-bubble", "zero": 2}, "optim": {"micro_batch": 3}},
        EXACT,
    ),
    "interleaved": (
        2,
        {
            "parallel": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
            "model": {"preset": "llama-tiny-deep"},
            "optim": {"micro_batch": 3},
        },
        EXACT,
    ),
    "bert over pp": (
        2,
        {
            "parallel": {"pp": 2},
            "model": {"preset": "bert-tiny"},
            "task": {"name": "masked_lm"},
            "optim": {"micro_batch": 3},
        },
        EXACT,
    ),
    "logits with a soft cap": (
        2,
        {"parallel": {"tp": 2}, "model": {"preset": "gemma2-tiny"}},
        EXACT,
    ),
    "divided logits": (2, {"parallel": {"tp": 2}, "model": {"preset": "granite-tiny"}}, EXACT),
    "frozen head": (2, {"parallel": {"dp_shard": 2}, "model": {"frozen": ["lm_head"]}}, EXACT),
    "tp and dp": (4, {"parallel": {"tp": 2, "dp_shard": 2}}, EXACT),
    "pp and tp": (4, {"parallel": {"tp": 2, "pp": 2}, "optim": {"micro_batch": 3}}, EXACT),
}


def _sections(
    processes: int, given: dict[str, dict[str, Any]], chunk: int | str
) -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 3},
        "model": {"dropout": 0.1},
        "optim": {"micro_batch": 2, "lr": 1e-3},
        "task": {"eval_every_steps": 3, "generate_tokens": 2, "prompt": "def"},
        "memory": {"loss_chunk": chunk},
        "cluster": {"devices": processes},
    }
    return {name: {**base.get(name, {}), **given.get(name, {})} for name in {*base, *given}}


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


def _seen(run_dir: RunDir) -> list[float]:
    found = [value for line in read_steps(run_dir.metrics) for value in _pair(line)]
    judged = [line["eval"] for line in read_evaluations(run_dir.metrics)]
    return [*found, *(value for each in judged for value in each.values())]


def _pair(line: dict[str, Any]) -> tuple[float, float]:
    return line["loss"], line["grad_norm"]


@pytest.mark.parametrize(
    "cases",
    [
        {name: CASES[name] for name in ("tp", "bf16")},
        pytest.param({**CASES, **MORE}, marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_chunks_take_the_same_steps(
    corpus: Corpus, tmp_path: Path, cases: dict[str, tuple[int, dict[str, dict[str, Any]], float]]
) -> None:
    wholes, chunked = {}, {}
    for name, (processes, given, _) in cases.items():
        alone = {key: value for key, value in given.items() if key not in ("parallel", "precision")}
        wholes[name] = make_run(tmp_path / f"{name} whole", corpus, _sections(1, alone, "none"))
        chunked[name] = make_run(tmp_path / name, corpus, _sections(processes, given, 7))
    run_on_ranks(_train_all, 1, list(wholes.values()))
    for processes in {case[0] for case in cases.values()}:
        run_on_ranks(
            _train_all, processes, [chunked[n] for n, c in cases.items() if c[0] == processes]
        )
    for name, (_, _, tolerance) in cases.items():
        expected = _seen(wholes[name])
        assert len(expected) > 7
        assert _seen(chunked[name]) == pytest.approx(expected, rel=tolerance), name

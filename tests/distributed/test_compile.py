"""Compiled blocks take the same steps on every axis."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here


def _sections(extra: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = {
        "model": {"dropout": 0.1},
        "parallel": {"dp_shard": 2},
        "cluster": {"devices": 2},
    }
    return {name: {**base.get(name, {}), **extra.get(name, {})} for name in {*base, *extra}}


def _steps(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


COMPILED: list[tuple[int, dict[str, dict[str, Any]]]] = [
    (2, {"memory": {"recompute": "full"}}),
    (2, {"memory": {"recompute": "selective"}}),
    (2, {"parallel": {"tp": 2}}),
    (2, {"parallel": {"pp": 2}, "memory": {"recompute": "full"}}),
    (2, {"parallel": {"cp": 2}}),
    (2, {"parallel": {"cp": 2, "cp_exchange": "heads"}, "memory": {"recompute": "full"}}),
    (2, {"parallel": {"pp": 2}}),
    (2, {"parallel": {"ep": 2}, "model": {"preset": "mixtral-tiny"}}),
    (2, {"parallel": {"tp": 2}, "model": {"preset": "mixtral-tiny"}}),
    (
        2,
        {
            "parallel": {"tp": 2},
            "model": {"preset": "bert-tiny"},
            "task": {"name": "masked_lm"},
        },
    ),
]


def _train_compiled(run_dirs: list[RunDir]) -> list[int]:
    """Train; of each run, the graphs that were compiled. They are traced and differentiated as
    ever, and then run operator by operator: a C++ compiler would take minutes on two cores."""
    import torch
    from torch import nn
    from torch._dynamo.utils import counters

    of_the_real_backend = nn.Module.compile
    graphs = []
    eager = partialmethod(of_the_real_backend, backend="aot_eager")
    nn.Module.compile = eager  # type: ignore[method-assign,assignment]
    for run_dir in run_dirs:
        torch.compiler.reset()  # else a run finds the graphs of the one before, or too many of them
        counters.clear()
        train_here(run_dir)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.slow
def test_compiled_blocks_take_the_same_steps(corpus: Corpus, tmp_path: Path) -> None:
    pairs = []
    for index, (processes, extra) in enumerate(COMPILED):
        sections = _sections({"run": {"steps": 2}, "cluster": {"devices": processes}, **extra})
        if "parallel" in extra:
            sections["parallel"] = extra["parallel"]
        plain = make_run(tmp_path / f"{index}-plain", corpus, sections)
        sections["model"] = {**sections["model"], "compile": True}
        pairs.append((plain, make_run(tmp_path / f"{index}-compiled", corpus, sections)))
    runs = [run_dir for pair in pairs for run_dir in pair]
    graphs = run_on_ranks(_train_compiled, 2, runs, timeout_s=1200)[0]
    assert graphs[0::2] == [0] * len(pairs) and min(graphs[1::2]) > 0
    for plain, compiled in pairs:
        for found, expected in zip(_steps(compiled), _steps(plain), strict=True):
            assert found == pytest.approx(expected, rel=1e-5), compiled.path.name

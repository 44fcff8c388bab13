"""To torch's compiler a block is one graph: no breaks, and no other for the next block or step.

A model has more blocks here than torch compiles a function for (8): where each wanted a graph of
its own, torch would run the others operator by operator, and say so nowhere.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from shardyard.families.registry import FAMILIES, family_of
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.families.random_models import small_shape, theirs

BLOCKS = 10
MODES: tuple[Any, ...] = ("none", "selective", "full", 3, ("mlp",))
ALTERNATING: dict[str, Any] = {
    "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention") * (BLOCKS // 2)
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "phi3": {"sliding_window": 5},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
}
SHORT: tuple[tuple[str, Any], ...] = (("bf16", "none"), ("bf16", "selective"), ("fp8", "selective"))
ROWS = 520
"""Of the table of tokens: those of the corpus, and one that hides tokens."""
MLP = {"gpt2": "mlp", "gpt_neox": "mlp", "bert": "intermediate"}
ONE_GRAPH = [name for name in FAMILIES if family_of(name).is_one_graph]
MARKS: dict[str, Any] = {"llama": (), "gemma2": pytest.mark.system, "bert": pytest.mark.system}
"""The quick half has one, CI two more: layers of two kinds, and no causal mask. All are slow."""


def _graphs(run_dirs: list[RunDir]) -> list[tuple[str, int]]:
    """Train; of each run, its graphs. A graph is traced and differentiated as ever, and run
    operator by operator; what is no whole graph is an error."""
    import torch
    from torch import nn
    from torch._dynamo.utils import counters

    whole = partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True)
    nn.Module.compile = whole  # type: ignore[method-assign,assignment]
    found = []
    for run_dir in run_dirs:
        torch.compiler.reset()
        counters.clear()
        train_here(run_dir)
        found.append((run_dir.path.name, counters["stats"]["unique_graphs"]))
    return found


def _check(corpus: Corpus, folder: Path, model_type: str, modes: Iterable[tuple[str, Any]]) -> None:
    shape = replace(
        small_shape(model_type),
        vocab_size=ROWS,
        num_hidden_layers=BLOCKS,
        **OWN.get(model_type, {}),
    )
    theirs(shape).save_pretrained(folder / "source")
    runs, expected = [], []
    for number, (compute, recompute) in enumerate(modes):
        named = [MLP.get(model_type, "mlp")] if isinstance(recompute, tuple) else recompute
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": 3},
            "model": {
                "preset": None, "path": str(folder / "source"), "weights": "load",
                "compile": True, "dropout": 0.1,
            },
            "memory": {"recompute": named},
            "precision": {"compute": compute},
        }  # fmt: skip
        if not family_of(model_type).is_causal:
            sections["task"] = {"name": "masked_lm"}
        runs.append(make_run(folder / f"{number}", corpus, sections))
        kinds = {
            (recompute == 3 and block % 3 == 0, shape.layer_types and shape.layer_types[block])
            for block in range(BLOCKS)
        }
        expected.append((f"{number}", 2 * len(kinds)))  # one to train, one to evaluate
    assert run_on_ranks(_graphs, 1, runs, timeout_s=900)[0] == expected


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in ONE_GRAPH],
)
def test_a_block_is_one_graph(corpus: Corpus, tmp_path: Path, model_type: str) -> None:
    _check(corpus, tmp_path, model_type, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ONE_GRAPH)
def test_a_block_is_one_graph_in_every_mode(
    corpus: Corpus, tmp_path: Path, model_type: str
) -> None:
    modes = [(compute, recompute) for compute in ("bf16", "fp8") for recompute in MODES]
    _check(corpus, tmp_path, model_type, modes)

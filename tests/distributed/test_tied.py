"""A head that is the table of tokens: one parameter, in every layout, also at both ends of a
pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoint.load import read_shapes
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.whole import whole

STEPS = 4
TOLERANCE = 1e-5
TABLES = {
    "llama-laptop": "model.embed_tokens.weight",
    "bert-tiny": "bert.embeddings.word_embeddings.weight",
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"pp": 2, "dp_shard": 2, "zero": 3}),
]
INTERLEAVED = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
LARGE: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (4, {"pp": 2, "dp_shard": 2, "zero": 1}),
    (4, {"pp": 2, "dp_shard": 2, "zero": 2}),
    (4, {"pp": 2, "dp_shard": 1, "dp_replicate": 2}),
    (4, {"pp": 2, "cp": 2}),
]
OF_FOUR_BLOCKS: list[tuple[int, dict[str, Any]]] = [
    (2, INTERLEAVED),
    (2, {"pp": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 4}),
]


def _sections(
    preset: str, processes: int, parallel: dict[str, Any], *, steps: int = STEPS
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": steps},
        "model": {"preset": preset, "dropout": 0.2},
        "task": {"name": "masked_lm" if preset == "bert-tiny" else "causal_lm"},
        "data": {"attend_across_documents": False},
        "optim": {"micro_batch": 1, "lr": 1e-3, "decay_steps": STEPS},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


def _measured(run_dir: RunDir) -> list[float]:
    lines = read_steps(run_dir.metrics)
    steps = [line[key] for line in lines for key in ("loss", "grad_norm")]
    return [*steps, read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]]


def _same_steps(
    corpus: Corpus, folder: Path, preset: str, layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    one = make_run(folder / "one", corpus, _sections(preset, 1, {}))
    runs: dict[int, list[RunDir]] = {1: [one]}
    for index, (processes, parallel) in enumerate(layouts):
        sections = _sections(preset, processes, parallel)
        runs.setdefault(processes, []).append(make_run(folder / str(index), corpus, sections))
    for processes, run_dirs in runs.items():
        run_on_ranks(_train_all, processes, run_dirs)
    expected = _measured(one)
    assert len(expected) == 2 * STEPS + 1
    for run_dir in [run_dir for run_dirs in runs.values() for run_dir in run_dirs]:
        assert _measured(run_dir) == pytest.approx(expected, rel=TOLERANCE), run_dir.path.name


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[:2], pytest.param(LAYOUTS[2:], marks=pytest.mark.system)],
    ids=["two", "four"],
)
@pytest.mark.parametrize("preset", TABLES)
def test_every_layout_takes_the_same_steps(
    corpus: Corpus, tmp_path: Path, preset: str, layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    _same_steps(corpus, tmp_path, preset, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("preset", TABLES)
def test_more_layouts_take_the_same_steps(corpus: Corpus, tmp_path: Path, preset: str) -> None:
    deep = OF_FOUR_BLOCKS if preset == "llama-laptop" else []
    _same_steps(corpus, tmp_path, preset, [*LARGE, *deep])


def _first_gradients(run_dirs: list[RunDir]) -> list[dict[str, Any]]:
    """Of each run the gradients of the first step that this rank holds, whole and undivided."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    found = []
    for run_dir in run_dirs:
        training = set_up(run_dir, 0, hooks, local_rank=0)
        training.stepper.accumulate(next(training.loader))
        found.append(
            {
                name: whole(param.grad).numpy()
                for name, param in training.task.model.named_parameters()
                if param.grad is not None
            }
        )
        training.close()
    return found


def test_both_copies_get_the_gradient_of_the_whole(corpus: Corpus, tmp_path: Path) -> None:
    ones = [make_run(tmp_path / f"one-{p}", corpus, _sections(p, 1, {})) for p in TABLES]
    many = [make_run(tmp_path / p, corpus, _sections(p, 2, {"pp": 2})) for p in TABLES]
    wholes = run_on_ranks(_first_gradients, 1, ones)[0]
    first, last = run_on_ranks(_first_gradients, 2, many)
    for index, table in enumerate(TABLES.values()):
        expected = wholes[index]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
        assert first[index].keys() & last[index].keys() == {table}
        assert first[index].keys() | last[index].keys() == expected.keys()
        np.testing.assert_array_equal(first[index][table], last[index][table])
        for held in (first[index], last[index]):
            for name, gradient in held.items():
                assert np.linalg.norm(gradient - expected[name]) <= TOLERANCE * norm, name


@pytest.mark.parametrize(
    "preset", [pytest.param("llama-laptop", marks=pytest.mark.system), "bert-tiny"]
)
def test_a_checkpoint_holds_the_table_once_and_moves(
    corpus: Corpus, tmp_path: Path, preset: str
) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(preset, 1, {}))
    run_on_ranks(train_here, 1, whole)
    for name, before, after in (("out", {"pp": 2}, {}), ("into", {}, {"pp": 2})):
        at_first, then = before.get("pp", 1), after.get("pp", 1)
        run = make_run(tmp_path / name, corpus, _sections(preset, at_first, before, steps=2))
        run_on_ranks(train_here, at_first, run)
        shapes = read_shapes(run.checkpoint(2))
        tables = [key for key in shapes if key.startswith("model.") and TABLES[preset] in key]
        assert tables == [f"model.{TABLES[preset]}"] and not any("lm_head" in key for key in shapes)
        make_run(run.path, corpus, _sections(preset, then, after), attempt=1)
        run_on_ranks(train_here, then, run, 1)
        assert _measured(run) == pytest.approx(_measured(whole), rel=TOLERANCE), name

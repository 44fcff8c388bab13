"""Every layout and every split of the batch computes the same step as one process does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.whole import whole

STEPS = 5
SYSTEM = pytest.mark.system
TOLERANCE = 1e-5

LAYOUTS: list[tuple[int, dict[str, Any], int]] = [
    # processes, parallel, micro_batch (of a global batch of 6)
    (1, {"strategy": "NO_SHARD"}, 2),
    (1, {"strategy": "FULL_SHARD"}, 4),  # 4 does not divide 6: a padded micro-batch
    (2, {"strategy": "FULL_SHARD"}, 1),
    (2, {"strategy": "SHARD_GRAD_OP"}, 2),  # 3 micro-batches over 2 ranks: a weightless one
    (2, {"strategy": "NO_SHARD"}, 3),
    (2, {"strategy": "ZERO_1"}, 1),
    (3, {"strategy": "FULL_SHARD"}, 1),
    (3, {"strategy": "ZERO_1"}, 5),  # two micro-batches for three ranks
    (4, {"strategy": "HYBRID_SHARD", "dp_shard": 2}, 1),
    (4, {"zero": 2, "dp_shard": 2, "dp_replicate": 2}, 1),
    (2, {"tp": 2}, 2),
    (4, {"tp": 2, "dp_shard": 2}, 1),
]


def _sections(
    processes: int, parallel: dict[str, Any], micro_batch: int, dropout: float
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"dropout": dropout},
        "data": {"attend_across_documents": dropout == 0},  # both masks are covered
        # a low rate: under a high one rounding grows by a factor of ten a step
        "optim": {"micro_batch": micro_batch, "lr": 1e-3},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


SMALLEST = [LAYOUTS[1], LAYOUTS[3], LAYOUTS[10]]


@pytest.mark.parametrize(
    ("layouts", "dropout"),
    [
        (SMALLEST, 0.2),
        pytest.param([each for each in LAYOUTS if each not in SMALLEST], 0.2, marks=SYSTEM),
        pytest.param(LAYOUTS, 0.0, marks=SYSTEM),
    ],
    ids=["smallest", "others", "all, no dropout"],
)
def test_every_layout_takes_the_same_steps(
    corpus: Corpus,
    tmp_path: Path,
    layouts: list[tuple[int, dict[str, Any], int]],
    dropout: float,
) -> None:
    reference = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, dropout))
    runs: dict[int, list[RunDir]] = {1: [reference]}
    for index, (processes, parallel, micro_batch) in enumerate(layouts):
        sections = _sections(processes, parallel, micro_batch, dropout)
        run_dir = make_run(tmp_path / f"layout-{index}", corpus, sections)
        runs.setdefault(processes, []).append(run_dir)
    for processes, run_dirs in runs.items():
        run_on_ranks(_train_all, processes, run_dirs)

    expected = [(line["loss"], line["grad_norm"]) for line in read_steps(reference.metrics)]
    assert len(expected) == STEPS
    for run_dir in [run_dir for run_dirs in runs.values() for run_dir in run_dirs]:
        found = [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
        for pair, expected_pair in zip(found, expected, strict=True):
            assert pair == pytest.approx(expected_pair, rel=TOLERANCE), run_dir.path.name


BERT_LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    # parallel, micro_batch
    "dp": ({"dp_shard": 2}, 4),  # of 6 samples a micro-batch, and one of half padding
    "tp": ({"tp": 2}, 3),
    "cp": ({"cp": 2}, 6),
    "pp": ({"pp": 2}, 3),
}


@pytest.mark.parametrize(
    "names", [["dp"], pytest.param(["tp", "cp", "pp"], marks=SYSTEM)], ids=["one", "more"]
)
def test_bert_guesses_the_same_tokens_in_every_layout(
    corpus: Corpus, tmp_path: Path, names: list[str]
) -> None:
    def run(name: str, processes: int, parallel: dict[str, Any], micro_batch: int) -> RunDir:
        sections = _sections(processes, parallel, micro_batch, 0.1)
        sections["model"]["preset"] = "bert-tiny"
        sections["task"] = {"name": "masked_lm"}
        return make_run(tmp_path / name, corpus, sections)

    reference = run("one", 1, {}, 6)
    others = [run(name, 2, *BERT_LAYOUTS[name]) for name in names]
    run_on_ranks(_train_all, 1, [reference])
    run_on_ranks(_train_all, 2, others)
    expected = [(line["loss"], line["grad_norm"]) for line in read_steps(reference.metrics)]
    for run_dir in others:
        found = [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
        for pair, expected_pair in zip(found, expected, strict=True):
            assert pair == pytest.approx(expected_pair, rel=TOLERANCE), run_dir.path.name

    targets = [line["targets"] for line in read_steps(reference.metrics)]
    for run_dir in (reference, *others):
        for number, line in enumerate(read_steps(run_dir.metrics)):
            # all tokens were computed, one in seven was guessed
            assert line["tokens"] == (number + 1) * 6 * 32, run_dir.path.name
            assert line["targets"] == targets[number], run_dir.path.name
            assert 0.05 < line["targets"] / (6 * 32) < 0.3
            assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(6 * 32)


def _first_gradients(run_dir: RunDir) -> dict[str, Any]:
    """Gradients of the first step, whole, divided by the tokens of the step."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    tokens = training.stepper.accumulate(next(training.loader)).divisor
    total = sum(training.gather(tokens))
    gradients = {}
    for name, param in training.task.model.named_parameters():
        assert param.grad is not None
        gradients[name] = (whole(param.grad) / total).numpy()
    training.close()
    return gradients


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, {"strategy": "FULL_SHARD"}),
        pytest.param(2, {"strategy": "NO_SHARD"}, marks=SYSTEM),
        pytest.param(3, {"strategy": "ZERO_1"}, marks=SYSTEM),
    ],
)
def test_first_gradients_are_those_of_one_process(
    corpus: Corpus, tmp_path: Path, processes: int, parallel: dict[str, Any]
) -> None:
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, 0.2))
    many = make_run(tmp_path / "many", corpus, _sections(processes, parallel, 1, 0.2))
    expected = run_on_ranks(_first_gradients, 1, one)[0]
    found = run_on_ranks(_first_gradients, processes, many)[-1]

    norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= TOLERANCE * norm, name

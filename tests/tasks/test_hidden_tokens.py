"""The head computes hidden tokens alone: losses, gradients and scores are those of all tokens."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardyard.config.data_choices import TILE
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.rundir.layout import RunDir
from shardyard.tasks.masked_lm import MaskedTokens
from shardyard.tasks.token_losses import LanguageModel
from shardyard.train.evaluate import evaluate
from shardyard.train.hooks import Hooks
from shardyard.train.loss_reduction import sum_over_ranks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

pytestmark = pytest.mark.heavy

SAMPLES = 8
SEQ_LEN = 64


class Found(NamedTuple):
    """Of a step on all ranks: its mean loss, what is told beside it, and all gradients."""

    loss: float
    told: dict[str, float]
    gradients: dict[str, Tensor]
    logits: list[int]
    """Rows of logits of this rank, by micro-batch."""


def _computed(training: Any, batches: list[MicroBatch], backward: Any) -> Found:
    computation = training.task.computation
    rows: list[int] = []
    losses = computation.losses

    def counted(logits: Tensor, targets: Tensor) -> Tensor:
        rows.append(logits.shape[:-1].numel())
        answer: Tensor = losses(logits, targets)
        return answer

    computation.losses = counted
    if computation.pipeline is not None:
        computation.pipeline._schedule = None  # it was made with another loss function
    part = backward(computation, batches)
    computation.losses = losses
    totals = sum_over_ranks(part, device=training.device)
    told = {} if not part.sums else computation.means(totals.sums)
    gradients = {}
    for name, param in computation.model.named_parameters():
        grad: Any = param.grad
        assert grad is not None, name
        gradients[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        param.grad = None
    mean = float(totals.loss_sum / totals.divisor)
    return Found(mean, {name: float(each) for name, each in told.items()}, gradients, rows)


def _both(run_dirs: list[RunDir]) -> list[tuple[Found, Found]]:
    found = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        computation: Any = training.task.computation
        assert isinstance(computation, MaskedTokens)
        for _ in range(6):  # until something is guessed
            training.stepper.run(next(training.loader), lr=1e-2, drain=False)
        batches = next(training.loader)
        whole = [
            batch.with_fields(predicted_targets=computation._local_tokens(batch["targets"]))
            for batch in batches
        ]
        found.append(
            (
                _computed(training, batches, MaskedTokens.backward),
                _computed(training, whole, LanguageModel.backward),
            )
        )
        training.close()
    return found


def _run(folder: Path, corpus: Corpus, processes: int, parallel: dict[str, Any]) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 20},
        "model": {"preset": "bert-tiny"},
        "task": {"name": "masked_lm"},
        "data": {"seq_len": SEQ_LEN},
        "optim": {"global_batch": 2 * SAMPLES, "micro_batch": SAMPLES},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }
    return make_run(folder, corpus, sections)


@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (1, [{}]),
        (2, [{"tp": 2}]),
        pytest.param(
            2,
            [{"cp": 2}, {"cp": 2, "cp_exchange": "heads"}, {"pp": 2}, {"dp_shard": 2, "zero": 1}],
            marks=pytest.mark.system,
        ),
        pytest.param(4, [{"cp": 2, "tp": 2}, {"pp": 2, "tp": 2}], marks=pytest.mark.system),
    ],
)
def test_a_step_is_that_of_a_head_that_computes_every_token(
    corpus: Corpus, tmp_path: Path, processes: int, layouts: list[dict[str, Any]]
) -> None:
    runs = [
        _run(tmp_path / str(number), corpus, processes, parallel)
        for number, parallel in enumerate(layouts)
    ]
    one = run_on_ranks(_both, 1, [_run(tmp_path / "one", corpus, 1, {})])[0][0][0]
    assert 0 < one.told["masked_accuracy"] < 0.3
    for of_rank in run_on_ranks(_both, processes, runs):
        for parallel, (picked, whole) in zip(layouts, of_rank, strict=True):
            assert picked.loss == pytest.approx(whole.loss, rel=1e-6), parallel
            assert picked.loss == pytest.approx(one.loss, rel=1e-5), parallel
            assert picked.told == pytest.approx(one.told, rel=1e-12), parallel
            for name, gradient in picked.gradients.items():
                torch.testing.assert_close(
                    gradient, whole.gradients[name], rtol=1e-4, atol=1e-5, msg=f"{parallel} {name}"
                )
            assert len(picked.logits) == len(whole.logits), parallel
            for few, every in zip(picked.logits, whole.logits, strict=True):
                # of 512 tokens about 77 are hidden: two tiles, or one of each half of them
                assert few in (TILE, 2 * TILE) and every >= 2 * few, parallel


def _scored(run_dir: RunDir) -> tuple[dict[str, float], dict[str, float]]:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    computation: Any = training.task.computation
    source = training.eval_source
    assert source is not None
    result = evaluate(
        training.task, source, micro_batch=4, mesh=training.mesh, device=training.device
    )
    everything = source.micro_batch(range(source.num_samples), source.num_samples)
    targets = everything["targets"]
    with torch.no_grad():
        logits = computation.output(everything)
    is_hidden = targets != IGNORED
    right = (logits.argmax(dim=-1) == targets) & is_hidden
    training.close()
    hidden = int(is_hidden.sum())
    expected = {
        "loss": float(torch.nn.functional.cross_entropy(logits[is_hidden], targets[is_hidden])),
        "masked_accuracy": int(right.sum()) / hidden,
        "most_frequent_token": int(targets[is_hidden].bincount().max()) / hidden,
    }
    return result.scores, expected


def test_an_evaluation_tells_how_many_are_guessed_and_what_the_most_frequent_would_guess(
    corpus: Corpus, tmp_path: Path
) -> None:
    scores, expected = run_on_ranks(_scored, 1, _run(tmp_path / "run", corpus, 1, {}))[0]
    assert scores.keys() == {*expected, "perplexity"}
    assert expected["most_frequent_token"] > 0.02
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, rel=1e-5), name

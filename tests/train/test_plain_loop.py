"""A run of one process beside a plain loop of transformers and torch.optim.

All layouts are held to one process; this holds that one to something else.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardyard.config.own_module import known_shape
from shardyard.models.build import hf_config
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_steps
from shardyard.train.evaluate import evaluate
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

pytestmark = pytest.mark.heavy

PEAK = 0.05
RATES = [0.5 * PEAK, PEAK, 0.875 * PEAK, 0.75 * PEAK]
"""Two steps of warm-up, then in four steps in a line to half of the peak."""
DECAY = 0.2
BATCH = 6

CASES: list[tuple[dict[str, Any], float]] = [
    # optimizer, and its clip: far below the norm of every step, far above it
    ({"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-3}, 0.1),
    ({"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-3}, 1e3),
    ({"name": "sgd", "momentum": 0.9}, 0.1),
    ({"name": "sgd", "momentum": 0.9}, 1e3),
]
"""An eps that is no rounding: else Adam divides noise by itself where a gradient is small."""


def _plain(
    training: Training, optim: dict[str, Any], clip: float
) -> tuple[LlamaForCausalLM, list[tuple[float, float]]]:
    """The loop that everybody would write; returns the model, and loss and norm of each step."""
    model = LlamaForCausalLM._from_config(hf_config(known_shape(training.resolved.shape)))
    named = {name: tensor for name, tensor in training.tensors.items() if name.startswith("model.")}
    model.load_state_dict({n.removeprefix("model."): _whole(t).clone() for n, t in named.items()})
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "decay": 0.0},
    ]
    settings = {key: value for key, value in optim.items() if key != "name"}
    kind = {"adamw": torch.optim.Adam, "sgd": torch.optim.SGD}[optim["name"]]
    optimizer: torch.optim.Optimizer = kind(groups, lr=PEAK, **settings)
    found = []
    for step, rate in enumerate(RATES):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        logits: Tensor = model(input_ids=batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
            for param in group["params"]:
                param.data -= rate * group["decay"] * param.data
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return model, found


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _open(run_dir: RunDir) -> Training:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def _beside(runs: list[tuple[RunDir, dict[str, Any], float]]) -> list[Any]:
    """Of each run: the plain loop's numbers, and how far each weight is from its, of its way."""
    answers = []
    for run_dir, optim, clip in runs:
        training = _open(run_dir)
        first = {name: _whole(t).clone() for name, t in training.tensors.items()}
        model, expected = _plain(training, optim, clip)
        loop = Loop(training)
        for _ in RATES:
            loop.step()
        apart = {}
        for name, param in model.named_parameters():
            moved = (param.detach() - first[f"model.{name}"]).norm()
            found = _whole(training.tensors[f"model.{name}"])
            apart[name] = float((found - param.detach()).norm() / moved)
        training.close()
        answers.append((expected, apart))
    return answers


def test_four_steps_are_those_of_a_plain_loop(corpus: Corpus, tmp_path: Path) -> None:
    runs = []
    for number, (optim, clip) in enumerate(CASES):
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": 100},
            "optim": {
                **optim, "lr": PEAK, "weight_decay": DECAY, "grad_clip": clip,
                "schedule": "linear", "warmup_steps": 2, "decay_steps": 6, "min_lr_ratio": 0.5,
                "global_batch": BATCH, "micro_batch": 4,
            },
            "checkpoint": {"every": 1000},
        }  # fmt: skip
        runs.append((make_run(tmp_path / str(number), corpus, sections), optim, clip))
    for (run_dir, optim, clip), answer in zip(runs, run_on_ranks(_beside, 1, runs)[0], strict=True):
        expected, apart = answer
        lines = list(read_steps(run_dir.metrics))
        case = (optim["name"], clip)
        assert [line["lr"] for line in lines] == pytest.approx(RATES, rel=1e-12), case
        for line, (loss, norm) in zip(lines, expected, strict=True):
            assert (line["loss"], line["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5), case
            assert clip < norm / 5 or clip > 5 * norm
        assert max(apart.values()) < 1e-4, (case, apart)


def _evaluations(run_dirs: Iterable[RunDir]) -> list[float]:
    losses = []
    for run_dir in run_dirs:
        training = _open(run_dir)
        assert training.eval_source is not None
        training.task.model.train()
        result = evaluate(
            training.task,
            training.eval_source,
            micro_batch=4,
            mesh=training.mesh,
            device=training.device,
        )
        assert training.task.model.training  # and it goes on with dropout
        training.close()
        losses.append(result.loss)
    return losses


def test_an_evaluation_knows_no_dropout(corpus: Corpus, tmp_path: Path) -> None:
    run_dirs = [
        make_run(tmp_path / str(dropout), corpus, {"model": {"dropout": dropout}})
        for dropout in (0.0, 0.5)
    ]
    without, with_dropout = run_on_ranks(_evaluations, 1, run_dirs)[0]
    assert with_dropout == without

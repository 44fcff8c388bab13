"""Runs beside a plain loop of transformers and torch.optim.

All layouts are held to one process; this holds that one to something else, and compiled blocks and
weights in host memory on two.
"""

from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

from shardyard.config.rules.custom_module import require_shape
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
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


Sections = dict[str, dict[str, Any]]

COMPILED: Sections = {"model": {"compile": True}}
OFFLOADED: Sections = {"memory": {"offload": "params"}}
ON_TWO: list[Sections] = [
    {"parallel": {"dp_shard": 2, "zero": 3}, **COMPILED},
    {"parallel": {"dp_shard": 2, "zero": 3}, **OFFLOADED},
]
MORE_ON_TWO: list[Sections] = [
    {"parallel": {"dp_shard": 2, "zero": 1}, **COMPILED},
    {"parallel": {"dp_replicate": 2, "dp_shard": 1}, **COMPILED},
    {"parallel": {"tp": 2}, **COMPILED},
    {"parallel": {"pp": 2}, **COMPILED},
    {"parallel": {"dp_replicate": 2, "dp_shard": 1, "zero": 3}, **OFFLOADED},
    {"parallel": {"tp": 2, "zero": 3}, **OFFLOADED},
    {"parallel": {"pp": 2, "zero": 3}, **OFFLOADED},
]


def _plain(
    weights: dict[str, Tensor], training: Training, optim: dict[str, Any], clip: float
) -> tuple[LlamaForCausalLM, list[tuple[float, float]]]:
    """The loop that everybody would write; returns the model, and loss and norm of each step."""
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    model.load_state_dict({n.removeprefix("model."): t.clone() for n, t in weights.items()})
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


def _weights(training: Training) -> dict[str, Tensor]:
    """Whole ones, those of other ranks' stages, too."""
    named = {name: _whole(t) for name, t in training.tensors.items() if name.startswith("model.")}
    of_ranks: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: t.cpu().clone() for name, t in named.items()})
    return {name: tensor for each in of_ranks for name, tensor in each.items()}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _open(run_dir: RunDir) -> Training:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def _beside(runs: list[tuple[RunDir, dict[str, Any], float]]) -> list[Any]:
    """Of each run: the plain loop's numbers, and how far each weight is from its, of its way."""
    eager = partialmethod(nn.Module.compile, backend="aot_eager")  # C++ would take minutes
    nn.Module.compile = eager  # type: ignore[method-assign,assignment]
    answers = []
    for run_dir, optim, clip in runs:
        torch.compiler.reset()
        counters.clear()
        training = _open(run_dir)
        first = _weights(training)
        model, expected = _plain(first, training, optim, clip)
        loop = Loop(training)
        for _ in RATES:
            loop.step()
        last, apart = _weights(training), {}
        for name, param in model.named_parameters():
            moved = (param.detach() - first[f"model.{name}"]).norm()
            apart[name] = float((last[f"model.{name}"] - param.detach()).norm() / moved)
        training.close()
        is_compiled = training.resolved.recipe.model.compile is True
        assert (counters["stats"]["unique_graphs"] > 0) == is_compiled
        answers.append((expected, apart))
    return answers


def _hold_to_plain_loop(
    corpus: Corpus, folder: Path, cases: list[tuple[Sections, dict[str, Any], float]], *, ranks: int
) -> None:
    runs = []
    for number, (more, optim, clip) in enumerate(cases):
        sections: Sections = {
            "run": {"steps": 100},
            "optim": {
                **optim, "lr": PEAK, "weight_decay": DECAY, "grad_clip": clip,
                "schedule": "linear", "warmup_steps": 2, "decay_steps": 6, "min_lr_ratio": 0.5,
                "global_batch": BATCH, "micro_batch": 4 if ranks == 1 else 2,
            },
            "checkpoint": {"every": 1000},
            "cluster": {"devices": ranks},
            **more,
        }  # fmt: skip
        runs.append((make_run(folder / str(number), corpus, sections), optim, clip))
    answers = run_on_ranks(_beside, ranks, runs, timeout_s=600)[0]
    for (run_dir, _, clip), case, (expected, apart) in zip(runs, cases, answers, strict=True):
        lines = list(read_steps(run_dir.metrics))
        assert [line["lr"] for line in lines] == pytest.approx(RATES, rel=1e-12), case
        for line, (loss, norm) in zip(lines, expected, strict=True):
            assert (line["loss"], line["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5), case
            assert clip < norm / 5 or clip > 5 * norm
        assert max(apart.values()) < 1e-4, (case, apart)


def test_four_steps_are_those_of_a_plain_loop(corpus: Corpus, tmp_path: Path) -> None:
    cases: list[tuple[Sections, dict[str, Any], float]] = [({}, *case) for case in CASES]
    _hold_to_plain_loop(corpus, tmp_path, cases, ranks=1)


@pytest.mark.parametrize(
    "layouts", [ON_TWO, pytest.param(MORE_ON_TWO, marks=pytest.mark.slow)], ids=["quick", "more"]
)
def test_steps_compiled_and_offloaded_on_two_ranks_are_those_of_a_plain_loop(
    corpus: Corpus, tmp_path: Path, layouts: list[Sections]
) -> None:
    cases = [(layout, *case) for layout in layouts for case in CASES[:2]]
    _hold_to_plain_loop(corpus, tmp_path, cases, ranks=2)


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

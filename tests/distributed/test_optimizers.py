"""LAMB in every layout beside LAMB by hand in one process, and beside itself after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardyard.config.own_module import known_shape
from shardyard.models.build import hf_config
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import read_steps
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run
from tests.train.lamb import Lamb

STEPS = 20
BATCH = 6
OPTIM: dict[str, Any] = {
    "name": "lamb", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.1,
    "grad_clip": 1.0, "schedule": "constant", "warmup_steps": 0, "micro_batch": 3,
}  # fmt: skip

"""A rate that moves each matrix by 1 % of its norm a step."""

Layouts = dict[str, dict[str, Any]]
QUICK: Layouts = {"zero 3": {"zero": 3, "dp_shard": 2}}
MORE: Layouts = {
    "zero 1": {"zero": 1, "dp_shard": 2},
    "zero 2": {"zero": 2, "dp_shard": 2},
    "copies": {"dp_replicate": 2, "dp_shard": 1},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2, "zero": 1},
    "cp 2": {"cp": 2},
}


def made(folder: Path, corpus: Corpus, parallel: dict[str, Any], **optim: Any) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {**OPTIM, **optim},
        "parallel": parallel,
        "precision": {"compute": "fp32"},
        "cluster": {"devices": 2 if parallel else 1},
        "checkpoint": {"every": 1000},
    }
    return make_run(folder, corpus, sections)


def _open(run_dir: RunDir) -> Training:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def _weights(training: Training) -> dict[str, Tensor]:
    """Whole ones; with a pipeline those of this rank's stage."""
    tensors = training.tensors.items()
    return {name: _whole(tensor) for name, tensor in tensors if name.startswith("model.")}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _sharded(run_dirs: list[RunDir]) -> list[dict[str, Tensor]]:
    found = []
    for run_dir in run_dirs:
        training = _open(run_dir)
        loop = Loop(training)
        for _ in range(STEPS):
            loop.step()
        found.append(_weights(training))
        training.close()
    return found


def _by_hand(run_dir: RunDir) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of a plain loop of transformers' model; its weights before and after."""
    training = _open(run_dir)
    first = _weights(training)
    model = LlamaForCausalLM._from_config(hf_config(known_shape(training.resolved.shape)))
    model.load_state_dict({name.removeprefix("model."): t for name, t in first.items()})
    lamb = Lamb(
        model.parameters(),
        lr=OPTIM["lr"], decay=OPTIM["weight_decay"], betas=OPTIM["betas"], eps=OPTIM["eps"],
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        logits: Tensor = model(input_ids=batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"])
        lamb.step()
        lamb.zero_grad()
        losses.append(float(loss.detach()))
    training.close()
    last = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    return losses, first, last


def hold_to_lamb_by_hand(corpus: Corpus, folder: Path, layouts: Layouts) -> None:
    alone = made(folder / "alone", corpus, {})
    losses, first, expected = run_on_ranks(_by_hand, 1, alone)[0]
    assert losses[-1] < losses[0] - 0.1  # it learns: the steps are no rounding
    runs = {name: made(folder / name, corpus, parallel) for name, parallel in layouts.items()}
    by_rank = run_on_ranks(_sharded, 2, list(runs.values()))
    for number, (name, run_dir) in enumerate(runs.items()):
        found = [line["loss"] for line in read_steps(run_dir.metrics)]
        assert found == pytest.approx(losses, rel=1e-6), name
        weights = {key: t for rank in by_rank for key, t in rank[number].items()}
        assert weights.keys() == expected.keys(), name
        for key, whole in expected.items():
            apart = (weights[key] - whole).norm() / whole.norm()
            moved = (whole - first[key]).norm() / whole.norm()
            assert apart < 1e-6 < 1e-2 < moved, (name, key)


def test_twenty_steps_of_lamb_are_those_of_whole_matrices(corpus: Corpus, tmp_path: Path) -> None:
    hold_to_lamb_by_hand(corpus, tmp_path, QUICK)


@pytest.mark.slow
def test_lamb_scales_whole_matrices_in_every_layout(corpus: Corpus, tmp_path: Path) -> None:
    hold_to_lamb_by_hand(corpus, tmp_path, MORE)

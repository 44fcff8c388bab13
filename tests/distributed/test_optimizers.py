"""Optimizers that are not torch's in layouts, against each by hand in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardyard.checkpoint.export import export
from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Optim
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import task_class
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED, Loop
from shardyard.train.run import train
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run
from tests.train.adafactor import Adafactor
from tests.train.lamb import Lamb
from tests.train.lars import Lars
from tests.train.lion import Lion
from tests.train.muon import Muon
from tests.train.schedule_free import ScheduleFree

STEPS = 20
BATCH = 6
OPTIM: dict[str, Any] = {
    "weight_decay": 0.1, "grad_clip": 1.0, "schedule": "constant", "warmup_steps": 0,
    "micro_batch": 3,
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-6},
    "lars": {"lr": 0.5, "momentum": 0.9, "trust_coefficient": 0.01},
}
"""Rates that move each matrix by about 1 % of its norm a step."""

LION: dict[str, Any] = {"lr": 1e-3}
MUON: dict[str, Any] = {"lr": 3e-3}
SCHEDULE_FREE: dict[str, Any] = {"lr": 3e-3, "warmup_steps": 5, "eps": 1e-6}

ADAFACTOR: dict[str, Any] = {"lr": 3e-3}
ByHand = Adafactor | Lamb | Lars | Lion | Muon | ScheduleFree
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
TWO_AXES = {"tp": 2, "dp_shard": 2}
"""On four ranks."""


def made(
    folder: Path, corpus: Corpus, parallel: dict[str, Any], name: str = "lamb", attempt: int = 0
) -> RunDir:
    of_name = {
        "adafactor": ADAFACTOR, "lion": LION, "muon": MUON,
        "schedule_free_adamw": SCHEDULE_FREE, **OPTIMIZERS,
    }  # fmt: skip
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "optim": {**OPTIM, "name": name, **of_name[name]},
        "parallel": parallel,
        "precision": {"compute": "fp32"},
        "cluster": {"devices": _ranks(parallel)},
        "checkpoint": {"every": 1000},
    }
    return make_run(folder, corpus, sections, attempt=attempt)


def _ranks(parallel: dict[str, Any]) -> int:
    return 4 if parallel == TWO_AXES else 2 if parallel else 1


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
        with training.evaluation_weights():
            found.append(_weights(training))
        training.close()
    return found


def _by_hand(run_dir: RunDir) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of a plain loop of transformers' model; its weights before and after, for use."""
    training = _open(run_dir)
    first = _weights(training)
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    model.load_state_dict({name.removeprefix("model."): t for name, t in first.items()})
    by_hand = _optimizer_by_hand(training.resolved.recipe.optim, model)
    losses = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        logits: Tensor = model(input_ids=batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM["grad_clip"])
        by_hand.step()
        by_hand.zero_grad()
        losses.append(float(loss.detach()))
    training.close()
    evaluated = list(model.parameters()) if not isinstance(by_hand, ScheduleFree) else by_hand.x
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    last = {name: each.detach().float() for name, each in zip(names, evaluated, strict=True)}
    return losses, first, last


def _optimizer_by_hand(optim: Optim, model: nn.Module) -> ByHand:
    lr, decay = float(optim.lr), float(optim.weight_decay)
    if optim.name == "lamb":
        return Lamb(model.parameters(), lr=lr, decay=decay, betas=optim.betas, eps=optim.eps)
    params = dict(model.named_parameters())
    if optim.name == "adafactor":
        return Adafactor(params, lr=lr, decay=decay)
    if optim.name == "muon":
        return Muon(params, lr=lr, decay=decay, betas=optim.betas, eps=optim.eps)
    if optim.name == "schedule_free_adamw":
        warmup = SCHEDULE_FREE["warmup_steps"]
        return ScheduleFree(
            model.parameters(), lr=lr, decay=decay, betas=optim.betas, eps=optim.eps, warmup=warmup
        )
    if optim.name == "lion":
        return Lion(model.parameters(), lr=lr, decay=decay, betas=optim.betas)
    trust = optim.trust_coefficient
    return Lars(model.parameters(), lr=lr, decay=decay, momentum=optim.momentum, trust=trust)


def hold_to_one_by_hand(
    corpus: Corpus, folder: Path, layouts: Layouts, optimizer: str, *, bar: float = 1e-6
) -> None:
    alone = made(folder / "alone", corpus, {}, optimizer)
    losses, first, expected = run_on_ranks(_by_hand, 1, alone)[0]
    assert losses[-1] < losses[0] - 0.1  # it learns: the steps are no rounding
    runs = {
        name: made(folder / name, corpus, parallel, optimizer) for name, parallel in layouts.items()
    }
    by_rank = run_on_ranks(_sharded, 2, list(runs.values()))
    for number, (name, run_dir) in enumerate(runs.items()):
        found = [line["loss"] for line in read_steps(run_dir.metrics)]
        assert found == pytest.approx(losses, rel=bar), name
        weights = {key: t for rank in by_rank for key, t in rank[number].items()}
        assert weights.keys() == expected.keys(), name
        for key, whole in expected.items():
            apart = (weights[key] - whole).norm() / whole.norm()
            moved = (whole - first[key]).norm() / whole.norm()
            assert apart < bar < 1e-3 < moved, (name, key)


def test_twenty_steps_of_lamb_are_those_of_whole_matrices(corpus: Corpus, tmp_path: Path) -> None:
    hold_to_one_by_hand(corpus, tmp_path, QUICK, "lamb")


@pytest.mark.system
def test_twenty_steps_of_lars_are_those_of_whole_matrices(corpus: Corpus, tmp_path: Path) -> None:
    hold_to_one_by_hand(corpus, tmp_path, QUICK, "lars")


@pytest.mark.system
def test_twenty_steps_of_lion_are_those_by_hand_up_to_a_few_signs(
    corpus: Corpus, tmp_path: Path
) -> None:
    alone = made(tmp_path / "alone", corpus, {}, "lion")
    losses, first, expected = run_on_ranks(_by_hand, 1, alone)[0]
    assert losses[-1] < losses[0] - 0.1
    layouts = {**QUICK, "tp 2": MORE["tp 2"]}
    runs = {name: made(tmp_path / name, corpus, each, "lion") for name, each in layouts.items()}
    for number, weights in enumerate(run_on_ranks(_sharded, 2, list(runs.values()))[0]):
        found = [line["loss"] for line in read_steps(list(runs.values())[number].metrics)]
        assert found == pytest.approx(losses, rel=1e-4)
        for key, whole in expected.items():
            # an average near 0 steps by the sign of its rounding
            apart = (weights[key] - whole).abs()
            assert float(apart.max()) <= 2 * STEPS * LION["lr"] * 1.01, key
            assert float((apart > LION["lr"] / 2).double().mean()) < 0.01, key
            assert float((whole - first[key]).abs().max()) > LION["lr"], key


BARS = {"schedule_free_adamw": 1e-5, "adafactor": 1e-5}
"""Like Adam they divide gradients that are almost 0 by their size."""
MUON_BAR = 1e-5
"""Its iterations take directions that are almost 0, such as rounding, up to 500 times."""


@pytest.mark.system
def test_twenty_steps_of_muon_are_those_of_whole_matrices(corpus: Corpus, tmp_path: Path) -> None:
    layouts = {**QUICK, "tp 2": MORE["tp 2"]}
    hold_to_one_by_hand(corpus, tmp_path, layouts, "muon", bar=MUON_BAR)


@pytest.mark.slow
def test_muon_is_given_whole_matrices_in_every_layout(corpus: Corpus, tmp_path: Path) -> None:
    hold_to_one_by_hand(corpus, tmp_path, MORE, "muon", bar=MUON_BAR)


@pytest.mark.system
@pytest.mark.parametrize("optimizer", BARS)
def test_twenty_steps_are_those_by_hand(optimizer: str, corpus: Corpus, tmp_path: Path) -> None:
    layouts = {**QUICK, "tp 2": MORE["tp 2"]}
    hold_to_one_by_hand(corpus, tmp_path, layouts, optimizer, bar=BARS[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", BARS)
def test_every_layout_takes_the_steps_by_hand(
    optimizer: str, corpus: Corpus, tmp_path: Path
) -> None:
    hold_to_one_by_hand(corpus, tmp_path, MORE, optimizer, bar=BARS[optimizer])


@torch.no_grad()
def _evaluated(resolved: Resolved, model: LlamaForCausalLM) -> float:
    """Mean loss of the validation samples."""
    source = task_class(resolved.recipe.task.name).open_data(resolved).eval
    assert source is not None
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    logits: Tensor = model(input_ids=batch["tokens"]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


def _train_to(run_dir: RunDir, attempt: int, steps: int) -> str:
    asked = 0

    def drain_requested() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    hooks = Hooks(generation=0, drain_requested=drain_requested, events=None)
    return train(run_dir, attempt, hooks)


@pytest.mark.system
@pytest.mark.parametrize("optimizer", BARS)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (QUICK["zero 3"], MORE["tp 2"]),
        pytest.param(TWO_AXES, QUICK["zero 3"], marks=pytest.mark.slow),
        pytest.param(MORE["pp 2"], TWO_AXES, marks=pytest.mark.slow),
    ],
    ids=["zero 3 to tp", "tp and zero 3 to zero 3", "pp to tp and zero 3"],
)
def test_a_run_that_goes_on_in_another_layout_evaluates_and_exports_what_one_by_hand_does(
    first: dict[str, Any], then: dict[str, Any], optimizer: str, corpus: Corpus, tmp_path: Path
) -> None:
    alone = made(tmp_path / "alone", corpus, {}, optimizer)
    losses, _, expected = run_on_ranks(_by_hand, 1, alone)[0]
    run_dir = made(tmp_path / "run", corpus, first, optimizer)
    ranks = _ranks(first)
    assert run_on_ranks(_train_to, ranks, run_dir, 0, STEPS // 2) == [DRAINED] * ranks
    made(run_dir.path, corpus, then, optimizer, attempt=1)
    ranks = _ranks(then)
    assert run_on_ranks(_train_to, ranks, run_dir, 1, 99) == [FINISHED] * ranks
    found = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert found == pytest.approx(losses, rel=BARS[optimizer])

    resolved = read_resolved(run_dir.resolved(1))
    exported = tmp_path / "exported"
    export(run_dir.checkpoint(STEPS), resolved, exported)
    model = LlamaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for name, param in model.named_parameters():
        whole = expected[f"model.{name}"]
        assert (param.detach() - whole).norm() / whole.norm() < BARS[optimizer], name
    evaluated = read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]
    assert evaluated == pytest.approx(_evaluated(resolved, model), rel=BARS[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_matrices_are_scaled_in_every_layout(
    optimizer: str, corpus: Corpus, tmp_path: Path
) -> None:
    hold_to_one_by_hand(corpus, tmp_path, MORE, optimizer)

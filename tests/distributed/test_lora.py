"""Adapters train alike in every layout, and what they are beside costs no state."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shardyard.families.lora import is_adapter
from shardyard.parallel.gradients import local_part
from shardyard.planner.memory import memory
from shardyard.planner.workload import workload_of
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, resolve_layout, train_here
from tests.distributed.whole import whole

SYSTEM = pytest.mark.system
TOLERANCE = 1e-5
LORA = {"rank": 4, "alpha": 8, "dropout": 0.1}
MIXTURE = {"model": {"preset": "mixtral-tiny"}}
BF16 = {"precision": {"compute": "bf16"}}

Case = tuple[int, dict[str, Any], dict[str, dict[str, Any]]]

SMALLEST: dict[str, Case] = {
    "zero 3": (2, {"dp_shard": 2, "zero": 3}, {}),
    "tp": (2, {"tp": 2}, {}),
}
MORE: dict[str, Case] = {
    "zero 1": (2, {"dp_shard": 2, "zero": 1}, {}),
    "zero 2": (2, {"dp_shard": 2, "zero": 2}, {}),
    "NO_SHARD": (2, {"strategy": "NO_SHARD"}, {}),
    "HYBRID_SHARD": (4, {"strategy": "HYBRID_SHARD", "dp_shard": 2, "dp_replicate": 2}, {}),
    "three": (3, {"dp_shard": 3, "zero": 3}, {}),
    "four": (4, {"dp_shard": 4, "zero": 3}, {}),
    "tp and zero 1": (4, {"tp": 2, "dp_shard": 2, "zero": 1}, {}),
    "tp and zero 2": (4, {"tp": 2, "dp_shard": 2, "zero": 2}, {}),
    "tp and zero 3": (4, {"tp": 2, "dp_shard": 2, "zero": 3}, {}),
    "tp and copies": (4, {"tp": 2, "dp_replicate": 2, "dp_shard": 1}, {}),
    "cp": (2, {"cp": 2}, {}),
    "cp and tp": (4, {"cp": 2, "tp": 2}, {}),
    "pp": (2, {"pp": 2}, {}),
    "zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}, {}),
    "pp and tp": (4, {"pp": 2, "tp": 2}, {}),
    "recompute": (2, {"dp_shard": 2}, {"memory": {"recompute": "full"}}),
    "recompute and tp": (2, {"tp": 2}, {"memory": {"recompute": "full"}}),
    "selective": (2, {"tp": 2}, {"memory": {"recompute": "selective"}}),
    "offload": (1, {}, {"memory": {"offload": "activations"}}),
}


def _sections(
    processes: int, parallel: dict[str, Any], **others: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": 3},
        "parallel": parallel,
        "cluster": {"devices": processes},
        **others,
        "optim": {
            "name": "sgd", "lr": 1.0, "warmup_steps": 1, "decay_steps": 3, "global_batch": 4,
            "micro_batch": 1,
            **others.get("optim", {}),
        },
        "model": {"preset": "llama-tiny", "lora": LORA, **others.get("model", {})},
    }  # fmt: skip


class Found(NamedTuple):
    """Of one rank."""

    gradients: dict[str, np.ndarray]
    """Of the second step, whole and undivided."""
    state_bytes: dict[str, int]
    """Of the optimizer's tensors, by their name in a checkpoint."""
    parameters_bytes: int


def _look(run_dirs: list[RunDir]) -> list[Found]:
    found = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        Loop(training).step()  # before it B is zero, and A without a gradient
        training.stepper.accumulate(next(training.loader))
        gradients = {
            name: _whole(param.grad)
            for name, param in training.task.model.named_parameters()
            if param.grad is not None
        }
        states = {
            name: local_part(each).nbytes
            for name, each in training.tensors.items()
            if name.startswith("optim.")
        }
        held = sum(local_part(param).nbytes for param in training.task.model.parameters())
        found.append(Found(gradients, states, held))
        training.close()
    return found


def _whole(grad: Any) -> np.ndarray:
    found: np.ndarray = whole(grad).float().numpy()
    return found


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


@pytest.mark.parametrize(
    "cases", [SMALLEST, pytest.param(MORE, marks=pytest.mark.slow)], ids=["smallest", "more"]
)
def test_every_layout_takes_the_steps_of_one_process(
    corpus: Corpus, tmp_path: Path, cases: dict[str, Case]
) -> None:
    one = make_run(tmp_path / "one", corpus, _sections(1, {}))
    runs = {1: [one]}
    for case, (processes, parallel, others) in cases.items():
        run_dir = make_run(tmp_path / case, corpus, _sections(processes, parallel, **others))
        runs.setdefault(processes, []).append(run_dir)
    wanted: dict[str, np.ndarray] = {}
    for processes, run_dirs in runs.items():
        by_rank = run_on_ranks(_look, processes, run_dirs)
        for index, run_dir in enumerate(run_dirs):
            ranks = [found[index] for found in by_rank]
            together = {name: grad for found in ranks for name, grad in found.gradients.items()}
            wanted = wanted or together
            assert together.keys() == wanted.keys(), run_dir.path.name
            assert all(is_adapter(name) for name in together)
            for name, grad in together.items():
                apart = np.linalg.norm(grad - wanted[name])
                assert apart <= TOLERANCE * np.linalg.norm(wanted[name]), (run_dir.path.name, name)
        run_on_ranks(_train_all, processes, run_dirs)
    steps = {
        run_dir.path.name: [
            (line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)
        ]
        for run_dirs in runs.values()
        for run_dir in run_dirs
    }
    for case, found in steps.items():
        for pair, expected in zip(found, steps["one"], strict=True):
            assert pair == pytest.approx(expected, rel=TOLERANCE), case


def test_a_run_goes_on_in_another_layout(corpus: Corpus, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(1, {}))
    moved = make_run(tmp_path / "moved", corpus, {**_sections(2, {"tp": 2}), "run": {"steps": 2}})
    run_on_ranks(train_here, 1, whole)
    run_on_ranks(train_here, 2, moved)
    make_run(moved.path, corpus, _sections(2, {"dp_shard": 2, "zero": 3}), attempt=1)
    run_on_ranks(train_here, 2, moved, 1)
    for found, expected in zip(read_steps(moved.metrics), read_steps(whole.metrics), strict=True):
        pair = (found["loss"], found["grad_norm"])
        assert pair == pytest.approx((expected["loss"], expected["grad_norm"]), rel=TOLERANCE)


OTHERS: dict[str, Case] = {
    "experts": (2, {"ep": 2}, MIXTURE),
    "experts and tp": (2, {"tp": 2}, MIXTURE),
    "bert": (2, {"tp": 2}, {"model": {"preset": "bert-tiny"}, "task": {"name": "masked_lm"}}),
    "tied": (2, {"tp": 2}, {"model": {"preset": "llama-pocket"}}),
    "compiled": (2, {"dp_shard": 2}, {"model": {"compile": True}}),
    "dropout": (2, {"tp": 2}, {"model": {"dropout": 0.2}}),
    "LAMB": (2, {"tp": 2}, {"optim": {"name": "lamb", "lr": 1e-2}}),
    "bf16": (2, {"tp": 2}, BF16),
    "bf16 and zero 1": (2, {"dp_shard": 2, "zero": 1}, BF16),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=pytest.mark.slow if n == "compiled" else SYSTEM) for n in OTHERS],
)
def test_others_do_so_too(corpus: Corpus, tmp_path: Path, case: str) -> None:
    processes, parallel, others = OTHERS[case]
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, **others))
    many = make_run(tmp_path / "many", corpus, _sections(processes, parallel, **others))
    run_on_ranks(train_here, 1, one, timeout_s=900)  # a C++ compiler takes minutes on two cores
    run_on_ranks(train_here, processes, many, timeout_s=900)
    rel = 3e-2 if others is BF16 else TOLERANCE
    for found, expected in zip(read_steps(many.metrics), read_steps(one.metrics), strict=True):
        pair = (found["loss"], found["grad_norm"])
        assert pair == pytest.approx((expected["loss"], expected["grad_norm"]), rel=rel)


ENDS = {"lora": {**LORA, "modules_to_save": ["embed_tokens", "lm_head", "model.norm"]}}


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"dp_shard": 2, "zero": 3}, {}),
        ({"tp": 2}, {}),
        pytest.param({"dp_shard": 2, "zero": 3}, ENDS, marks=SYSTEM),
        pytest.param({"tp": 2}, ENDS, marks=SYSTEM),
    ],
    ids=["zero 3", "tp", "zero 3, with the table and the head", "tp, with the table and the head"],
)
def test_the_plan_counts_what_a_run_holds(
    corpus: Corpus, tmp_path: Path, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    run = make_run(
        tmp_path / "run",
        corpus,
        _sections(2, parallel, optim={"name": "adamw"}, model=model, **BF16),
    )
    held = run_on_ranks(_look, 2, [run])[0][0]
    assert {name.split(".", 2)[2] for name in held.state_bytes} == held.gradients.keys()
    resolved = read_resolved(run.resolved(0))
    assert resolved.shape is not None
    layout, _ = resolve_layout(resolved.recipe.parallel, world_size=2, devices_per_node=2)
    planned = memory(workload_of(resolved.recipe, resolved.shape, layout))
    assert planned.term("parameters") == pytest.approx(held.parameters_bytes, rel=1e-3)
    # a step count of four bytes stands beside the averages of each matrix
    counts = 4 * sum(name.startswith("optim.step.") for name in held.state_bytes)
    assert planned.term("optimizer") == sum(held.state_bytes.values()) - counts

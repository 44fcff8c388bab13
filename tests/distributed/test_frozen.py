"""What a recipe freezes is not trained, and costs neither gradient, state nor master copy; the rest
trains as it would."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shardyard.checkpoint.export import export
from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.parallel.gradients import local_part
from shardyard.planner.memory import memory
from shardyard.planner.workload import workload_of
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from shardyard.train.state import memory_by_kind
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, resolve_layout, train_here
from tests.distributed.whole import whole

SYSTEM = pytest.mark.system
TOLERANCE = 1e-5
BELOW = ("model.embed_tokens", "model.layers.0")
"""The table and the first of two blocks: nothing beneath the second needs a gradient."""
INSIDE = ("model.layers.*.mlp", "model.layers.1.self_attn.q_proj.weight")
"""Amid what is trained."""
MIXTURE = {"model": {"preset": "mixtral-tiny"}}

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"tp": 2}),
]
MORE: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp_shard": 2, "zero": 1}),
    (2, {"dp_shard": 2, "zero": 2}),
    (2, {"dp_replicate": 2, "dp_shard": 1}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (4, {"tp": 2, "dp_shard": 2}),
    (4, {"pp": 2, "dp_shard": 2, "zero": 3}),
]


def _sections(
    processes: int, parallel: dict[str, Any], frozen: tuple[str, ...], **others: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": 2},
        "optim": {"micro_batch": 1, "lr": 1e-3, "global_batch": 4},
        "parallel": parallel,
        "cluster": {"devices": processes},
        **others,
        "model": {"preset": "llama-tiny", "frozen": frozen, **others.get("model", {})},
    }


class Found(NamedTuple):
    """Of one rank."""

    gradients: dict[str, np.ndarray]
    """Of the first step, whole and undivided."""
    dtypes: dict[str, torch.dtype]
    """Of what is held, by name in a checkpoint."""
    bytes: dict[str, int]


def _look(run_dirs: list[RunDir]) -> list[Found]:
    found = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        training.stepper.accumulate(next(training.loader))
        gradients = {
            name: _whole(param.grad)
            for name, param in training.task.model.named_parameters()
            if param.grad is not None
        }
        dtypes = {name: local_part(each).dtype for name, each in training.tensors.items()}
        found.append(Found(gradients, dtypes, memory_by_kind(training.tensors, training.device)))
        training.close()
    return found


def _whole(grad: Any) -> np.ndarray:
    found: np.ndarray = whole(grad).float().numpy()
    return found


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


def _is_frozen(name: str, frozen: tuple[str, ...]) -> bool:
    if frozen == BELOW:
        return "embed_tokens" in name or ".layers.0." in name
    assert frozen == INSIDE
    return ".mlp." in name or "layers.1.self_attn.q_proj" in name


@pytest.mark.parametrize("frozen", [BELOW, INSIDE], ids=["below", "inside"])
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["smallest", "more"]
)
def test_gradients_are_those_of_a_run_that_freezes_nothing(
    corpus: Corpus,
    tmp_path: Path,
    frozen: tuple[str, ...],
    layouts: list[tuple[int, dict[str, Any]]],
) -> None:
    free = make_run(tmp_path / "free", corpus, _sections(1, {}, ()))
    runs = {1: [free, make_run(tmp_path / "one", corpus, _sections(1, {}, frozen))]}
    for index, (processes, parallel) in enumerate(layouts):
        run_dir = make_run(
            tmp_path / f"layout-{index}", corpus, _sections(processes, parallel, frozen)
        )
        runs.setdefault(processes, []).append(run_dir)
    wanted: dict[str, np.ndarray] = {}
    for processes, run_dirs in runs.items():
        by_rank = run_on_ranks(_look, processes, run_dirs)
        for index, run_dir in enumerate(run_dirs):
            ranks = [found[index] for found in by_rank]
            together = {name: grad for found in ranks for name, grad in found.gradients.items()}
            if run_dir is free:
                wanted = {n: g for n, g in together.items() if not _is_frozen(n, frozen)}
                assert len(wanted) < len(together)
                continue
            assert together.keys() == wanted.keys(), run_dir.path.name
            for name, grad in together.items():
                scale = np.linalg.norm(wanted[name])
                assert np.linalg.norm(grad - wanted[name]) <= TOLERANCE * scale, name
            states = {name for found in ranks for name in found.dtypes if name.startswith("optim.")}
            assert {name.split(".", 2)[2] for name in states} == wanted.keys()
        run_on_ranks(_train_all, processes, run_dirs)
    steps = [
        [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]
        for run_dirs in runs.values()
        for run_dir in run_dirs
    ]
    for found in steps[2:]:
        for pair, expected in zip(found, steps[1], strict=True):
            assert pair == pytest.approx(expected, rel=TOLERANCE)
    assert steps[1][0][0] == pytest.approx(steps[0][0][0], rel=TOLERANCE)


def _tensors(run_dir: RunDir, step: int) -> dict[str, torch.Tensor]:
    shapes = read_shapes(run_dir.checkpoint(step))
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    load_tensors(run_dir.checkpoint(step), tensors)
    return tensors


BF16 = {"precision": {"compute": "bf16"}}


def test_what_is_frozen_stays_bit_for_bit_in_16_bit_and_moves_between_layouts(
    corpus: Corpus, tmp_path: Path
) -> None:
    every_step = {"checkpoint": {"every": 1, "keep_last": 9}}
    sections = _sections(2, {"dp_shard": 2, "zero": 3}, BELOW, **BF16, **every_step)
    run = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(train_here, 2, run)
    first, last = _tensors(run, 1), _tensors(run, 2)
    for name, before in first.items():
        parameter = name.removeprefix("model.") if name.startswith("model.") else name
        if not name.startswith("model."):
            assert before.dtype == torch.float32 and not _is_frozen(parameter, BELOW), name
        elif _is_frozen(parameter, BELOW):
            assert before.dtype == torch.bfloat16, name
            assert torch.equal(before, last[name]), name
        else:
            assert before.dtype == torch.float32, name
            assert not torch.equal(before, last[name]), name

    # another layout goes on with it; an export rounds nothing that was trained
    longer = {**_sections(2, {"tp": 2}, BELOW, **BF16, **every_step), "run": {"steps": 3}}
    make_run(run.path, corpus, longer, attempt=1)
    run_on_ranks(train_here, 2, run, 1)
    moved = _tensors(run, 3)
    table = "model.model.embed_tokens.weight"
    assert torch.equal(moved[table], first[table])
    exported = tmp_path / "exported"
    export(run.checkpoint(3), read_resolved(run.resolved(1)), exported)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(loaded[name].float(), moved[f"model.{name}"].float()), name


@pytest.mark.parametrize("frozen", [(), BELOW], ids=["nothing", "below"])
def test_the_plan_counts_what_a_run_holds(
    corpus: Corpus, tmp_path: Path, frozen: tuple[str, ...]
) -> None:
    parallel = {"dp_shard": 2, "dp_replicate": 1, "zero": 3}
    run = make_run(tmp_path / "run", corpus, _sections(2, parallel, frozen, **BF16))
    held = run_on_ranks(_look, 2, [run])[0][0].bytes
    resolved = read_resolved(run.resolved(0))
    assert resolved.shape is not None
    layout, _ = resolve_layout(resolved.recipe.parallel, world_size=2, devices_per_node=2)
    planned = memory(workload_of(resolved.recipe, resolved.shape, layout))
    assert planned.term("parameters") == pytest.approx(held["parameters_bytes"], rel=1e-3)
    assert planned.term("optimizer") == pytest.approx(held["optimizer_bytes"], rel=1e-3)


def test_another_choice_of_what_is_frozen_is_another_run(corpus: Corpus, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", corpus, _sections(1, {}, BELOW))
    run_on_ranks(train_here, 1, run)
    longer = {**_sections(1, {}, ()), "run": {"steps": 3}}
    make_run(run.path, corpus, longer, attempt=1)
    with pytest.raises(Exception, match=r"model\.frozen: \['model\.embed_tokens'") as error:
        run_on_ranks(train_here, 1, run, 1)
    assert "neither run" in str(error.value)


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_tied_table_is_frozen_under_either_name(
    corpus: Corpus, tmp_path: Path, name: str
) -> None:
    sections = _sections(1, {}, (name,), model={"preset": "llama-pocket"})
    found = run_on_ranks(_look, 1, [make_run(tmp_path / "run", corpus, sections)])[0][0]
    names = {name for name in found.dtypes if name.startswith("model.")}
    assert {f"model.{each}" for each in found.gradients} == names - {
        "model.model.embed_tokens.weight"
    }


OTHERS: dict[str, tuple[int, dict[str, Any], tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "experts": (2, {"ep": 2}, ("model.layers.*.mlp.experts",), MIXTURE),
    "router": (2, {"tp": 2}, ("model.layers.*.mlp.router",), MIXTURE),
    "all but the head": (2, {"pp": 2}, ("model",), {}),
    "zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}, BELOW, {}),
    "zero-bubble inside": (2, {"pp": 2, "schedule": "zero-bubble"}, INSIDE, {}),
    "recompute": (2, {"dp_shard": 2}, BELOW, {"memory": {"recompute": "full"}}),
    "selective": (2, {"tp": 2}, INSIDE, {"memory": {"recompute": "selective"}}),
    "offload": (1, {}, INSIDE, {"memory": {"offload": "activations"}}),
    "offload below": (1, {}, BELOW, {"memory": {"offload": "activations"}}),
    "LAMB": (2, {"pp": 2}, BELOW, {"optim": {"name": "lamb", "global_batch": 4, "lr": 1e-3}}),
    "SGD": (2, {"pp": 2}, BELOW, {"optim": {"name": "sgd", "global_batch": 4, "lr": 1e-3}}),
    "fp8": (1, {}, INSIDE, {"precision": {"compute": "fp8"}}),
    "bf16": (2, {"dp_shard": 2, "zero": 1}, INSIDE, BF16),
    "dropout": (2, {"dp_shard": 2}, BELOW, {"model": {"dropout": 0.2}}),
}  # fmt: skip


@SYSTEM
@pytest.mark.parametrize("case", OTHERS)
def test_others_take_the_steps_of_one_process(corpus: Corpus, tmp_path: Path, case: str) -> None:
    processes, parallel, frozen, others = OTHERS[case]
    plain = {name: value for name, value in others.items() if name != "memory"}
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, frozen, **plain))
    many = make_run(tmp_path / "many", corpus, _sections(processes, parallel, frozen, **others))
    run_on_ranks(train_here, 1, one)
    run_on_ranks(train_here, processes, many)
    rel = 3e-2 if case in ("fp8", "bf16") else TOLERANCE
    for found, expected in zip(read_steps(many.metrics), read_steps(one.metrics), strict=True):
        pair = (found["loss"], found["grad_norm"])
        assert pair == pytest.approx((expected["loss"], expected["grad_norm"]), rel=rel)

"""Experts dealt over ranks compute the step that one process computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.whole import whole

STEPS = 4
TOLERANCE = 1e-5
DEALS_EXPERTS = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="this torch has one mesh for all parameters of a group"
)
MEASURES = ("loss", "grad_norm", "expert_load", "router_aux_loss", "router_z_loss")

LAYOUTS: list[tuple[int, dict[str, Any], int, Any]] = [
    # processes, parallel, micro_batch (of a global batch of 6), recompute
    (1, {}, 4, "full"),  # 4 does not divide 6: a padded micro-batch
    (2, {"dp_shard": 2}, 2, "none"),  # 3 micro-batches over 2 ranks: a weightless one
    (2, {"tp": 2}, 2, "none"),
    (2, {"ep": 2}, 1, "none"),
    (2, {"ep": 2, "zero": 1}, 2, "selective"),
    (2, {"ep": 2, "zero": 2}, 3, "full"),
    (4, {"ep": 4}, 1, "none"),
    (4, {"ep": 2, "dp_shard": 4}, 1, "full"),
    (4, {"ep": 2, "dp_shard": 2, "dp_replicate": 2}, 1, "none"),
    (4, {"ep": 2, "tp": 2}, 2, "selective"),
]
LARGE: list[tuple[int, dict[str, Any], int, Any]] = [
    (8, {"ep": 2, "tp": 2, "dp_shard": 4}, 1, "none"),
    (8, {"ep": 2, "tp": 2, "dp_shard": 2, "dp_replicate": 2}, 1, "full"),
    (8, {"ep": 4, "tp": 2, "dp_shard": 4, "zero": 2}, 1, "none"),
]


def _sections(
    processes: int,
    parallel: dict[str, Any],
    micro_batch: int,
    *,
    dropout: float = 0.0,
    recompute: Any = "none",
    preset: str = "mixtral-tiny",
    optimizer: str = "adamw",
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"preset": preset, "dropout": dropout},
        "data": {"attend_across_documents": dropout == 0},
        # a low rate: under a high one rounding grows by a factor of ten a step
        "optim": {"name": optimizer, "micro_batch": micro_batch, "lr": 2e-3},
        "memory": {"recompute": recompute},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


def _same_steps(
    corpus: Corpus, folder: Path, layouts: list[tuple[int, dict[str, Any], int, Any]], **how: Any
) -> None:
    reference = make_run(folder / "one", corpus, _sections(1, {}, 6, **how))
    runs: dict[int, list[RunDir]] = {1: [reference]}
    for index, (processes, parallel, micro_batch, recompute) in enumerate(layouts):
        sections = _sections(processes, parallel, micro_batch, recompute=recompute, **how)
        runs.setdefault(processes, []).append(make_run(folder / str(index), corpus, sections))
    for processes, run_dirs in runs.items():
        run_on_ranks(_train_all, processes, run_dirs)

    expected = [[line[key] for key in MEASURES] for line in read_steps(reference.metrics)]
    assert len(expected) == STEPS and all(line[2] > 1 for line in expected)
    scores = read_evaluations(reference.metrics)[-1]["eval"]["loss"]
    for run_dir in [run_dir for run_dirs in runs.values() for run_dir in run_dirs]:
        for line, wanted in zip(read_steps(run_dir.metrics), expected, strict=True):
            found = [line[key] for key in MEASURES]
            assert found == pytest.approx(wanted, rel=TOLERANCE), run_dir.path.name
        found = read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]
        assert found == pytest.approx(scores, rel=TOLERANCE), run_dir.path.name


@pytest.mark.parametrize(
    ("layouts", "dropout"),
    [
        (LAYOUTS[2:3], 0.2),
        pytest.param(LAYOUTS[3:4], 0.2, marks=DEALS_EXPERTS),
        pytest.param([*LAYOUTS[:2], *LAYOUTS[4:]], 0.2, marks=pytest.mark.slow),
        pytest.param(LAYOUTS, 0.0, marks=pytest.mark.slow),
    ],
    ids=["tp", "ep", "more", "all, no dropout"],
)
def test_every_layout_takes_the_same_steps(
    corpus: Corpus,
    tmp_path: Path,
    layouts: list[tuple[int, dict[str, Any], int, Any]],
    dropout: float,
) -> None:
    _same_steps(corpus, tmp_path, layouts, dropout=dropout)


@pytest.mark.system
def test_a_model_with_norms_of_heads_takes_the_same_steps(corpus: Corpus, tmp_path: Path) -> None:
    layouts = [LAYOUTS[2], LAYOUTS[3], LAYOUTS[9]]
    _same_steps(corpus, tmp_path, layouts, dropout=0.2, preset="qwen3-moe-tiny")


@DEALS_EXPERTS
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "lamb", "muon", "schedule_free_adamw"])
def test_optimizers_take_each_expert_for_a_matrix_in_every_layout(
    optimizer: str, corpus: Corpus, tmp_path: Path
) -> None:
    hybrid = (4, {"dp_shard": 2, "dp_replicate": 2}, 1, "none")
    layouts = [hybrid, LAYOUTS[3], *LAYOUTS[7:]]
    _same_steps(corpus, tmp_path, layouts, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_eight_processes_take_the_same_steps(
    corpus: Corpus, tmp_path: Path, dropout: float
) -> None:
    _same_steps(corpus, tmp_path, LARGE, dropout=dropout)


def _first_gradients(run_dirs: list[RunDir]) -> list[dict[str, Any]]:
    """Gradients of the first step, whole, divided by the tokens of the step."""
    found = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        tokens = training.stepper.accumulate(next(training.loader)).divisor
        if not training.mesh.speaks_for_samples:
            tokens = 0
        total = sum(training.gather(tokens))
        gradients = {}
        for name, param in training.task.model.named_parameters():
            assert param.grad is not None, name
            gradients[name] = (whole(param.grad) / total).numpy()
        training.close()
        found.append(gradients)
    return found


@pytest.mark.system
def test_first_gradients_are_those_of_one_process(corpus: Corpus, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "dp_replicate": 2}]
    layouts += [{"dp_shard": 4, "ep": 2, "zero": 1}, {"tp": 2, "dp_shard": 2}]
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, dropout=0.2))
    runs = [
        make_run(tmp_path / str(index), corpus, _sections(4, parallel, 1, dropout=0.2))
        for index, parallel in enumerate(layouts)
    ]
    (expected,) = run_on_ranks(_first_gradients, 1, [one])[0]
    norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    for layout, found in zip(layouts, run_on_ranks(_first_gradients, 4, runs)[-1], strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert np.linalg.norm(found[name] - gradient) <= TOLERANCE * norm, (layout, name)


def _train_until(run_dir: RunDir, attempt: int, steps: int) -> str:
    from shardyard.train.run import train

    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= steps

    return train(
        run_dir, attempt, Hooks(generation=0, drain_requested=drain_requested, events=None)
    )


@pytest.mark.system
def test_a_checkpoint_goes_on_in_another_layout_and_is_exported(
    corpus: Corpus, tmp_path: Path
) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(1, {}, 2))
    parts = make_run(tmp_path / "parts", corpus, _sections(4, {"ep": 2, "tp": 2}, 1))
    run_on_ranks(train_here, 1, whole)
    run_on_ranks(_train_until, 4, parts, 0, 1)
    make_run(parts.path, corpus, _sections(2, {"ep": 2}, 1), attempt=1)
    run_on_ranks(_train_until, 2, parts, 1, 2)
    make_run(parts.path, corpus, _sections(1, {}, 2), attempt=2)
    run_on_ranks(train_here, 1, parts, 2)
    expected = [line["loss"] for line in read_steps(whole.metrics)]
    found = [line["loss"] for line in read_steps(parts.metrics)]
    assert found == pytest.approx(expected, rel=TOLERANCE) and len(found) == STEPS

    logits = []
    for run_dir, attempt in ((whole, 0), (parts, 2)):
        chosen = choose_checkpoint(run_dir, "latest")
        folder = tmp_path / f"export-{attempt}"
        export(chosen.path, read_resolved(run_dir.resolved(attempt)), folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits.append(model(input_ids=torch.arange(24)[None]).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


class _Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of every all-to-all message that this rank sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            self.bytes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def _sent(run_dir: RunDir) -> list[int]:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=0)
    with _Sent() as sent:
        training.stepper.run(next(training.loader), lr=1e-3, drain=False)
    training.close()
    found: list[int] = sent.bytes
    return found


@DEALS_EXPERTS
def test_a_visit_travels_twice_forward_and_twice_backward(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections(2, {"ep": 2}, 3))
    sent = run_on_ranks(_sent, 2, run_dir)
    blocks, experts, width = 2, 8, 64
    for messages in sent:
        assert len(messages) == 5 * blocks
    # of each rank 3 samples of 32 tokens, 2 visits a token, and one count an expert
    visits = 2 * (3 * 32 * 2)
    counts = 2 * experts * 8
    assert sum(map(sum, sent)) == blocks * (4 * visits * width * 4 + counts)

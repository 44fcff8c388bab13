"""A pipeline takes the same steps as one process, whatever its schedule, and so do its pieces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.parallel import apply
from shardyard.rundir.jsonl import read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.whole import whole

STEPS = 5
TOLERANCE = 1e-5

GPIPE: dict[str, Any] = {"pp": 2, "schedule": "gpipe"}
INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
ZERO_BUBBLE: dict[str, Any] = {"pp": 2, "schedule": "zero-bubble"}
SENDS_TO_ITSELF = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="with this torch stages of one rank need NCCL"
)
ZB_V: dict[str, Any] = {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}

LAYOUTS: list[tuple[int, dict[str, Any], int]] = [
    # processes, parallel, micro_batch (of a global batch of 6)
    (2, {"pp": 2}, 3),
    (2, INTERLEAVED, 1),
    (2, ZERO_BUBBLE, 1),
    (2, ZB_V, 2),
    (4, {"pp": 4}, 1),
    (4, {"pp": 2, "tp": 2}, 2),
    (4, {**GPIPE, "dp_shard": 2, "zero": 3}, 1),
    (4, {**INTERLEAVED, "dp_shard": 2, "zero": 3}, 1),
]
MORE: list[tuple[int, dict[str, Any], int]] = [
    (2, {"pp": 2}, 1),
    (2, GPIPE, 2),
    (4, {"pp": 2, "dp_shard": 2, "zero": 1}, 1),
    (4, {"pp": 2, "dp_shard": 2, "zero": 2}, 1),
    (4, {"pp": 2, "dp_shard": 2, "zero": 3}, 1),
    (4, {"pp": 2, "dp_shard": 1, "dp_replicate": 2}, 1),
    (4, {**ZERO_BUBBLE, "virtual_stages": 2, "dp_shard": 2, "zero": 2}, 1),
    (4, {**ZB_V, "dp_shard": 2, "zero": 1}, 1),
    (4, {**ZB_V, "tp": 2}, 1),
]


def _sections(
    processes: int, parallel: dict[str, Any], micro_batch: int, dropout: float
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"preset": "llama-tiny-deep", "dropout": dropout},
        "data": {"attend_across_documents": dropout == 0},  # both masks are covered
        "optim": {"micro_batch": micro_batch, "lr": 1e-3},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == FINISHED


def _steps(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


def _eval_loss(run_dir: RunDir) -> float:
    loss: float = read_evaluations(run_dir.metrics)[-1]["eval"]["loss"]
    return loss


@pytest.mark.parametrize(
    ("layouts", "dropout"),
    [
        ([LAYOUTS[0]], 0.2),
        pytest.param([LAYOUTS[3]], 0.2, marks=SENDS_TO_ITSELF),
        pytest.param([*LAYOUTS[1:3], *LAYOUTS[4:]], 0.2, marks=pytest.mark.system),
        pytest.param(MORE, 0.2, marks=pytest.mark.slow),
        pytest.param([*LAYOUTS, *MORE], 0.0, marks=pytest.mark.slow),
    ],
    ids=["one", "v", "some", "more", "all, no dropout"],
)
def test_every_pipeline_takes_the_same_steps(
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
        run_on_ranks(_train_all, processes, run_dirs, timeout_s=900)
    assert len(_steps(reference)) == STEPS
    for run_dir in [run_dir for run_dirs in runs.values() for run_dir in run_dirs]:
        for found, expected in zip(_steps(run_dir), _steps(reference), strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE), run_dir.path.name
        assert _eval_loss(run_dir) == pytest.approx(_eval_loss(reference), rel=TOLERANCE)


@pytest.mark.slow
def test_three_axes_together_take_the_same_steps(corpus: Corpus, tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, 0.2))
    parallel = {"pp": 2, "tp": 2, "dp_shard": 2}
    eight = make_run(tmp_path / "eight", corpus, _sections(8, parallel, 1, 0.2))
    run_on_ranks(train_here, 1, one)
    run_on_ranks(train_here, 8, eight, timeout_s=900)
    for found, expected in zip(_steps(eight), _steps(one), strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCE)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "recompute": ({"pp": 2}, {"memory": {"recompute": "full"}}),
    "recompute, split backward": (ZB_V, {"memory": {"recompute": "full"}}),
    "selective, interleaved": (INTERLEAVED, {"memory": {"recompute": "selective"}}),
    "bf16": ({"pp": 2}, {"precision": {"compute": "bf16", "output": "fp32"}}),
}


def _train_all_without_copies(run_dirs: list[RunDir]) -> None:
    """One process holds copies in bf16, whose gradients are rounded at other places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "can_hold_copies", lambda *_, **__: False)
        _train_all(run_dirs)


@pytest.mark.system
@pytest.mark.slow
def test_recompute_and_formats_work_in_stages_as_in_a_whole_model(
    corpus: Corpus, tmp_path: Path
) -> None:
    def run(name: str, processes: int, parallel: dict[str, Any]) -> RunDir:
        folder = tmp_path / f"{name.replace(' ', '-')}-{processes}"
        return make_run(
            folder, corpus, {**_sections(processes, parallel, 1, 0.2), **VARIANTS[name][1]}
        )

    whole = {name: run(name, 1, {}) for name in VARIANTS}
    cut = {name: run(name, 2, parallel) for name, (parallel, _) in VARIANTS.items()}
    run_on_ranks(_train_all_without_copies, 1, list(whole.values()), timeout_s=600)
    run_on_ranks(_train_all, 2, list(cut.values()), timeout_s=600)
    for name in VARIANTS:
        for found, expected in zip(_steps(cut[name]), _steps(whole[name]), strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE), name
    assert _steps(cut["bf16"]) != _steps(cut["recompute"])  # it does what it says


# --- gradients ----------------------------------------------------------------------------------


def _first_gradients(run_dirs: list[RunDir]) -> list[dict[str, Any]]:
    """Of each run the gradients of the first step that this rank holds, whole and undivided."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    found = []
    for run_dir in run_dirs:
        training = set_up(run_dir, 0, hooks, local_rank=0)
        training.stepper.accumulate(next(training.loader))
        gradients = {}
        for name, param in training.task.model.named_parameters():
            assert param.grad is not None, name
            gradients[name] = whole(param.grad).numpy()
        found.append(gradients)
        training.close()
    return found


GRADIENTS: list[dict[str, Any]] = [
    {"pp": 2, "dp_shard": 2, "zero": 1},
    {"pp": 2, "dp_shard": 2, "zero": 2},
    {"pp": 2, "dp_shard": 2, "zero": 3},
    {**GPIPE, "dp_shard": 2, "zero": 3},
    {**INTERLEAVED, "dp_shard": 2, "zero": 3},
    {**INTERLEAVED, "tp": 2},  # 5 micro-batches become 6: the schedule goes in rounds
    {**ZERO_BUBBLE, "dp_shard": 2, "zero": 1},
    {**ZERO_BUBBLE, "dp_shard": 2, "zero": 2},
    {**ZB_V, "dp_shard": 1, "dp_replicate": 2, "zero": 2},
    {**ZB_V, "dp_shard": 2, "zero": 2},
]


@pytest.mark.system
def test_first_gradients_of_every_tensor_are_those_of_one_process(
    corpus: Corpus, tmp_path: Path
) -> None:
    def run(name: str, sections: dict[str, dict[str, Any]]) -> RunDir:
        sections["optim"]["global_batch"] = 5
        return make_run(tmp_path / name, corpus, sections)

    one = run("one", _sections(1, {}, 5, 0.2))
    many = [run(str(n), _sections(4, par, 1, 0.2)) for n, par in enumerate(GRADIENTS)]
    [expected] = run_on_ranks(_first_gradients, 1, [one])[0]
    by_rank = run_on_ranks(_first_gradients, 4, many, timeout_s=600)

    norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    for index, parallel in enumerate(GRADIENTS):
        found = {name: g for gradients in by_rank for name, g in gradients[index].items()}
        assert found.keys() == expected.keys()
        assert by_rank[0][index].keys() != by_rank[-1][index].keys()  # ranks hold different stages
        for name, gradient in expected.items():
            assert np.linalg.norm(found[name] - gradient) <= TOLERANCE * norm, (parallel, name)


# --- checkpoints, evaluation, text --------------------------------------------------------------


def _resumable(processes: int, parallel: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    sections = _sections(processes, parallel, 1, 0.2)
    sections["run"] = {"steps": steps}
    sections["optim"]["decay_steps"] = 4
    sections["task"] = {"generate_tokens": 6}
    return sections


@pytest.mark.system
def test_a_checkpoint_moves_between_pipelines_and_other_layouts(
    corpus: Corpus, tmp_path: Path
) -> None:
    ways: dict[str, list[tuple[int, dict[str, Any]]]] = {
        "whole": [(1, {}), (1, {})],
        "into": [(1, {}), (2, INTERLEAVED)],
        "out of": [(2, {"pp": 2}), (1, {})],
        "within": [(2, {"pp": 2}), (2, ZB_V)],
    }
    runs = {}
    for name, ((before, parallel), (after, parallel_after)) in ways.items():
        run_dir = runs[name] = make_run(tmp_path / name, corpus, _resumable(before, parallel, 2))
        run_on_ranks(train_here, before, run_dir)
        make_run(run_dir.path, corpus, _resumable(after, parallel_after, 4), attempt=1)
        run_on_ranks(train_here, after, run_dir, 1)
    for name, run_dir in runs.items():
        assert len(_steps(run_dir)) == 4
        for found, expected in zip(_steps(run_dir), _steps(runs["whole"]), strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE), name
        assert run_dir.sample.read_text() == runs["whole"].sample.read_text(), name


@pytest.mark.system
def test_a_pipeline_goes_on_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    parallel = {"pp": 2, "dp_shard": 2}
    whole = make_run(tmp_path / "whole", corpus, _resumable(4, parallel, 4))
    parts = make_run(tmp_path / "parts", corpus, _resumable(4, parallel, 2))
    run_on_ranks(_train_all, 4, [whole, parts])
    make_run(parts.path, corpus, _resumable(4, parallel, 4), attempt=1)
    run_on_ranks(train_here, 4, parts, 1)
    assert _steps(parts) == _steps(whole)
    digests = [
        json.loads((run_dir.checkpoint(4) / "manifest.json").read_text())["files"]
        for run_dir in (whole, parts)
    ]
    assert digests[0] == digests[1]


def _train_with_events(run_dir: RunDir) -> str:
    import torch.distributed as dist

    from shardyard.rundir.jsonl import EventWriter
    from shardyard.train.run import train

    events = EventWriter(run_dir.events, attempt=0, generation=0) if dist.get_rank() == 0 else None
    return train(run_dir, 0, Hooks(generation=0, drain_requested=lambda: False, events=events))


def test_each_rank_holds_its_stage_alone(corpus: Corpus, tmp_path: Path) -> None:
    sections = _sections(2, {"pp": 2}, 1, 0.0)
    sections["run"]["steps"] = 1
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(_train_with_events, 2, run_dir)
    [ready] = [event for event in read_lines(run_dir.events) if event["kind"] == "model_ready"]
    held = [rank["parameters_bytes"] for rank in ready["memory_by_rank"]]
    assert sum(held) == 4 * ready["parameters"]
    assert max(held) < 0.7 * sum(held)

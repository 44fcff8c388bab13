"""A run that is stopped and goes on equals one that was never stopped."""

import hashlib
import io
import json
import os
import shutil
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shardyard.config.resolved import RollbackTarget
from shardyard.control.follow import describe_event
from shardyard.control.resume import check_step_exists, go_back, is_finished
from shardyard.data.loader import MicroBatch
from shardyard.errors import CheckpointError, RecipeError, RequestError, TrainingError
from shardyard.observe.metrics import SAMPLES_MARK
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.token_losses import LanguageModel
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

STEPS = 6


def _sections(processes: int, **parallel: Any) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"dropout": 0.1},
        "task": {"eval_every_steps": 2},
        "checkpoint": {"every": 4, "keep_last": 9},
        "parallel": parallel,
        "cluster": {"devices": processes},
    }


def _train_draining_at(run_dir: RunDir, attempt: int, step: int, rank_that_knows: int) -> str:
    """Train, with a drain requested on one rank from a step on."""
    import torch.distributed as dist

    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= step and dist.get_rank() == rank_that_knows

    return train(run_dir, attempt, Hooks(
        generation=0, drain_requested=drain_requested, events=None
    ))  # fmt: skip


def _format_of_averages(run_dir: RunDir) -> str:
    """As the header of a safetensors file names it."""
    content = (run_dir.checkpoint(STEPS) / "rank-00000.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return str(header["optim.exp_avg_sq.model.norm.weight"]["dtype"])


def _digests(run_dir: RunDir) -> dict[str, str]:
    manifest = json.loads((run_dir.checkpoint(STEPS) / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


@pytest.mark.parametrize(
    ("states", "optim"),
    [
        ("fp32", {}),
        pytest.param("bf16", {}, marks=pytest.mark.system),
        pytest.param("fp32", {"name": "muon"}, marks=pytest.mark.system),
        pytest.param("fp32", {"name": "adafactor"}, marks=pytest.mark.system),
        pytest.param(
            "fp32", {"name": "schedule_free_adamw", "ema_decay": None}, marks=pytest.mark.system
        ),
    ],
    ids=["fp32", "bf16", "muon", "adafactor", "schedule-free"],
)
def test_a_drained_run_goes_on_bit_for_bit(
    corpus: Corpus, tmp_path: Path, states: str, optim: dict[str, Any]
) -> None:
    sections = {
        **_sections(2),
        "optim": {"ema_decay": 0.9, **optim},
        "precision": {"optimizer_states": states},
    }
    whole = make_run(tmp_path / "whole", corpus, sections)
    parts = make_run(tmp_path / "parts", corpus, sections)
    assert run_on_ranks(train_here, 2, whole) == [FINISHED] * 2

    # rank 1 alone is asked: all ranks must stop after the same step, with that step saved
    assert run_on_ranks(_train_draining_at, 2, parts, 0, 3, 1) == [DRAINED] * 2
    assert parts.latest.read_text().strip() == "step-00000003"
    make_run(parts.path, corpus, sections, attempt=1)
    assert run_on_ranks(train_here, 2, parts, 1) == [FINISHED] * 2
    assert _format_of_averages(parts) == {"fp32": "F32", "bf16": "BF16"}[states]

    assert _digests(parts) == _digests(whole)
    losses = [[line["loss"] for line in read_steps(run.metrics)] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert read_evaluations(parts.metrics) == read_evaluations(whole.metrics)


def _told(run_dir: RunDir) -> list[Any]:
    steps = [(line["step"], line["loss"], line["tokens"]) for line in read_steps(run_dir.metrics)]
    return [steps, read_evaluations(run_dir.metrics)]


def train_until_killed(run_dir: RunDir, training: bool, passes: int) -> None:
    """Train, until this process is killed in a forward pass, of those of steps or evaluations."""
    forward, seen = LanguageModel.loss_sum, 0

    def killed(self: LanguageModel, batch: MicroBatch) -> Tensor:
        nonlocal seen
        seen += self.model.training is training
        if seen == passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, batch)

    LanguageModel.loss_sum = killed  # type: ignore[method-assign]
    train_here(run_dir)


@pytest.mark.parametrize(
    ("training", "passes"),
    [(True, 5 * 6 + 3), (False, 1), pytest.param(False, -1, marks=pytest.mark.system)],
    ids=["accumulation", "first evaluation", "last evaluation"],
)
def test_a_run_that_is_killed_inside_a_step_or_an_evaluation_goes_on_bit_for_bit(
    corpus: Corpus, tmp_path: Path, training: bool, passes: int
) -> None:
    """Killed in the third of six micro-batches of step 6, or in the middle of an evaluation."""
    sections = {**_sections(1), "optim": {"ema_decay": 0.9, "global_batch": 6, "micro_batch": 1}}
    whole = make_run(tmp_path / "whole", corpus, sections)
    parts = make_run(tmp_path / "parts", corpus, sections)
    run_on_ranks(train_here, 1, whole)
    samples = corpus.facts.num_samples("eval", 32)
    if not training:
        passes = samples // 2 + (2 * samples if passes < 0 else 0)
    with pytest.raises(RuntimeError, match="ended without an answer"):
        run_on_ranks(train_until_killed, 1, parts, training, passes)
    assert STEPS not in parts.checkpoint_steps()
    run_on_ranks(train_here, 1, parts)
    assert _digests(parts) == _digests(whole)
    assert _told(parts) == _told(whole)


def test_a_run_goes_on_with_other_processes_and_strategy(corpus: Corpus, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(1))
    parts = make_run(tmp_path / "parts", corpus, _sections(2, strategy="FULL_SHARD"))
    run_on_ranks(train_here, 1, whole)
    run_on_ranks(_train_draining_at, 2, parts, 0, 3, 0)
    make_run(parts.path, corpus, _sections(3, strategy="NO_SHARD"), attempt=1)
    run_on_ranks(train_here, 3, parts, 1)
    expected = [line["loss"] for line in read_steps(whole.metrics)]
    found = [line["loss"] for line in read_steps(parts.metrics)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_batch_per_device_grows_with_the_processes_and_the_length_does_not(
    corpus: Corpus, tmp_path: Path
) -> None:
    optim = {
        "global_batch": "auto", "batch_per_device": 2, "lr_scaling": "linear", "lr": 1e-3,
        "schedule": "linear", "warmup_steps": 2, "decay_steps": 6,
    }  # fmt: skip
    sections = {**_sections(1), "optim": optim, "observe": {"sample_ids": True}}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    assert run_on_ranks(_train_draining_at, 1, run_dir, 0, 2, 0) == [DRAINED]
    begun = read_resolved(run_dir.resolved(0))
    with run_dir.metrics.open("a") as file:  # as if it had gone on for longer, and was then killed
        done = read_steps(run_dir.metrics)[-1]
        for step in (3, 4, 5, 6):
            file.write(json.dumps({**done, "step": step, "loss": 99.0}) + "\n")
            file.write(json.dumps({"step": step, "eval": {"loss": 99.0}}) + "\n")
    sections["cluster"] = {"devices": 3}
    make_run(run_dir.path, corpus, sections, attempt=1, previous=begun)
    assert run_on_ranks(_train_attempt_with_events, 3, run_dir, 1) == [FINISHED] * 3

    ready = [event for event in read_lines(run_dir.events) if event["kind"] == "model_ready"]
    assert [event["last_step"] for event in ready] == [4]  # of the second attempt, of 6 before
    # 6 steps of 2 samples are 12: 2 steps of 2, then 2 of 6, the last of which is read whole
    lines = read_steps(run_dir.metrics)
    assert [line["samples"] for line in lines] == [2, 4, 10, 16]
    # warmed up by sample 4; at sample 10, 3/4 of the way down to a tenth; three times the batch
    assert [line["lr"] for line in lines] == pytest.approx(
        [0.5e-3, 1e-3, 3 * (0.1 + 0.9 / 4) * 1e-3, 3 * 0.1 * 1e-3]
    )
    evaluations = read_evaluations(run_dir.metrics)
    assert [line["step"] for line in evaluations] == [2, 4]
    (end,) = (event for event in read_lines(run_dir.events) if event["kind"] == "run_finished")
    assert (end["loss"], end["eval"]) == (lines[-1]["loss"], evaluations[-1]["eval"])


def test_a_resume_may_change_the_format_of_averages(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections(1))
    run_on_ranks(_train_draining_at, 1, run_dir, 0, 3, 0)
    sections = {**_sections(1), "precision": {"optimizer_states": "bf16"}}
    make_run(run_dir.path, corpus, sections, attempt=1)
    assert run_on_ranks(train_here, 1, run_dir, 1) == [FINISHED]
    assert _format_of_averages(run_dir) == "BF16"


def test_a_checkpoint_after_an_evaluation_holds_the_optimizer(
    corpus: Corpus, tmp_path: Path
) -> None:
    # an evaluation leaves parameters gathered, under which FSDP hides those that were optimised
    run_dir = make_run(tmp_path / "run", corpus, _sections(2, zero=2, dp_shard=2))
    run_on_ranks(train_here, 2, run_dir)
    header = (run_dir.checkpoint(STEPS) / "rank-00000.safetensors").read_bytes()[:20_000]
    assert b"optim.exp_avg_sq.model.norm.weight" in header


def test_a_run_ends_early_at_its_target(corpus: Corpus, tmp_path: Path) -> None:
    sections = _sections(1)
    sections["run"]["target"] = {"loss": 100.0}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    assert run_on_ranks(train_here, 1, run_dir) == [FINISHED]
    assert [line["step"] for line in read_evaluations(run_dir.metrics)] == [2]
    assert run_dir.best.read_text().strip() == run_dir.latest.read_text().strip() == "step-00000002"


def _train_attempt_with_events(run_dir: RunDir, attempt: int) -> str:
    import torch.distributed as dist

    events = None
    if dist.get_rank() == 0:
        events = EventWriter(run_dir.events, attempt=attempt, generation=0)
    return train(run_dir, attempt, Hooks(
        generation=0, drain_requested=lambda: False, events=events
    ))  # fmt: skip


def _train_until_not_finite(run_dir: RunDir) -> str:
    try:
        return train_here(run_dir)
    except TrainingError as error:
        return str(error)


def test_steps_that_are_not_finite_are_skipped_up_to_a_limit(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections = _sections(2)
    sections["run"]["steps"] = 12
    # the second step's weights overflow: from then on nothing is finite
    sections["optim"] = {"lr": 1e38, "name": "sgd", "max_skipped_steps": 2, "grad_clip": None}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    answers = run_on_ranks(_train_until_not_finite, 2, run_dir)
    assert answers[0] == answers[1]
    assert "3 steps in a row were skipped" in answers[0]
    assert "start a new run with a lower optim.lr" in answers[0]
    lines = read_steps(run_dir.metrics)
    assert [line["grad_norm"] for line in lines[-3:]] == [None] * 3


def _with_values(run_dir: RunDir, step: int, change: Any) -> None:
    """Change what a checkpoint holds beside tensors, as an older version would have written it."""
    folder = run_dir.checkpoint(step)
    values = json.loads((folder / "values.json").read_text())
    change(values)
    content = json.dumps(values).encode()
    (folder / "values.json").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["values.json"] = {"bytes": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _resume_and_tell(run_dir: RunDir, attempt: int) -> str:
    events = EventWriter(run_dir.events, attempt=attempt, generation=0)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=events)
    try:
        return train(run_dir, attempt, hooks)
    except CheckpointError as error:
        return str(error)


def _resume_changed(run_dir: RunDir) -> list[str]:
    """What a resume says of checkpoints that hold other things than it would write itself."""

    def of_a_library(values: dict[str, Any]) -> None:
        fingerprints.append(values.pop("fingerprint"))

    def of_another_objective(values: dict[str, Any]) -> None:
        values["fingerprint"] = {**fingerprints[0], "model.router_z_loss": 9.0}

    def of_before(values: dict[str, Any]) -> None:
        values["fingerprint"] = dict(fingerprints[0])
        del values["fingerprint"]["task.name"]

    fingerprints: list[dict[str, Any]] = []
    said = [_train_draining_at(run_dir, 0, 3, 0)]
    for change in (of_a_library, of_another_objective, of_before):
        _with_values(run_dir, 3, change)
        said.append(_resume_and_tell(run_dir, 0))
    return said


def test_a_resume_compares_with_the_checkpoint_and_says_what_it_could_not(
    corpus: Corpus, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections(1))
    drained, of_library, changed, resumed = run_on_ranks(_resume_changed, 1, run_dir)[0]
    assert (drained, resumed) == (DRAINED, FINISHED)
    assert "was written by save_checkpoint() and not by a run" in of_library
    assert "another model, data, order or optimisation (model.router_z_loss: 9.0 -> 0" in changed
    (loaded,) = [e for e in read_lines(run_dir.events) if e["kind"] == "checkpoint_loaded"]
    assert loaded["not_compared"] == ["task.name"]
    assert "so check yourself that they are unchanged: task.name" in str(describe_event(loaded))


def _train_and_say_positions(run_dir: RunDir, attempt: int) -> dict[int, list[int]]:
    """Train; positions in the stream of samples that each step read."""
    with redirect_stdout(io.StringIO()) as said:
        _train_attempt_with_events(run_dir, attempt)
    marked = [line for line in said.getvalue().splitlines() if line.startswith(SAMPLES_MARK)]
    told = [json.loads(line.removeprefix(SAMPLES_MARK)) for line in marked]
    return {each["step"]: each["positions"] for each in told}


def test_a_run_goes_back_to_a_step_with_another_rate_and_past_the_data_of_a_spike(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections = {**_sections(1), "observe": {"sample_ids": True}}
    sections["checkpoint"]["every"] = 2
    run_dir = make_run(tmp_path / "run", corpus, sections)
    (before,) = run_on_ranks(_train_and_say_positions, 1, run_dir, 0)
    losses = {line["step"]: line["loss"] for line in read_steps(run_dir.metrics)}
    rates = [line["lr"] for line in read_steps(run_dir.metrics)]
    begun = read_resolved(run_dir.resolved(0))
    assert is_finished(run_dir, begun, begun)

    sections["optim"] = {"lr": 5e-3}
    with pytest.raises(RecipeError, match=r"changes what is learnt.*\n.*resume --step N"):
        make_run(run_dir.path, corpus, sections, attempt=1, previous=begun)
    back_to = RollbackTarget(step=2, skip_steps=2, is_requested=True)
    previous = replace(begun, back_to=back_to)
    make_run(run_dir.path, corpus, sections, attempt=1, previous=previous)
    assert not is_finished(run_dir, previous, read_resolved(run_dir.resolved(1)), step=2)
    assert go_back(run_dir, back_to) == [4, 6]
    (after,) = run_on_ranks(_train_and_say_positions, 1, run_dir, 1)

    assert list(after) == [3, 4, 5, 6]
    assert [after[3], after[4]] == [before[5], before[6]]  # those of steps 3 and 4 are passed over
    assert min(after[5]) > max(before[6])
    lines = read_steps(run_dir.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines] == [6 * step for step in range(1, 7)]
    assert [line["loss"] == losses[line["step"]] for line in lines] == [True] * 2 + [False] * 4
    assert [line["lr"] for line in lines[2:]] == pytest.approx([rate / 2 for rate in rates[2:]])
    assert run_dir.checkpoint_steps() == [2, 4, 6]
    assert not list(run_dir.checkpoints.glob("*.replaced"))
    assert read_resolved(run_dir.resolved(1)).back_to == replace(back_to, is_requested=False)


def test_going_back_needs_a_checkpoint_of_the_step(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections(1))
    with pytest.raises(RequestError, match=r"--step 3: run run has no such checkpoint.*steps none"):
        check_step_exists(run_dir, RollbackTarget(step=3))


def test_a_finished_run_whose_newest_checkpoint_was_removed_is_not_finished(
    corpus: Corpus, tmp_path: Path
) -> None:
    sections = _sections(1)
    sections["checkpoint"]["every"] = 2
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(_train_attempt_with_events, 1, run_dir, 0)
    begun = read_resolved(run_dir.resolved(0))
    assert is_finished(run_dir, begun, begun)
    shutil.rmtree(run_dir.checkpoint(STEPS))
    run_dir.best.write_text("step-00000006\n")
    assert not is_finished(run_dir, begun, begun)
    make_run(run_dir.path, corpus, sections, attempt=1, previous=begun)
    run_on_ranks(_train_attempt_with_events, 1, run_dir, 1)
    loaded = [event for event in read_lines(run_dir.events) if event["kind"] == "checkpoint_loaded"]
    assert "best names no checkpoint that is there: step-00000006 is gone" in loaded[-1]["note"]
    named = run_dir.best.read_text().strip()
    assert (run_dir.checkpoints / named).is_dir()
    assert is_finished(run_dir, begun, begun)

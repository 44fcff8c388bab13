"""Pairs of answers: steps are those of transformers' model beside a frozen copy of it, one pair at
a time and unpacked, in every layout; no copy is held."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from shardyard.config.layout import Layout
from shardyard.config.rules.custom_module import require_shape
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.planner.reference_pass import ReferencePass
from shardyard.planner.step_time import StepModel
from shardyard.planner.workload import workload_of
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_lines, read_steps
from tests.distributed.label_runs import LAYOUTS, saved_weights
from tests.distributed.preference_runs import (
    evaluated_by_transformers,
    loss_of_peft_on_export,
    next_to_a_plain_loop,
    preference_run,
    prepare_mixture,
    prepare_pairs,
    train_until_killed,
    train_with_events,
    write_base,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, train_here

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "smoothed": {"label_smoothing": 0.2},
    "ipo": {"loss_type": "ipo"},
    "orpo": {"loss_type": "orpo"},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Pairs, prepared."""
    return prepare_pairs(tmp_path_factory.mktemp("pairs") / "data")


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_a_plain_loop(prepared: Corpus, tmp_path: Path, name: str) -> None:
    run_dir = preference_run(tmp_path / "run", prepared, task=LOSSES[name])
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == len(losses)
    assert max(apart.values()) < 1e-4, apart
    assert run_dir.reference.exists() == (name != "orpo")


def test_sources_of_a_mixture_have_a_reference_each(tmp_path: Path) -> None:
    mixed = prepare_mixture(tmp_path / "data")
    run_dir = preference_run(tmp_path / "run", mixed)
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert max(apart.values()) < 1e-4, apart
    kept = sorted(path.name.rpartition("-")[0] for path in run_dir.reference.iterdir())
    assert kept == ["eval-0", "eval-1", "train-0", "train-1"]


def test_evaluations_are_those_of_transformers_models(prepared: Corpus, tmp_path: Path) -> None:
    run_dir = preference_run(tmp_path / "run", prepared)
    run_on_ranks(train_here, 1, run_dir)
    found = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    other = preference_run(tmp_path / "other", prepared)
    expected = run_on_ranks(evaluated_by_transformers, 1, other)[0]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < expected["accuracy"] < 1 and expected["margin"] != 0


ONE = Layout(dp_replicate=1, dp_shard=1, zero=3)
QUICK = ["zero-3", "tp", "cp"]


@pytest.mark.parametrize(
    "layouts",
    [
        QUICK,
        pytest.param([each for each in LAYOUTS if each not in QUICK], marks=pytest.mark.slow),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(
    prepared: Corpus, tmp_path: Path, layouts: list[str]
) -> None:
    """With dropout, which the reference has none of."""
    model: dict[str, Any] = {"model": {"preset": "llama-tiny", "dropout": 0.1}}
    one = preference_run(tmp_path / "one", prepared, **model)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    for layout in layouts:
        processes, parallel = LAYOUTS[layout]
        other = preference_run(tmp_path / layout, prepared, processes, **model, parallel=parallel)
        run_on_ranks(train_here, processes, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        assert again[0] == pytest.approx(evaluated[0], rel=1e-4, abs=1e-5), layout


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_an_interrupted_run_ends_with_the_same_bits(
    prepared: Corpus, tmp_path: Path, adapters: bool
) -> None:
    """Also where the reference is lost: it is computed again by the weights of the beginning."""
    sections: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "parallel": {"dp_shard": 2, "zero": 3},
    }
    if adapters:
        sections["model"] = {"preset": "llama-tiny", "lora": {"rank": 4}}
    whole, cut = (
        preference_run(tmp_path / name, prepared, 2, **sections) for name in ("whole", "cut")
    )
    run_on_ranks(train_here, 2, whole)
    with pytest.raises(Exception, match="rank"):
        run_on_ranks(train_until_killed, 2, cut)
    assert cut.checkpoint_steps() == [2]
    kept = {path.name: path.read_bytes() for path in cut.reference.iterdir()}
    assert len(kept) == 2
    if not adapters:
        for path in cut.reference.iterdir():
            path.unlink()
    run_on_ranks(train_here, 2, cut)
    assert {path.name: path.read_bytes() for path in cut.reference.iterdir()} == kept
    weights = [saved_weights(run_dir) for run_dir in (whole, cut)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    lines = [list(read_steps(run_dir.metrics)) for run_dir in (whole, cut)]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


def test_the_reference_of_adapters_is_the_base_without_them(
    prepared: Corpus, tmp_path: Path
) -> None:
    run_on_ranks(write_base, 1, preference_run(tmp_path / "base", prepared), tmp_path / "hf")
    model = {"preset": None, "path": str(tmp_path / "hf"), "lora": {"rank": 4, "alpha": 16}}
    run_dir = preference_run(tmp_path / "run", prepared, model=model, optim={"lr": 0.05})
    loss = run_on_ranks(loss_of_peft_on_export, 1, run_dir, tmp_path / "hf", tmp_path / "out")[0]
    evaluated = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    assert evaluated["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(evaluated["loss"] - 0.693147) > 1e-3, "the adapters have learnt"


def test_the_reference_pass_takes_the_share_of_a_step_that_the_plan_says(
    prepared: Corpus, tmp_path: Path
) -> None:
    """Speeds of CPUs are not predicted, so it is the measured step that tells how fast one is."""
    run_dir = preference_run(
        tmp_path / "run", prepared, run={"steps": 8}, optim={"global_batch": 8}
    )
    run_on_ranks(train_with_events, 1, run_dir)
    ready, started = (
        next(line for line in read_lines(run_dir.events) if line["kind"] == f"reference_{kind}")
        for kind in ("ready", "started")
    )
    step_s = median([line["step_time_s"] for line in read_steps(run_dir.metrics)])
    resolved = read_resolved(run_dir.resolved(0))
    work = workload_of(resolved.recipe, require_shape(resolved.shape), ONE)
    cluster = cluster_of(instance("p5.48xlarge"), 1)
    share = ReferencePass(train=started["samples"], eval=0).seconds(work, cluster)
    share /= (
        StepModel(
            work.shape,
            cluster,
            seq_len=work.seq_len,
            formats=work.formats,
            techniques=work.techniques,
        )
        .parts(work.layout, micro_batch=2, micro_batches=4, recompute="none")
        .step_s
    )
    assert 0.4 < share * step_s / ready["seconds"] < 2.5


def test_a_damaged_reference_is_rejected_with_what_to_do(prepared: Corpus, tmp_path: Path) -> None:
    run_dir = preference_run(tmp_path / "run", prepared)
    run_on_ranks(train_here, 1, run_dir)
    path = min(run_dir.reference.iterdir())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Exception, match=r"is damaged.*Delete it: it is computed again"):
        run_on_ranks(train_here, 1, run_dir)

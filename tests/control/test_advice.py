"""Levers and techniques: each row is the plan that `shardyard plan` makes with its settings."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.control.past_runs import PastRuns
from shardyard.control.plan import Prediction, predict
from shardyard.planner.plan_diff import IN_USE, Advice, Change
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import STEP_S, RunWriter, resolved_run

RENTED: dict[str, Any] = {
    "model": {"preset": "llama2-7b"},
    "run": {"steps": 500},
    "optim": {"global_batch": 64},
    "cluster": {"nodes": 2, "instance": "p5.48xlarge"},
}
"""The micro-batch is open, and so are the axes."""


@cache
def found() -> Prediction:
    return predict(RENTED, layouts=0, details=True)


def advice_of(*overrides: Any, of: dict[str, Any] = RENTED) -> Advice:
    advice = predict(of, *overrides, layouts=0, details=True).advice
    assert advice is not None
    return advice


@cache
def advice() -> Advice:
    advice = found().advice
    assert advice is not None
    return advice


def row(changes: tuple[Change, ...], name: str) -> Change:
    (change,) = [change for change in changes if change.name == name]
    return change


@pytest.mark.heavy
def test_every_row_is_the_plan_of_the_recipe_with_its_settings() -> None:
    held = f"optim.micro_batch={found().plan.micro_batch}"
    compared = 0
    for change in (*advice().levers, *advice().techniques):
        if change.plan is None:
            continue
        settings = change.settings if "micro-batch" in change.name else (held, *change.settings)
        assert predict(RENTED, *settings, layouts=0).plan == change.plan, change.name
        compared += 1
    assert compared > 20


def test_the_levers_are_those_that_users_of_torchtune_know() -> None:
    names = [change.name for change in advice().levers]
    assert names == [
        "packing", "pack whole documents", "compile", "chunked loss", "recompute selective",
        "recompute full", "offload activations", "offload optimizer", "offload params",
        "bf16 optimizer state", f"micro-batch {found().plan.micro_batch // 2}",
        f"micro-batch {found().plan.micro_batch * 2}", "LoRA, rank 16",
    ]  # fmt: skip
    packing = row(advice().levers, "packing")
    assert packing.plan is None and "data.pack=stream" in packing.rejection_reason


def test_a_lever_that_is_on_is_offered_off() -> None:
    names = [
        change.name
        for change in advice_of(
            "model.compile=true", "memory.loss_chunk=2048", "memory.offload=optimizer",
            "precision.optimizer_states=bf16", "optim.micro_batch=1", "data.pack=whole",
            "data.seq_len=4096",
        ).levers
    ]  # fmt: skip
    for name in (
        "without compile", "whole loss", "offload none", "fp32 optimizer state",
        "pack running text", "micro-batch 2",
    ):  # fmt: skip
        assert name in names
    assert "offload optimizer" not in names and "micro-batch 0" not in names


def test_the_techniques_are_those_of_splitting_and_what_goes_with_them() -> None:
    changes = {change.name: change for change in advice().techniques}
    assert {
        "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid", "tensor parallel", "pipeline",
        "context parallel", "expert parallel", "recompute full", "offload activations",
        "LoRA, rank 16", "fp8",
    } <= changes.keys()  # fmt: skip
    three = changes["ZeRO-3"]
    assert three.effect is not None and three.effect.verdict == IN_USE
    whole = changes["data parallel"].plan
    assert whole is not None and whole.layout.dp_shard == 1
    hybrid = changes["hybrid"].plan
    assert hybrid is not None
    assert (hybrid.layout.dp_replicate, hybrid.layout.dp_shard) == (2, 8)


def test_what_the_check_refuses_is_shown_with_its_own_words() -> None:
    experts = row(advice().techniques, "expert parallel")
    assert experts.plan is None
    assert experts.rejection_reason == "parallel.ep=2 but the model has no experts to split. Use 1."
    piped = advice_of("parallel.pp=2", "parallel.schedule=zero-bubble")
    compiled = row(piped.levers, "compile")
    assert "model.compile=true with parallel.schedule=zero-bubble" in compiled.rejection_reason


def test_a_format_without_a_rate_is_refused_with_the_planners_reason() -> None:
    fp8 = row(advice_of("cluster.instance=p4d.24xlarge").techniques, "fp8")
    assert fp8.plan is None and "fp8" in fp8.rejection_reason


@pytest.mark.heavy
def test_of_several_degrees_the_one_that_makes_it_fit_is_told() -> None:
    large = advice_of("model.preset=llama3-70b", "optim.micro_batch=1", "memory.recompute=none")
    assert large.now.fits == "does not fit"
    tensor = row(large.techniques, "tensor parallel")
    assert tensor.plan is not None and tensor.plan.layout.tp == 8
    least = min(
        predict(
            RENTED, "model.preset=llama3-70b", "optim.micro_batch=1", f"parallel.tp={tp}", layouts=0
        ).plan.device_bytes
        for tp in (2, 4, 8)
    )
    assert tensor.plan.device_bytes == least


@pytest.mark.heavy
def test_degrees_that_are_given_make_room_for_another_axis() -> None:
    given = advice_of("parallel.dp_shard=16", "parallel.zero=2", "optim.micro_batch=1")
    tensor = row(given.techniques, "tensor parallel")
    assert tensor.plan is not None, tensor.rejection_reason
    assert tensor.plan.layout.tp * tensor.plan.layout.dp_shard == 16
    hybrid = row(given.techniques, "hybrid")
    assert hybrid.plan is not None, hybrid.rejection_reason
    assert hybrid.settings == (
        "parallel.strategy=HYBRID_SHARD", "parallel.zero=auto", "parallel.dp_shard=auto",
    )  # fmt: skip


def test_a_change_says_if_it_changes_what_is_learnt() -> None:
    notes = {change.name: change.note for change in advice().levers}
    assert notes["LoRA, rank 16"] == notes["pack whole documents"] == "changes what is learnt"
    assert notes["bf16 optimizer state"] == "rounds otherwise"
    assert notes["recompute full"] == notes["compile"] == notes["packing"] == ""


def test_of_a_run_with_phases_the_one_that_needs_most_is_advised_on() -> None:
    phases = [
        {"run": {"steps": 10}, "data": {"seq_len": 1024}},
        {"run": {"steps": 10}, "data": {"seq_len": 4096}},
    ]
    asked = {**RENTED, "run": {}, "optim": {**RENTED["optim"], "micro_batch": 1}, "phases": phases}
    prediction = predict(asked, layouts=0, details=True)
    assert prediction.advice is not None
    assert prediction.advice.now == prediction.plan.phases[1]
    full = row(prediction.advice.levers, "recompute full")
    assert full.plan is not None and (full.plan.seq_len, full.plan.steps) == (4096, 10)


def test_without_a_speed_memory_alone_is_compared() -> None:
    trainium = advice_of(
        "cluster.instance=trn1.32xlarge", "optim.micro_batch=1", "data.seq_len=1024"
    )
    full = row(trainium.levers, "recompute full")
    assert full.plan is not None and full.plan.step_s is None
    assert full.effect is not None and full.effect.verdict == "takes less memory"


def test_images_have_levers_of_their_own() -> None:
    asked = {
        "model": {"preset": "resnet50"},
        "task": {"name": "image_classification"},
        "data": {"source": "./pictures"},
        "run": {"steps": 500},
        "optim": {"global_batch": 512, "micro_batch": 64, "lr": 0.2},
        "cluster": {"nodes": 1, "instance": "p4d.24xlarge"},
    }
    found = advice_of(of=asked)
    names = [change.name for change in found.levers]
    assert "packing" not in names and "chunked loss" not in names
    full = row(found.levers, "recompute full")
    assert full.plan is not None, full.rejection_reason
    tensor = row(found.techniques, "tensor parallel")
    assert tensor.plan is None and tensor.rejection_reason


def test_details_do_not_change_the_plan_and_are_left_out_of_json_unless_wanted() -> None:
    plain = predict(RENTED, layouts=0)
    assert plain.plan == found().plan and plain.advice is None
    assert "advice" not in plain.to_json()
    told = json.loads(json.dumps(found().to_json()))["advice"]
    assert len(told["ranks"]) == 16
    full = next(each for each in told["levers"] if each["name"] == "recompute full")
    assert full["settings"] == ["memory.recompute=full"]
    assert full["plan"]["step_s"] > found().plan.step_s
    assert full["refused"] is None and full["measured"] is None
    refused = next(each for each in told["techniques"] if each["name"] == "expert parallel")
    assert refused["plan"] is None and "no experts" in refused["refused"]


# --- runs of before -----------------------------------------------------------------------------


def a_run(folder: Path, name: str, recipe: Recipe, *, steps: int = 20) -> RunDir:
    """A folder as a run with this settled recipe leaves it."""
    resolved = dataclasses.replace(resolved_run(), recipe=recipe)
    writer = RunWriter(RunDir(folder / name), resolved)
    writer.begin()
    writer.start()
    writer.steps(1, steps)
    return writer.write()


def settled(*overrides: str) -> Recipe:
    """As a training resolves it, whose data is another."""
    resolved = resolved_run(optim={"micro_batch": 4})
    changes = {"recompute": "full"} if "memory.recompute=full" in overrides else {}
    memory = resolved.recipe.memory.model_copy(update={"loss_chunk": "none", **changes})
    return resolved.recipe.model_copy(update={"memory": memory})


def test_a_run_of_the_same_settings_is_found_and_others_are_not(tmp_path: Path) -> None:
    a_run(tmp_path, "plain", settled())
    a_run(tmp_path, "recomputed", settled("memory.recompute=full"))
    (tmp_path / "something else").mkdir()
    past = PastRuns(tmp_path)
    plain = past.of(settled())
    assert plain is not None and plain.run_id == "plain"
    assert (plain.step_s, plain.steps) == (STEP_S, 19)
    assert plain.memory_bytes == 470 * 2**20
    again = past.of(settled("memory.recompute=full"))
    assert again is not None and again.run_id == "recomputed"
    bf16 = settled().precision.model_copy(update={"optimizer_states": "bf16"})
    assert past.of(settled().model_copy(update={"precision": bf16})) is None


def test_where_data_seed_and_length_differ_it_is_the_same_kind(tmp_path: Path) -> None:
    recipe = settled()
    run = recipe.run.model_copy(update={"steps": 7, "seed": 5})
    a_run(tmp_path, "other", recipe.model_copy(update={"run": run}))
    assert PastRuns(tmp_path).of(recipe) is not None


@pytest.mark.parametrize("kind", ["too few steps", "torn", "no folder"])
def test_a_run_that_measured_nothing_is_passed_over(tmp_path: Path, kind: str) -> None:
    if kind != "no folder":
        run = a_run(tmp_path, "run", settled(), steps=3 if kind == "too few steps" else 20)
        if kind == "torn":
            run.resolved(0).write_text("{")
    folder = tmp_path / "nowhere" if kind == "no folder" else tmp_path
    assert PastRuns(folder).of(settled()) is None

"""The pass over pairs of answers before the first step: its time counts in time and price."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.planner.format import headline
from shardyard.planner.plan import Plan, plan_recipe
from shardyard.report.plan.page import failures_section
from tests.planner.recipes import resolved_recipe, shape_of

DATA = DatasetMetadata(
    dir="", fingerprint="", vocab_size=32_000, train_tokens=1, eval_tokens=1, train_documents=1,
    eval_documents=1, unigram_entropy=0.0, train_samples=64_000, eval_samples=6_400,
)  # fmt: skip
ROWS = 1024
"""Samples of a step."""


def _recipe(task: dict[str, Any], **parallel: Any) -> Recipe:
    return resolved_recipe(
        cluster={"nodes": 2, "instance": "p5.48xlarge"},
        task={"name": "preference", **task},
        data={"seq_len": 4096, "format": "preference_pairs"},
        parallel=parallel,
    )


def _planned(
    task: dict[str, Any], *, steps: int | None = 100, data: DatasetMetadata | None = DATA,
    **parallel: Any,
) -> Plan:  # fmt: skip
    return plan_recipe(
        _recipe(task, **parallel), shape=shape_of("llama2-7b"), steps=steps, world_size=16,
        devices_per_node=8, machine=None, data=data,
    )  # fmt: skip


@pytest.mark.parametrize("parallel", [{}, {"zero": 1}, {"tp": 8}, {"pp": 2}])
def test_a_sample_of_the_pass_takes_about_a_third_of_one_of_a_step(
    parallel: dict[str, Any],
) -> None:
    """Forward is a third of forward and backward; a pipeline is filled by one micro-batch only."""
    found = _planned({}, **parallel)
    assert found.step_s is not None
    one = found.reference_s / 70_400
    share = one / (found.step_s / ROWS) / parallel.get("pp", 1)
    assert 0.25 < share < 0.45


def test_time_and_price_have_the_pass_in_them() -> None:
    found, without = _planned({}), _planned({"loss_type": "orpo"})
    assert without.reference_s == 0.0 and found.reference_s > 600
    assert found.wall_s is not None and without.wall_s is not None
    assert found.usd is not None and without.usd is not None
    assert found.wall_s - without.wall_s == pytest.approx(found.reference_s)
    assert found.usd / without.usd == pytest.approx(found.wall_s / without.wall_s)
    content = found.to_json()
    assert content["reference_s"] == content["failures"]["reference_s"] == found.reference_s
    assert Plan.from_json(content) == found
    assert found.wall_s_band is not None
    row = next(row for row in headline(found) if row[0] == "reference pass")
    assert row[2] == "forward passes over 70,400 samples before the first step"
    assert "with start, reference pass, saves" in {a: c for a, _, c in headline(found)}["time"]
    assert "reference pass" in str(failures_section(found))
    assert "reference pass" not in str((headline(without), failures_section(without)))


def test_only_samples_that_the_run_reads_are_counted_once() -> None:
    assert _planned({}, steps=100).reference_s == _planned({}, steps=1000).reference_s
    few = _planned({}, steps=10, data=replace(DATA, eval_samples=0)).reference_s
    assert few == pytest.approx(_planned({}, steps=100).reference_s * 10_240 / 70_400)
    open_ = _planned({}, steps=10, data=None)
    assert "10,240 samples before the first step, without those of val" in open_.reference_reason
    assert _planned({}, steps=None).reference_s == 0.0


def test_tasks_without_a_reference_have_no_pass() -> None:
    for name in ("reward", "causal_lm"):
        assert _planned({"name": name}).reference_s == 0.0

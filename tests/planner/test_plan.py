"""The plan as a whole: words, JSON, and no number where nothing honest can be said."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.hardware.links import Link
from shardyard.hardware.machine import Machine
from shardyard.planner.calibration import Calibration
from shardyard.planner.estimate import estimate
from shardyard.planner.plan import Plan, plan_recipe
from shardyard.planner.throughput import price_of
from shardyard.report.plan.page import plan_page
from tests.planner.recipes import resolved_recipe, shape_of
from tests.planner.workloads import EAGER, OURS, p5, workload

LLAMA2_7B = 6_738_415_616


def machine(name: str, *, device: str = "cuda", gib: int = 80) -> Machine:
    return Machine(
        device=device, name=name, count=1, memory_bytes=gib * 2**30, cores=2, hostname="a"
    )


H200 = machine("NVIDIA H200", gib=140)
LAPTOP = machine("Some CPU", device="cpu", gib=16)
UNKNOWN = machine("NVIDIA X1", gib=64)


def two_p5(**sections: dict[str, Any]) -> Recipe:
    return resolved_recipe(cluster={"nodes": 2, "instance": "p5.48xlarge"}, **sections)


def on_cpu(**sections: dict[str, Any]) -> Recipe:
    return resolved_recipe(
        precision={"compute": "fp32", "output": "fp32"},
        cluster={"device": "cpu", "devices": 2},
        **sections,
    )


def planned(
    recipe: Recipe,
    *,
    world_size: int = 16,
    machine: Machine | None = None,
    steps: int | None = 100,
    calibration: Calibration | None = None,
) -> Plan:
    return plan_recipe(
        recipe,
        shape=shape_of(recipe.model.preset or ""),
        steps=steps,
        world_size=world_size,
        devices_per_node=min(8, world_size),
        machine=machine,
        calibration=calibration,
    )


# --- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [100, None])
def test_a_plan_survives_json(steps: int | None) -> None:
    plan = planned(two_p5(), steps=steps)
    assert (plan.failures is None) == (steps is None)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_without_speed_survives_json() -> None:
    plan = planned(on_cpu(), world_size=2, machine=LAPTOP)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_training_half_finds_its_two_numbers_in_plan_json() -> None:
    content = planned(two_p5()).to_json()
    assert content["peak_flops_per_s"] == 989e12
    assert set(content["flops_per_token"]) == {"full", "causal"}


def test_plan_json_holds_every_sum() -> None:
    plan = planned(two_p5())
    content = plan.to_json()
    sums = ("memory_bytes", "tokens", "step_s", "mfu", "seconds", "wall_s", "usd")
    assert [content[name] for name in sums] == [getattr(plan, name) for name in sums]
    assert None not in [content[name] for name in sums]


# --- a rented cluster ---------------------------------------------------------------------------


def test_a_rented_cluster_has_speed_time_and_a_dated_price() -> None:
    plan = planned(two_p5())
    assert plan.tokens == 100 * 1024 * 4096
    assert plan.step_s is not None and plan.seconds == pytest.approx(100 * plan.step_s)
    assert plan.speed.tokens_per_s == pytest.approx(1024 * 4096 / plan.step_s)
    # published runs of 7B on H100 end between 35 and 50 % of the peak
    assert plan.mfu is not None and 0.30 < plan.mfu < 0.55
    # by hand: FLOP of a token in the full convention, and the peak of 16 devices
    flop = 1024 * 4096 * (6 * 6.607e9 + 12 * 32 * 4096 * 4096)
    assert plan.mfu == pytest.approx(flop / plan.step_s / (16 * 989e12), rel=1e-3)
    assert plan.price.usd_per_hour == 2 * 55.04
    assert "2026-07-20" in plan.price.source
    assert "docs/accuracy.md" in plan.speed.reason


def test_a_plan_says_what_an_estimate_of_its_workload_says() -> None:
    plan = planned(two_p5())
    same = estimate(workload(dp_shard=16, global_batch=1024, formats=OURS, techniques=EAGER), p5())
    assert plan.step_s == pytest.approx(same.step_s)
    assert plan.memory == same.memory.terms
    assert (plan.reserved_bytes, plan.device_bytes) == (
        same.memory.reserved_bytes, same.memory.device_bytes,
    )  # fmt: skip
    assert plan.memory_moment == same.memory.peak_phase


def test_the_price_counts_failures_and_the_price_of_a_token_does_not() -> None:
    plan = planned(two_p5(), steps=20_000)
    assert plan.failures is not None and plan.seconds is not None and plan.wall_s is not None
    assert plan.failures.expected_failures > 0
    assert plan.wall_s > plan.seconds
    assert plan.spare_nodes == plan.failures.spare_nodes == 1
    assert plan.usd == pytest.approx(plan.wall_s / 3600 * (110.08 + 55.04))
    assert plan.tokens is not None
    assert plan.usd_per_million_tokens == pytest.approx(
        plan.seconds / 3600 * 110.08 / plan.tokens * 1e6
    )


def test_a_run_of_unknown_length_has_a_price_a_token_and_none_in_all() -> None:
    plan = planned(two_p5(), steps=None)
    assert (plan.tokens, plan.seconds, plan.wall_s, plan.usd) == (None,) * 4
    assert plan.usd_per_million_tokens is not None


def test_a_cluster_without_a_price_says_where_it_was_looked_for() -> None:
    unpriced = cluster_of(instance("p5e.48xlarge"), 2)
    found = price_of(unpriced)
    assert found.usd_per_hour is None
    assert found.source.startswith("no price of p5e.48xlarge was found (on-demand, us-east-1")
    assert price_of(None).source == "cluster.instance is not set"
    assert price_of(p5(3)).usd_per_hour == pytest.approx(3 * 55.04)


def test_a_checkpoint_holds_weights_and_moments_in_fp32() -> None:
    assert planned(two_p5()).checkpoint_bytes == 12 * LLAMA2_7B


def test_a_given_interval_of_checkpoints_is_the_one_that_failures_count_with() -> None:
    plan = planned(two_p5(checkpoint={"every": 50}))
    assert plan.failures is not None and plan.failures.interval_steps == 50


# --- memory -------------------------------------------------------------------------------------


def test_llama2_7b_fits_two_p5() -> None:
    plan = planned(two_p5())
    assert plan.fits == "fits"
    assert plan.memory_bytes < plan.reserved_bytes < plan.device_bytes < 80 * 2**30
    assert plan.memory_limit_bytes == 80 * 2**30
    assert plan.nodes == 2


def test_seventy_billion_parameters_do_not_fit_one_device() -> None:
    plan = planned(resolved_recipe(model={"preset": "llama2-70b"}), world_size=1, machine=H200)
    assert plan.fits == "does not fit"
    assert "memory: does not fit" in plan.line()


def test_a_cpu_process_also_holds_python_and_the_copy_that_a_checkpoint_is_written_from() -> None:
    plan = planned(on_cpu(model={"preset": "llama-1b"}), world_size=2, machine=LAPTOP)
    copy = plan.memory_term("checkpoint copy")
    assert copy == plan.memory_term("parameters") + plan.memory_term("optimizer")
    assert plan.memory_term("process") > 300 * 2**20
    assert plan.memory_bytes == pytest.approx(plan.reserved_bytes) == plan.device_bytes
    assert planned(two_p5()).memory_term("process") == 0


def test_on_a_cpu_snapshots_are_in_the_memory_of_a_rank() -> None:
    def plan_of(**sections: Any) -> Plan:
        return planned(
            on_cpu(model={"preset": "llama-1b"}, **sections), world_size=2, machine=LAPTOP
        )

    usual, kept = plan_of(), plan_of(elastic={"snapshot_every": 10})
    copy = usual.memory_term("checkpoint copy")
    assert (kept.memory_term("snapshots"), kept.memory_term("checkpoint copy")) == (3 * copy, 0)
    assert kept.memory_bytes == usual.memory_bytes + 2 * copy
    neighbours = plan_of(elastic={"snapshot_every": 10, "snapshot_neighbour": True})
    assert neighbours.memory_term("snapshots") == 5 * copy, "two of a rank of another node"


def test_how_full_a_cpu_may_be_is_said() -> None:
    def words(gib: int) -> tuple[str, str]:
        host = machine("Some CPU", device="cpu", gib=gib)
        recipe = on_cpu(model={"preset": "llama-1b"}, data={"seq_len": 1024})
        plan = planned(recipe, world_size=2, machine=host)
        return plan.fits, plan.fits_reason

    assert words(256)[0] == "fits"
    assert words(16)[0] == "does not fit"
    needed = planned(
        on_cpu(model={"preset": "llama-1b"}, data={"seq_len": 1024}), world_size=2, machine=LAPTOP
    ).memory_bytes
    fits, reason = words(round(2 * needed / 0.9 / 2**30))
    assert fits == "tight"
    assert "what the allocator wastes needs the rest" in reason


# --- what is not known --------------------------------------------------------------------------


def test_a_cpu_has_no_peak_and_no_speed_and_says_why() -> None:
    plan = planned(on_cpu(), world_size=2, machine=LAPTOP)
    assert plan.peak.flops_per_s is None
    assert "no peak is known for a CPU process" in plan.peak.source
    assert "observe.peak_tflops" in plan.peak.source
    assert plan.speed.tokens_per_s is None
    assert (plan.step_s, plan.mfu, plan.seconds, plan.failures, plan.time) == (None,) * 4 + ((),)
    assert plan.memory_limit_bytes == 8 * 2**30, "two processes share the machine"


def test_a_parked_process_is_a_term_of_a_cpu() -> None:
    plain = planned(on_cpu(), world_size=2, machine=LAPTOP)
    parks = planned(on_cpu(elastic={"parked": True}), world_size=2, machine=LAPTOP)
    (term,) = [term for term in parks.memory if term.name == "parked process"]
    assert parks.device_bytes == plain.device_bytes + term.bytes
    assert term.name not in {term.name for term in plain.memory}


def test_a_given_peak_is_used_for_a_device_nobody_knows() -> None:
    plan = planned(resolved_recipe(observe={"peak_tflops": 100.0}), world_size=1, machine=UNKNOWN)
    assert plan.peak.flops_per_s == 100e12
    assert plan.peak.source == "observe.peak_tflops"
    assert plan.memory_limit_bytes == 64 * 2**30
    plan = planned(resolved_recipe(), world_size=1, machine=UNKNOWN)
    assert plan.peak.flops_per_s is None
    assert plan.speed.tokens_per_s is None


def test_without_a_machine_and_a_cluster_what_depends_on_them_stays_open() -> None:
    plan = planned(resolved_recipe(), world_size=1)
    assert (plan.device, plan.memory_limit_bytes, plan.fits) == ("device", None, "unknown")
    assert plan.memory_bytes > 0


def test_a_format_that_nobody_timed_has_no_speed_and_says_so() -> None:
    recipe = resolved_recipe(cluster={"instance": "g5.48xlarge"})
    plan = planned(recipe, world_size=8)
    assert plan.speed.tokens_per_s is None
    assert plan.speed.reason == "the catalogue has no bf16 peak for A10G"
    assert plan.fits == "does not fit"


def test_nodes_of_which_no_network_is_known_have_memory_and_no_speed() -> None:
    recipe = resolved_recipe(cluster={"nodes": 2})
    plan = planned(recipe, machine=machine("NVIDIA GeForce RTX 4090", gib=24))
    assert plan.memory_bytes > 0
    assert plan.speed.tokens_per_s is None
    assert "2 nodes of RTX 4090: the catalogue knows no network" in plan.speed.reason
    assert "cluster.file" in plan.speed.reason


# --- calibration --------------------------------------------------------------------------------


def test_what_was_measured_is_used_and_named() -> None:
    slow = Link(name="measured", bytes_per_s=2e9, latency_s=1e-4, source="a table")
    measured = Calibration(link_between=slow, sources=("link between nodes: a table",))
    plain, plan = planned(two_p5()), planned(two_p5(), calibration=measured)
    assert plain.measured == ()
    assert plan.measured == ("link between nodes: a table",)
    assert plan.step_s is not None and plain.step_s is not None
    assert plan.step_s > 1.1 * plain.step_s
    inside = replace(measured, link_between=None, link_inside=slow)
    assert planned(two_p5(), calibration=inside).step_s != plain.step_s


# --- words --------------------------------------------------------------------------------------


def test_the_line_names_model_layout_memory_and_length() -> None:
    line = planned(two_p5()).line()
    assert line.startswith("plan: llama2-7b 6.74 B parameters, FULL_SHARD over 16 x H100 SXM on 2")
    assert "1,024 samples x 4,096 tokens a step" in line
    assert "100 steps, 419 M tokens" in line
    assert "about $" in line


def test_what_is_frozen_is_counted_apart() -> None:
    plan = planned(two_p5(model={"frozen": ["model.embed_tokens", "model.layers.*.mlp"]}))
    frozen = 32000 * 4096 + 32 * 3 * 4096 * 11008
    assert (plan.frozen_parameters, plan.trained_parameters) == (frozen, LLAMA2_7B - frozen)
    assert "6.74 B parameters (2.28 B trained, 4.46 B frozen), FULL_SHARD" in plan.line()
    assert plan.checkpoint_bytes == 12 * plan.trained_parameters + 2 * frozen
    assert "4 bytes each, 2 where frozen, over 16 ranks" in plan.memory[0].reason
    content = plan.to_json()
    assert content["trained_parameters"] == plan.trained_parameters
    assert Plan.from_json(content) == plan
    page = plan_page(plan, search=None, quotes=None, title="A part")
    assert f"6,738,415,616 parameters, {frozen:,} of them frozen" in page


def test_the_line_of_an_unprepared_recipe_says_that_its_length_is_open() -> None:
    assert "once the data is prepared" in planned(two_p5(), steps=None).line()


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"strategy": "NO_SHARD"}, "NO_SHARD"),
        ({"strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),
        ({"strategy": "ZERO_1"}, "ZeRO-1"),
        ({"strategy": "HYBRID_SHARD"}, "HYBRID_SHARD (2 copies of 8 ranks)"),
        ({"tp": 4, "pp": 2}, "FULL_SHARD x tp 4 x pp 2"),
        ({"tp": 8, "cp": 2}, "FULL_SHARD x cp 2 x tp 8"),
    ],
)
def test_layouts_go_by_the_names_of_their_users(parallel: dict[str, Any], words: str) -> None:
    assert words in planned(resolved_recipe(parallel=parallel), machine=H200).line()


@pytest.mark.parametrize(
    ("recipe", "world_size", "machine", "words"),
    [
        (on_cpu(), 1, LAPTOP, "over 1 CPU process,"),
        (on_cpu(), 2, LAPTOP, "over 2 CPU processes,"),
        (resolved_recipe(), 2, None, "over 2 devices,"),
        (resolved_recipe(), 8, H200, "over 8 x H200,"),
    ],
)
def test_devices_have_a_plural(
    recipe: Recipe, world_size: int, machine: Machine | None, words: str
) -> None:
    assert words in planned(recipe, world_size=world_size, machine=machine).line()


# --- what is refused ----------------------------------------------------------------------------


def test_an_impossible_layout_and_an_unknown_instance_are_refused() -> None:
    with pytest.raises(RecipeError, match="dp_shard"):
        planned(resolved_recipe(parallel={"dp_shard": 3}))
    with pytest.raises(RequestError, match=r"p5\.48xlarge"):
        planned(resolved_recipe(cluster={"instance": "p5.48xlage"}))

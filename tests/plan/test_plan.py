"""The plan as a whole: words, JSON, and no number where nothing honest can be said."""

import json

import pytest

from shardyard.config.schema import Recipe
from shardyard.errors import RecipeError, RequestError
from shardyard.hardware.machine import Machine
from shardyard.plan.plan import Plan, plan_recipe, risk
from tests.plan.recipes import resolved_recipe, shape_of

H200 = Machine(
    device="cuda", name="NVIDIA H200", count=1, memory_bytes=150_754_820_096, cores=16,
    hostname="a",
)  # fmt: skip
LAPTOP = Machine(
    device="cpu", name="Some CPU", count=1, memory_bytes=16 * 2**30, cores=2, hostname="b"
)


def two_p5() -> Recipe:
    return resolved_recipe(cluster={"nodes": 2, "instance": "p5.48xlarge"})


def planned(
    recipe: Recipe, *, world_size: int = 16, machine: Machine | None = None, steps: int | None = 100
) -> Plan:
    preset = recipe.model.preset or ""
    per_node = min(8, world_size)
    return plan_recipe(
        recipe,
        shape=shape_of(preset),
        steps=steps,
        world_size=world_size,
        devices_per_node=per_node,
        machine=machine,
    )


def test_a_plan_survives_json() -> None:
    plan = planned(two_p5())
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_training_half_finds_its_two_numbers_in_plan_json() -> None:
    content = planned(two_p5()).to_json()
    assert content["peak_flops_per_s"] == 989e12
    assert set(content["flops_per_token"]) == {"full", "causal"}


def test_a_rented_cluster_has_speed_time_and_a_dated_price() -> None:
    plan = planned(two_p5())
    # by hand: 6 x 6.607 G + 12 x 32 x 4096 x 4096 FLOP a token, 0.40 x 989 TFLOP/s x 16
    assert plan.speed.tokens_per_s == pytest.approx(16 * 0.40 * 989e12 / 46.08e9, rel=2e-3)
    assert plan.tokens == 100 * 1024 * 4096
    assert plan.seconds == pytest.approx(
        100 * 1024 * 4096 / (16 * 0.40 * 989e12 / 46.08e9), rel=2e-3
    )
    assert plan.price.usd_per_hour == 2 * 55.04
    assert "2026-07-20" in plan.price.source
    assert "torchtitan" in plan.speed.reason


def test_llama2_7b_fits_two_p5() -> None:
    plan = planned(two_p5())
    assert plan.fits == "fits"
    assert plan.memory_bytes < 80 * 2**30
    assert plan.nodes == 2


def test_seventy_billion_parameters_do_not_fit_one_device() -> None:
    plan = planned(resolved_recipe(model={"preset": "llama2-70b"}), world_size=1, machine=H200)
    assert plan.fits == "does not fit"
    assert "memory: does not fit" in plan.line()


def test_the_band_between_fitting_and_not_is_named() -> None:
    assert risk(79, 100)[0] == "fits"
    assert risk(81, 100)[0] == "tight"
    assert "driver" in risk(81, 100)[1]
    assert risk(101, 100)[0] == "does not fit"
    assert risk(1, None)[0] == "unknown"


def test_a_cpu_has_no_peak_and_no_speed_and_says_why() -> None:
    recipe = resolved_recipe(
        model={"preset": "llama2-7b"},
        precision={"compute": "fp32", "output": "fp32"},
        cluster={"device": "cpu", "devices": 2},
    )
    plan = planned(recipe, world_size=2, machine=LAPTOP)
    assert plan.peak.flops_per_s is None
    assert "no peak is known for a CPU process" in plan.peak.source
    assert "observe.peak_tflops" in plan.peak.source
    assert plan.speed.tokens_per_s is None
    assert plan.seconds is None
    assert plan.memory_limit_bytes == 8 * 2**30, "two processes share the machine"


def test_a_given_peak_is_used_for_a_device_nobody_knows() -> None:
    unknown = Machine(
        device="cuda", name="NVIDIA X1", count=1, memory_bytes=2**36, cores=1, hostname="c"
    )
    plan = planned(resolved_recipe(observe={"peak_tflops": 100.0}), world_size=1, machine=unknown)
    assert plan.peak.flops_per_s == 100e12
    assert plan.peak.source == "observe.peak_tflops"
    plan = planned(resolved_recipe(), world_size=1, machine=unknown)
    assert plan.peak.flops_per_s is None


def test_no_efficiency_is_made_up_for_fp32() -> None:
    recipe = resolved_recipe(precision={"compute": "fp32", "output": "fp32"})
    plan = planned(recipe, world_size=1, machine=H200)
    assert plan.peak.flops_per_s == 67e12
    assert plan.speed.tokens_per_s is None
    assert "fp32" in plan.speed.reason


def test_the_line_names_model_layout_memory_and_length() -> None:
    line = planned(two_p5()).line()
    assert line.startswith("plan: llama2-7b 6.74 B parameters, FULL_SHARD over 16 x H100 SXM on 2")
    assert "1,024 samples x 4,096 tokens a step" in line
    assert "100 steps, 419 M tokens" in line
    assert "about $" in line


def test_the_line_of_an_unprepared_recipe_says_that_its_length_is_open() -> None:
    assert "once the data is prepared" in planned(two_p5(), steps=None).line()


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"strategy": "NO_SHARD"}, "NO_SHARD"),
        ({"strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),
        ({"strategy": "ZERO_1"}, "ZeRO-1"),
        ({"strategy": "HYBRID_SHARD"}, "HYBRID_SHARD (2 copies of 8 ranks)"),
    ],
)
def test_layouts_go_by_the_names_of_their_users(parallel: dict[str, str], words: str) -> None:
    assert words in planned(resolved_recipe(parallel=parallel), machine=H200).line()


def test_a_checkpoint_holds_weights_and_moments_in_fp32() -> None:
    assert planned(two_p5()).checkpoint_bytes == 12 * 6_738_415_616


def test_an_impossible_layout_and_an_unknown_instance_are_refused() -> None:
    with pytest.raises(RecipeError, match="dp_shard"):
        planned(resolved_recipe(parallel={"dp_shard": 3}))
    with pytest.raises(RequestError, match=r"p5\.48xlarge"):
        planned(resolved_recipe(cluster={"instance": "p5.48xlage"}))

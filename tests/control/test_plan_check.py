"""Verdicts of `plan --check`: each kind of finding, its exit code and what it says to change."""

import json
import math
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control.plan import predict
from shardyard.control.plan_check import CheckExit, check_plan

FITS = (
    "model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "run.steps=300",
    "optim.global_batch=64",
)  # fmt: skip
TOO_LARGE = (
    "model.preset=llama3.1-405b", "cluster.instance=p5.48xlarge", "run.steps=300",
    "optim.global_batch=16",
)  # fmt: skip


def _checked(
    *recipe: str, budget_usd: float | None = None, deadline_s: float | None = None
) -> list[tuple[int, str]]:
    found = predict(recipe, layouts=0)
    findings = check_plan(found.plan, found.recipe, budget_usd=budget_usd, deadline_s=deadline_s)
    return [(int(finding.exit_code), finding.text) for finding in findings]


def test_a_recipe_within_its_limits_has_no_finding() -> None:
    plan = predict(FITS, layouts=0).plan
    assert plan.usd is not None and plan.wall_s is not None
    assert _checked(*FITS) == []
    assert _checked(*FITS, budget_usd=plan.usd, deadline_s=plan.wall_s) == []


def test_each_limit_that_is_passed_has_its_code() -> None:
    plan = predict(FITS, layouts=0).plan
    assert plan.usd is not None and plan.wall_s is not None
    below_usd, below_s = math.nextafter(plan.usd, 0), math.nextafter(plan.wall_s, 0)
    ((code, text),) = _checked(*FITS, budget_usd=below_usd)
    assert code == 11 and f"${plan.usd:,.2f}, above --budget=" in text
    ((code, text),) = _checked(*FITS, deadline_s=below_s)
    assert code == 12 and "above --deadline" in text
    both = _checked(*FITS, budget_usd=below_usd, deadline_s=below_s)
    assert [code for code, _ in both] == [11, 12]


def test_the_budget_of_the_recipe_holds_unless_another_is_given() -> None:
    ((code, text),) = _checked(*FITS, "launch.max_usd=0.5")
    assert code == 11 and "above launch.max_usd=0.5" in text
    assert _checked(*FITS, "launch.max_usd=0.5", budget_usd=1e6) == []


def test_memory_comes_first() -> None:
    found = _checked(*TOO_LARGE, budget_usd=0.01)
    assert found[0][0] == 10
    assert "the plan does not fit" in found[0][1] and "without --check" in found[0][1]


def test_a_limit_without_a_number_to_compare_is_no_pass() -> None:
    endless = [word for word in FITS if not word.startswith("run.steps")]
    ((code, text),) = _checked(*endless, budget_usd=1)
    assert code == CheckExit.UNKNOWN and int(code) == 2
    assert text == (
        "--budget=1, but the price is not known: the run has no length. Set run.steps or "
        "run.tokens."
    )
    ((code, text),) = _checked(*endless, deadline_s=60)
    assert code == 2 and "--deadline 1 min, but the time is not known" in text


def test_the_verb_prints_the_plan_and_exits_by_the_first_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *FITS, "--check"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("plan: llama2-7b") and "memory: fits" in said.out
    assert said.err == ""
    assert main(["plan", *FITS, "--check", "--budget", "1", "--deadline", "1min"]) == 11
    err = capsys.readouterr().err
    assert err.count("error: ") == 2 and "--budget=1" in err and "--deadline 1 min" in err
    assert main(["plan", *TOO_LARGE, "--check", "--json"]) == 10
    (row,) = json.loads(capsys.readouterr().out)["check"]
    assert (row["finding"], row["exit_code"]) == ("does_not_fit", 10)
    assert main(["plan", *FITS, "optim.lrr=1", "--check"]) == 2
    assert "optim.lrr: unknown setting. Did you mean optim.lr?" in capsys.readouterr().err
    assert main(["plan", *FITS, "--check", "--offers"]) == 2
    assert "leave --offers out" in capsys.readouterr().err


def test_several_recipes_are_not_checked_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, machines = (tmp_path / f"{name}.yaml" for name in "abc")
    first.write_text("model: {preset: llama2-7b}\nrun: {steps: 9}\n")
    second.write_text("model: {preset: llama3.1-405b}\nrun: {steps: 9}\n")
    machines.write_text("cluster: {instance: p5.48xlarge}\n")
    assert main(["plan", str(first), str(second), str(machines), "--check"]) == 2
    err = capsys.readouterr().err
    assert f"{first}, {second} each name a model" in err and "for recipe in *.yaml" in err
    assert main(["plan", str(first), str(machines), "--check"]) == 0


def test_a_plan_that_is_no_check_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TOO_LARGE, "--layouts", "0"]) == 0
    assert "does not fit" in capsys.readouterr().out

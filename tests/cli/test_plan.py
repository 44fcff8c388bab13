"""`shardyard plan`: a rented cluster is planned at once, without data and without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.cli import main

RECIPE = """
model: {preset: llama2-7b}
data: {source: ./my-text}
cluster: {nodes: 2, instance: p5.48xlarge}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "smallest.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_the_smallest_useful_recipe_is_planned_without_its_data(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan: llama2-7b 6.74 B parameters, FULL_SHARD over 16 x H100 SXM")
    for word in ("memory", "fits", "tokens/s", "MFU", "$110.08 an hour", "2026-07-20"):
        assert word in text
    assert "length known once the data is prepared" in text
    assert "Rule of the field" not in text, "ten seconds of reading"


def test_details_begin_with_the_rule_and_give_every_term_a_reason(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--details", "--layouts", "0"]) == 0
    text = capsys.readouterr().out
    # 20 bytes x 6,738,415,616 parameters = 125.5 GiB, a sixteenth of it 7.8 GiB
    assert (
        "20 bytes a parameter (Adam, mixed precision) = 125.5 GiB, split over 16: 7.8 GiB" in text
    )
    for term in ("activations", "reserved", "matrix products", "all-gather", "989 TFLOP/s"):
        assert term in text
    assert "32 blocks x 4,096 tokens, recompute none" in text


def test_the_best_layouts_come_with_reasons_and_settings(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--layouts", "2"]) == 0
    text = capsys.readouterr().out
    assert "legal layouts fit. The fastest:" in text
    assert "of the step computes" in text
    assert "optim.micro_batch=" in text


def test_what_cannot_fit_says_by_how_much_and_what_would(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "model.preset=llama3.1-405b"]) == 0
    text = capsys.readouterr().out
    assert "memory: does not fit" in text
    assert "too much on each device. It fits on cluster.nodes=" in text


def test_a_length_gives_time_price_and_failures(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "run.tokens=2000000000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 477  # 2e9 / (1,024 samples x 4,096 tokens), rounded up
    assert plan["wall_s"] > plan["seconds"]
    assert plan["failures"]["expected_failures"] > 0
    assert plan["usd"] == pytest.approx(plan["wall_s"] / 3600 * 110.08)
    # the price of a token is that of a step, without failures
    alone_usd = plan["seconds"] / 3600 * 110.08
    assert plan["usd_per_million_tokens"] == pytest.approx(1e6 * alone_usd / plan["tokens"])
    assert sum(term["seconds"] for term in plan["time"]) == pytest.approx(plan["step_s"])
    assert plan["search"]["legal"] > plan["search"]["fitting"] > 0


def test_offers_need_a_length(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--offers"]) == 2
    assert "Give run.steps, run.samples or run.tokens" in capsys.readouterr().err


def test_a_deadline_that_is_no_time_is_refused(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--deadline", "soon"]) == 2
    assert "'soon' is no length of time such as 90min, 24h or 1.5d" in capsys.readouterr().err


def test_a_missing_calibration_is_refused_with_what_it_may_be(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--calibrate", "nowhere.csv"]) == 2
    text = capsys.readouterr().err
    assert "nowhere.csv does not exist" in text
    assert "profile of a step (.json) or the folder of a run" in text


def test_a_measured_profile_changes_the_speed_and_is_named(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = {
        "kind": "step_profile", "device": "NVIDIA H100 80GB HBM3", "number_format": "bf16",
        "matmul_flops_per_s": 300e12, "kernel_s": 8e-6,
    }  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    assert main(["plan", recipe, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["plan", recipe, "--json", "--calibrate", str(path)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["measured"] == ["rates of H100 SXM: measured, profile.json"]
    assert plan["step_s"] > 1.3 * plain["step_s"]


def test_an_unknown_instance_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "cluster.instance=p5.48xlage"]) == 2
    assert "p5.48xlarge" in capsys.readouterr().err


def test_a_plan_needs_no_torch(recipe: str) -> None:
    program = (
        "import sys; from shardyard.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", recipe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

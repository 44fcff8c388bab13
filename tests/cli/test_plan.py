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
    # 20 bytes x 6,738,415,616 parameters = 125.5 GiB, a sixteenth of it 7.8 GiB
    assert (
        "20 bytes a parameter (Adam, mixed precision) = 125.5 GiB, split over 16: 7.8 GiB" in text
    )
    for word in ("activations", "all-gather", "$110.08 an hour", "2026-07-20", "989 TFLOP/s"):
        assert word in text
    assert "known once the data is prepared" in text


def test_a_length_gives_time_and_price(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "run.tokens=2000000000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 477  # 2e9 / (1,024 samples x 4,096 tokens), rounded up
    assert plan["usd"] == pytest.approx(plan["seconds"] / 3600 * 110.08)
    assert plan["usd_per_million_tokens"] == pytest.approx(1e6 * plan["usd"] / plan["tokens"])


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

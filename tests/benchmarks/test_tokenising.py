"""Tokenising beside others: how rounds are judged, and that the program runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tokenising import WAYS, judge, table

ROOT = Path(__file__).parents[2]


def one(tokens: int, cpu_s: float, wall_s: float) -> dict[str, Any]:
    of_calls = {"calls_cpu_s": cpu_s, "calls_wall_s": wall_s}
    return {"tokens": tokens, "cpu_s": cpu_s, "wall_s": wall_s, **of_calls}


def a_round(ours: float = 1.0, scale: int = 1) -> dict[str, Any]:
    others = {"own": 0.95, "datasets": 1.6, "datasets-fast": 1.5}
    seconds = {"shardyard": ours, **{name: of * scale for name, of in others.items()}}
    return {name: one(100 * scale, each, each) for name, each in seconds.items()}


def test_tokens_in_a_second_are_held_to_the_quicker_of_the_others() -> None:
    result = judge({"20": [a_round(), a_round(), a_round(ours=9.0)]})
    ratios = result["ratios"]["20"]
    assert ratios["own_per_cpu_s"] == pytest.approx(0.95)
    assert ratios["datasets_per_s"] == pytest.approx(1.5)
    assert result["is_met"] and result["is_complete"]


def test_a_cost_that_grows_with_the_text_misses_the_bar() -> None:
    result = judge({"20": [a_round()], "300": [a_round(ours=15 * 1.2, scale=15)]})
    assert result["cost_per_token"] == pytest.approx(1.2)
    assert not result["is_met"]
    assert "missed: cost per token: 1.200" in table(result)
    assert "missed: own_per_s at 300 MB: 0.792, bar 0.9" in table(result)


def test_what_is_not_installed_is_told() -> None:
    alone = {name: of for name, of in a_round().items() if "datasets" not in name}
    result = judge({"20": [alone]})
    assert not result["is_complete"]
    assert "pip install datasets" in table(result)


@pytest.mark.system
def test_all_ways_that_are_installed_count_the_same_tokens(tmp_path: Path) -> None:
    command = ["--megabytes", "0.3", "--rounds", "1", "--vocab-size", "500"]
    command += ["--folder", str(tmp_path), "--out", str(tmp_path / "out.json")]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.tokenising", *command],
        cwd=ROOT,
        check=False,
        timeout=300,
    )
    (measured,) = json.loads((tmp_path / "out.json").read_text())["measured"]["0.3"]
    assert {"shardyard", "own"} <= measured.keys() <= WAYS.keys()
    assert len({way["tokens"] for way in measured.values()}) == 1

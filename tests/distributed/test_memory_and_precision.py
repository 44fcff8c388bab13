"""What saves memory or time changes the step by rounding at most."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

EXACT = 1e-6
BF16 = 3e-2
"""bf16 keeps 8 bits, 0.4 % of a number; gradient norms of the fourth step differ by 1.6 %."""
VARIANTS: dict[str, tuple[dict[str, dict[str, Any]], float]] = {
    "recompute everything": ({"memory": {"recompute": "full"}}, EXACT),
    "recompute cheap operators": ({"memory": {"recompute": "selective"}}, EXACT),
    "recompute every second block": ({"memory": {"recompute": 2}}, EXACT),
    "recompute named modules": ({"memory": {"recompute": ["mlp", "self_attn"]}}, EXACT),
    "gather two blocks ahead": ({"parallel": {"prefetch": 2}}, EXACT),
    "keep parameters gathered": ({"parallel": {"zero": 2}}, EXACT),
    "compute in bf16": ({"precision": {"compute": "bf16"}}, BF16),
    "reduce in bf16": ({"precision": {"reduce": "bf16"}}, BF16),
}


def _sections(extra: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = {
        "model": {"dropout": 0.1},
        "parallel": {"dp_shard": 2},
        "cluster": {"devices": 2},
    }
    return {name: {**base.get(name, {}), **extra.get(name, {})} for name in {*base, *extra}}


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        train_here(run_dir)


def _steps(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


def test_variants_take_the_same_steps(corpus: Corpus, tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", corpus, _sections({}))
    runs = {
        name: make_run(tmp_path / name.replace(" ", "-"), corpus, _sections(extra))
        for name, (extra, _) in VARIANTS.items()
    }
    run_on_ranks(_train_all, 2, [plain, *runs.values()])
    for name, (_, tolerance) in VARIANTS.items():
        for found, expected in zip(_steps(runs[name]), _steps(plain), strict=True):
            assert found == pytest.approx(expected, rel=tolerance), name
    assert _steps(runs["compute in bf16"]) != _steps(plain)  # it does what it says


@pytest.mark.system
def test_averages_in_bf16_learn_as_those_in_fp32(corpus: Corpus, tmp_path: Path) -> None:
    def losses(states: str) -> list[float]:
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": 40},
            "precision": {"optimizer_states": states},
        }
        run_dir = make_run(tmp_path / states, corpus, sections)
        run_on_ranks(train_here, 1, run_dir)
        return [line["loss"] for line in read_steps(run_dir.metrics)]

    fp32, bf16 = losses("fp32"), losses("bf16")
    assert fp32[-1] < fp32[0] - 0.5  # it learns
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"memory": {"recompute": "full"}},
        {"memory": {"offload": "activations"}},
        {"memory": {"offload": "activations", "recompute": "selective"}},
    ],
)
def test_compiled_blocks_take_the_same_steps(
    corpus: Corpus, tmp_path: Path, extra: dict[str, dict[str, Any]]
) -> None:
    length: dict[str, dict[str, Any]] = {
        "data": {"seq_len": 128},
        "optim": {"global_batch": 4, "micro_batch": 2},
    }
    plain = make_run(tmp_path / "plain", corpus, _sections(length))
    compiled = make_run(
        tmp_path / "compiled",
        corpus,
        _sections({**length, "model": {"compile": True}, **extra}),
    )
    run_on_ranks(_train_all, 2, [plain, compiled])
    for found, expected in zip(_steps(compiled), _steps(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)

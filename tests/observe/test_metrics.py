"""Metric lines: the contract's keys, rates by hand arithmetic, MFU only where there is a peak."""

from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.io.files import write_json
from shardyard.observe.metrics import FlopBudget, MetricLines, StepTimes, read_flop_budget
from shardyard.rundir.jsonl import METRIC_KEYS

# Llama-3.1-8B at 8,192 tokens takes 57.9 GFLOP a token with full attention; 13,812 tokens/s on an
# H100 are then 800 TFLOP/s (NVIDIA's own row), which is 80.9 % of 989 TFLOP/s.
H100 = FlopBudget(flops_per_token=57.9e9, peak_flops_per_s=989e12)


def _line(budget: FlopBudget, **counted: float) -> dict[str, object]:
    lines = MetricLines(budget, attempt=1, generation=2, world_size=4)
    return lines.step(
        step=3, epoch=0.5, loss=2.0, grad_norm=1.0, lr=1e-3, tokens=900, targets=40, samples=30,
        loss_scale=None, step_tokens=300, step_samples=10, peak_memory_bytes=7, counted=counted,
        times=StepTimes(step_time_s=0.5, data_wait_s=0.1, checkpoint_blocked_s=0.2),
    )  # fmt: skip


def test_a_line_has_the_keys_of_the_contract_and_rates() -> None:
    line = _line(H100)
    assert tuple(line) == METRIC_KEYS
    assert (line["tokens"], line["targets"]) == (900, 40)
    assert line["tokens_per_s"] == 600
    assert line["samples_per_s"] == 20
    assert line["tokens_per_s_per_device"] == 150
    assert (line["attempt"], line["generation"], line["world_size"]) == (1, 2, 4)


def test_the_router_of_a_mixture_is_told_and_a_dense_model_has_none() -> None:
    keys = ("expert_load", "router_aux_loss", "router_z_loss")
    counted = dict(zip(keys, (1.5, 1.1, 4.0), strict=True))
    assert [_line(H100, **counted)[key] for key in keys] == [1.5, 1.1, 4.0]
    assert [_line(H100)[key] for key in keys] == [None] * 3


def test_mfu_is_the_vendors_own_figure_and_absent_without_a_peak() -> None:
    assert H100.mfu(13812) == pytest.approx(0.8086, abs=1e-3)
    assert _line(FlopBudget(flops_per_token=1.0, peak_flops_per_s=None))["mfu"] is None


def test_the_budget_is_read_from_the_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    flops = {"full": 3.0, "causal": 2.0}
    write_json(plan, {"flops_per_token": flops, "peak_flops_per_s": None, "more": 1})
    assert read_flop_budget(plan) == FlopBudget(flops_per_token=3.0, peak_flops_per_s=None)


def test_a_missing_plan_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"plan.json cannot be read .* resume the run"):
        read_flop_budget(tmp_path / "plan.json")

"""Whole estimates: published runs end to end, rates, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import cluster_of
from shardyard.hardware.links import Link
from shardyard.planner.calibration import Calibration
from shardyard.planner.estimate import estimate
from tests.planner.workloads import MEGATRON_2022, OURS, ZERO_PAPER, dgx, p5, workload


def gpt(hidden: int, layers: int, heads: int) -> ModelShape:
    """A GPT of Korthikanti et al. 2022, table 3."""
    return ModelShape(
        model_type="gpt2", vocab_size=51200, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip


GPT_22B, GPT_175B = gpt(6144, 48, 64), gpt(12288, 96, 96)
GPT_530B, GPT_1T = gpt(20480, 105, 128), gpt(25600, 128, 160)


@pytest.mark.parametrize(
    ("shape", "pp", "chunks", "samples", "per_pass", "full_s", "selective_s"),
    [
        # Korthikanti et al. 2022, arXiv:2205.05198, table 5, on DGX A100, tp 8, one copy
        # (benchmarks/groundtruth/measured_runs.csv, family korthikanti): seconds of an iteration
        # with all recomputed; with attention alone recomputed, and sequences split
        (GPT_22B, 1, 1, 4, 4, 1.42, 1.10),
        (GPT_175B, 8, 3, 64, 1, 18.13, 13.75),
        (GPT_530B, 35, 3, 280, 1, 49.05, 37.83),
        (GPT_1T, 64, 1, 512, 1, 94.42, 71.49),
    ],
)
def test_published_runs_of_megatron_take_as_long_as_they_took(
    shape: ModelShape, pp: int, chunks: int, samples: int, per_pass: int, full_s: float,
    selective_s: float,
) -> None:  # fmt: skip
    tech = replace(
        MEGATRON_2022, schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks
    )
    whole = workload(
        shape, formats=ZERO_PAPER, techniques=tech, seq_len=2048, micro_batch=per_pass,
        global_batch=samples, recompute="full", tp=8, pp=pp, zero=1,
    )  # fmt: skip
    split = replace(whole, recompute="attention", techniques=replace(tech, sequence_parallel=True))
    cluster = dgx("A100 80GB", devices=8 * pp)
    both = estimate(whole, cluster), estimate(split, cluster)
    assert both[0].step_s == pytest.approx(full_s, rel=0.15)
    assert both[1].step_s == pytest.approx(selective_s, rel=0.15)
    assert [each.fit.verdict for each in both] == ["fits", "fits"], "they ran"


def test_rates_follow_from_the_step() -> None:
    found = estimate(workload(dp_shard=8, passes=4), p5())
    assert found.devices == 8
    assert found.samples_per_s == pytest.approx(32 / found.step_s)
    assert found.tokens_per_s == pytest.approx(32 * 4096 / found.step_s)
    assert found.tokens_per_s_per_device == pytest.approx(4 * 4096 / found.step_s)
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.step_s)


def test_memory_is_held_against_the_device() -> None:
    assert estimate(workload(dp_shard=16), p5()).fit.verdict == "fits"
    found = estimate(workload("llama2-70b", dp_shard=16), p5())
    assert found.fit.verdict == "does not fit"
    assert "of 80.0 GiB" in found.fit.reason


def test_measured_rates_replace_the_catalogues() -> None:
    w = workload(dp_shard=16)
    plain = estimate(w, p5()).parts
    slower = estimate(w, p5(), Calibration(matmul_share=0.2, bandwidth_share=0.3)).parts
    assert slower.matmul_s > 2 * plain.matmul_s
    assert slower.elementwise_s > 2 * plain.elementwise_s
    assert slower.attention_s == plain.attention_s


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(RequestError) as refused:
        estimate(workload(dp_shard=32), p5(2))
    assert str(refused.value) == (
        "the layout has 32 ranks, but p5.48xlarge x 2 has 16 devices. Take more nodes, or smaller "
        "degrees."
    )


@pytest.mark.parametrize(
    ("name", "compute"), [("g5.48xlarge", "bf16"), ("p3.16xlarge", "bf16"), ("p4d.24xlarge", "fp8")]
)
def test_a_device_without_a_rate_is_refused(name: str, compute: Any) -> None:
    cluster = cluster_of(instance(name), 1)
    device = cluster.accelerator.name
    with pytest.raises(RequestError) as refused:
        estimate(workload("llama-1b", formats=replace(OURS, compute=compute)), cluster)
    text = str(refused.value)
    assert text.startswith(f"the catalogue has no {compute} peak for {device}, so no time can be ")
    assert "docs/hardware.md" in text and "calibration" in text


def test_every_kind_of_model_has_an_estimate() -> None:
    for preset in PRESETS:
        shape = PRESETS[preset].shape
        shape = shape if shape.vocab_size else replace(shape, vocab_size=4096)
        found = estimate(workload(shape, dp_shard=16, seq_len=512), p5())
        assert found.step_s > 0 and found.memory.allocated_bytes > 0


def test_a_link_that_was_measured_slow_slows_its_axis_alone() -> None:
    slow = Link(name="measured", bytes_per_s=5e9, latency_s=1e-4, source="a table")
    w = workload("llama2-70b", dp_shard=2, tp=8)
    plain, between = estimate(w, p5()).parts, estimate(w, replace(p5(), between=slow)).parts
    assert between.tensor_s == plain.tensor_s
    assert between.data_s > 5 * plain.data_s

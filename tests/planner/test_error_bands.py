"""Bands of predicted speeds: their file, their coverage, and how a plan carries them."""

import json
import math
import random

import pytest

from benchmarks import error_bands as generator
from shardyard.config.layout import Layout
from shardyard.hardware.catalogue import accelerator_by_name
from shardyard.planner.calibration import Calibration
from shardyard.planner.error_bands import (
    DATA,
    PublishedRuns,
    RunKind,
    band_of_kind,
    error_band,
    published_runs,
    spread_of,
)
from shardyard.planner.plan import Plan
from tests.planner.test_plan import planned, two_p5
from tests.planner.workloads import workload

KIND = RunKind(generation="Hopper", number_format="16 bit", model="dense", layout="data ranks only")


A100, TRAINIUM = accelerator_by_name("A100 80GB"), accelerator_by_name("Trainium1")


def runs(source: str, *errors: float, kind: RunKind = KIND) -> PublishedRuns:
    return PublishedRuns(source=source, kind=kind, errors=errors)


def other(**changes: str) -> RunKind:
    return RunKind(
        **{
            "generation": KIND.generation,
            "number_format": KIND.number_format,
            "model": KIND.model,
            "layout": KIND.layout,
            **changes,
        }
    )


def test_the_file_is_what_its_generator_writes() -> None:
    """After a change of the planner's model: ``python -m benchmarks.error_bands``."""
    assert generator.text_of(generator.content_of(generator.errors_of_tables())) == DATA.read_text()


def test_four_of_five_runs_of_a_source_that_is_left_out_lie_in_their_band() -> None:
    # counted here by the bands themselves, and not by the scores of the generator
    published, _, _ = published_runs()
    inside = total = 0
    for source in {each.source for each in published}:
        factor = generator.widening(published, without=[source])
        for each in published:
            if each.source == source:
                band = band_of_kind(each.kind, published, widening=factor, without=[source])
                # measured over predicted speed
                ratios = [math.exp(-error) for error in each.errors]
                inside += sum(band.low * 0.9999 <= x <= band.high * 1.0001 for x in ratios)
                total += len(ratios)
    assert total == 879
    assert 0.75 <= inside / total <= 0.85
    figures = json.loads(DATA.read_text())["coverage"]
    assert figures["of_runs"] == pytest.approx(inside / total, abs=2e-3)
    assert 0.75 <= json.loads(DATA.read_text())["scaled_coverage"]["of_runs"] <= 0.85


def test_the_band_of_one_kind_is_its_quantiles() -> None:
    draws = random.Random(4)
    errors = [draws.gauss(0.1, 0.2) for _ in range(20_001)]
    low, middle, high = spread_of(KIND, [runs("one", *errors)])
    # 1.2816: the normal distribution's 90 % quantile
    assert middle == pytest.approx(0.1, abs=0.01)
    assert low == pytest.approx(0.1 - 1.2816 * 0.2, abs=0.015)
    assert high == pytest.approx(0.1 + 1.2816 * 0.2, abs=0.015)


def test_runs_of_the_same_kind_count_most_and_a_source_less_than_its_rows() -> None:
    near, far = runs("near", *[0.0] * 9), runs("far", *[1.0] * 9, kind=other(generation="Volta"))
    assert KIND.weight(far.kind) == 0.25
    assert KIND.weight(other(generation="MI300X", model="experts")) == 0.125
    low, middle, high = spread_of(KIND, [near, far])
    assert middle == 0.0 - 0.0 and high == pytest.approx(1.0)
    assert low == pytest.approx(-0.02)
    # one run against nine of another source: a quarter of the weight, not a tenth
    assert spread_of(KIND, [near, runs("one", 1.0)])[2] > 0.5


def test_a_wider_band_keeps_its_middle_and_a_source_can_be_left_out() -> None:
    published = [runs("one", -0.1, 0.0, 0.1), runs("two", 2.0, 3.0)]
    narrow = band_of_kind(KIND, published, widening=1.0, without=["two"])
    wide = band_of_kind(KIND, published, widening=2.0, without=["two"])
    assert narrow.runs == 3 and narrow.sources == ("one",)
    assert narrow.low * narrow.high == pytest.approx(1.0)
    assert math.log(wide.high) == pytest.approx(2 * math.log(narrow.high))


def test_the_band_of_a_rate_and_of_a_time_are_inverse() -> None:
    band = band_of_kind(KIND, [runs("one", -0.2, 0.0, 0.3)], widening=1.0)
    low, high = band.of_rate(100.0)
    assert low < 100 < high
    assert band.of_time(10.0) == pytest.approx((1000 / high, 1000 / low))
    # a part that does not depend on the speed stays
    assert band.of_time(15.0, steps_s=10.0) == pytest.approx((5 + 1000 / high, 5 + 1000 / low))


def test_experts_on_blackwell_have_a_wider_band_than_dense_models_on_ampere() -> None:
    dense = Layout(dp_replicate=1, dp_shard=8, zero=3)
    split = Layout(dp_replicate=1, dp_shard=8, ep=8, zero=3)
    mixture = workload("qwen3-30b-a3b", layout=split)
    ampere = error_band(
        workload("llama2-7b", layout=dense), accelerator_by_name("A100 80GB"), dense
    )
    blackwell = error_band(mixture, accelerator_by_name("GB200"), split)
    assert ampere is not None and blackwell is not None
    assert "mosaic-llm-foundry" in ampere.sources and blackwell.sources == ("megatron-bridge",)
    assert blackwell.high / blackwell.low > 1.3 * ampere.high / ampere.low
    unknown = error_band(
        workload("llama2-7b", layout=dense), accelerator_by_name("Trainium1"), dense
    )
    assert unknown is not None and unknown.runs == 0 and "none is Trainium1" in unknown.words()
    assert error_band(workload("llama2-7b", layout=dense), None, dense) is None


def test_a_plan_carries_the_bands_of_speed_time_and_price() -> None:
    found = planned(two_p5())
    band = found.speed.band
    assert band is not None
    bands = found.to_json()["bands"]
    rate, wall_s, usd = found.speed.tokens_per_s, found.wall_s, found.usd
    assert rate and wall_s and usd
    assert bands["tokens_per_s"] == pytest.approx([rate * band.low, rate * band.high])
    assert bands["wall_s"][0] < wall_s < bands["wall_s"][1]
    assert bands["usd"][1] / bands["usd"][0] == pytest.approx(
        bands["wall_s"][1] / bands["wall_s"][0]
    )
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    measured = planned(two_p5(), calibration=Calibration(step_scale=1.2)).speed.band
    # a measured step says what a source has in common
    assert measured is not None and measured.high / measured.low < band.high / band.low

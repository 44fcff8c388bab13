"""A step sends over each axis what the plan says; all layouts: benchmarks/axis_traffic.py."""

from pathlib import Path

import pytest

from benchmarks.axis_traffic import CASES, is_met, measure

NAMES = (
    "llama-tiny-deep tp2 dp_shard2 zero2",
    "llama-tiny-deep tp2 dp_shard2 recompute full",
    "llama-tiny-deep pp2 tp2",
    "llama-tiny-deep cp2 cp_exchangeheads dp_shard2",
    "mixtral-tiny ep2 dp_shard2 pp2",
    "llama-tiny-deep tp2 dp_shard2 zero3 lora4",
    "llama-tiny-deep tp2 dp_shard2 lora4 recompute full",
    "olmo2-tiny tp2 dp_shard2 recompute full",
)


@pytest.mark.parametrize(
    "names",
    [NAMES[:1], pytest.param(NAMES[1:], marks=pytest.mark.slow)],
    ids=["one", "more"],
)
def test_what_is_sent_is_what_the_plan_says(tmp_path: Path, names: tuple[str, ...]) -> None:
    cases = [case for case in CASES if case.name in names]
    assert len(cases) == len(names)
    for case, axes in zip(cases, measure(tmp_path, cases), strict=True):
        assert axes and is_met(axes), (case.name, axes)

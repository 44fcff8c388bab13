"""Targets, differences and the numbers of several runs side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.report.compare.comparison import RunComparison, compare
from shardyard.report.compare.differences import environment_differences, settings_that_differ
from shardyard.report.compare.targets import parse_target, targets_of
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from tests.report.compare.some_runs import USD_PER_HOUR, record_of
from tests.report.synthetic import RunWriter, resolved_run


def compared(*records: Any, target: dict[str, float] | None = None) -> RunComparison:
    return compare([[record] for record in records], target=target or {})


def test_a_target_is_reached_at_the_first_evaluation_that_is_all_of_it(tmp_path: Path) -> None:
    quick = record_of(tmp_path, "quick")
    short = record_of(tmp_path, "short", steps=30)
    found = compared(quick, short, target={"loss": 4.0})
    reached, missed = found.targets
    scored = {p["steps"] or 0: s["loss"] for p, s in found.runs[0].curves.evaluations}
    step = min(step for step, loss in scored.items() if loss <= 4.0)
    assert reached.at["steps"] == step and reached.why_not == ""
    assert reached.at["tokens"] == step * 4096
    assert reached.at["hours"] is not None
    assert reached.at["dollars"] == pytest.approx(reached.at["hours"] * USD_PER_HOUR, rel=1e-6)
    assert missed.at == {}
    assert missed.why_not.startswith("not reached: best loss ") and "at step 20" in missed.why_not


def test_each_run_may_bring_its_target_and_all_are_held_to_it(tmp_path: Path) -> None:
    a = record_of(tmp_path, "a", run={"target": {"loss": 5.0}})
    b = record_of(tmp_path, "b", run={"target": {"loss": 4.0}})
    c = record_of(tmp_path, "c")
    found = compared(a, b, c)
    assert [(each.target["loss"], each.run) for each in found.targets] == [
        (5.0, "a"), (5.0, "b"), (5.0, "c"), (4.0, "a"), (4.0, "b"), (4.0, "c"),
    ]  # fmt: skip
    assert compared(c, record_of(tmp_path, "d")).targets == ()


def test_a_run_without_a_price_reaches_a_target_for_an_unknown_price(tmp_path: Path) -> None:
    free = record_of(tmp_path, "free", usd_per_hour=None)
    (reached, _) = compared(free, record_of(tmp_path, "b"), target={"loss": 5.0}).targets
    assert reached.at["dollars"] is None and reached.at["hours"] is not None


def test_a_metric_that_no_run_has_is_refused_with_those_that_they_have(tmp_path: Path) -> None:
    records = [record_of(tmp_path, "a")]
    with pytest.raises(RequestError, match=r"--target top1=0.9.*They are by loss, perplexity"):
        targets_of(records, {"top1": 0.9})


@pytest.mark.parametrize("text", ["loss", "loss=", "=2", "loss=low", "loss=nan"])
def test_a_target_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not a metric and a number.*--target loss=2.0"):
        parse_target(text)


def test_only_settings_that_differ_are_told_with_defaults_resolved(tmp_path: Path) -> None:
    a = record_of(tmp_path, "a")
    b = record_of(tmp_path, "b", optim={"lr": 2e-3}, run={"id": "b"})
    (row,) = settings_that_differ([a, b])
    assert (row.name, row.values) == ("optim.lr", ("0.001", "0.002"))
    assert settings_that_differ([a, record_of(tmp_path, "c")]) == []


def test_a_setting_that_a_resume_changed_is_told_with_both_values(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    writer.resolved = resolved_run(optim={"lr": 5e-4})
    writer.begin()
    writer.start()
    writer.steps(6, 9)
    changed = read_run(writer.write())
    (row,) = settings_that_differ([changed, record_of(tmp_path, "b")])
    assert row.values == ("0.001 -> 0.0005", "0.001")


def test_surroundings_that_differ_are_told(tmp_path: Path) -> None:
    a, b = record_of(tmp_path, "a"), record_of(tmp_path, "b", steps=60)
    told = {row.name: row.values for row in environment_differences([a, b])}
    assert told["steps of the whole run"] == ("120", "60")
    assert "ranks" not in told and "torch" not in told


def test_numbers_of_a_run_do_not_depend_on_what_is_beside_it(tmp_path: Path) -> None:
    records = [record_of(tmp_path, f"run-{n}", optim={"lr": 1e-3 * (n + 1)}) for n in range(5)]
    alone = compared(*records[:2])
    among = compared(records[0], *records[2:], records[1])
    assert alone.runs[0].to_json() == among.runs[0].to_json()
    assert alone.speeds[0] == among.speeds[-1]
    assert {**alone.runs[1].to_json(), "side": 4} == among.runs[-1].to_json()


def test_repeats_of_one_kind_are_one_side(tmp_path: Path) -> None:
    def rate_of(side: int) -> Callable[[int], float]:
        return lambda step: 4096 / (0.6 * (1 + 0.08 * side)) * (1 + 1e-3 * (step * 37 % 11))

    runs = {
        name: record_of(tmp_path, name, began_t=1.8e9 + 1000 * n, rate=rate_of(n % 2))
        for n, name in enumerate(["a1", "b1", "a2", "b2", "a3", "b3"])
    }
    found = compare([[runs[f"{side}{n}"] for n in (1, 2, 3)] for side in "ab"], target={})
    assert [side.name for side in found.sides] == ["a1 and 2 more", "b1 and 2 more"]
    (speed,) = found.speeds
    assert speed.verdict == "slower" and speed.ratio == pytest.approx(1.08)
    assert "3 pairs of runs that alternate" in speed.how
    told = found.to_json()
    assert [run["side"] for run in told["runs"]] == [0, 0, 0, 1, 1, 1]
    assert told["speeds"][0]["baseline"] == "a1 and 2 more"


def test_the_rate_that_scaling_by_the_batch_made_is_told(tmp_path: Path) -> None:
    """Goyal et al. 2017: twice the batch that optim.lr is for, twice the rate."""
    a = record_of(tmp_path, "a", optim={"batch_per_device": 8})
    scaled = {"batch_per_device": 8, "lr_scaling": "linear", "lr_batch": 8}
    b = record_of(tmp_path, "b", optim=scaled)
    found = {row.name: row.values for row in settings_that_differ([a, b])}
    assert found["learning rate, by optim.lr_scaling"] == ("0.001", "0.002")
    assert "optim.lr" not in found

"""MTBF and spare nodes against published figures and hand arithmetic."""

import csv
import math
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.planner.failure_rates import (
    ANCHORS,
    HARDWARE_SHARE,
    RATES,
    estimate_mtbf,
    log_log,
    require_not_negative,
    require_positive,
    spare_nodes,
    with_reclaims,
)

TABLE = Path("benchmarks/groundtruth/reliability_measurements.csv")


def hours(nodes: int, devices: int | None = None) -> float:
    return estimate_mtbf(nodes=nodes, devices=devices or 8 * nodes).seconds / 3600


@pytest.mark.parametrize(("gpus", "projected_hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_the_rate_of_rsc_1_projects_as_its_paper_does(gpus: int, projected_hours: float) -> None:
    per_s = RATES["rsc-1"].per_node_second * gpus / 8
    assert 1 / per_s / 3600 == pytest.approx(projected_hours, rel=0.03)


def test_the_rate_of_llama_3_is_one_failure_in_3_09_hours() -> None:
    # 54 d x 86,400 s / 419
    assert 1 / (2048 * RATES["llama3-405b"].per_node_second) == pytest.approx(11_135, abs=1)


def test_rates_and_anchors_stand_in_the_table_of_measurements() -> None:
    with TABLE.open(newline="") as file:
        rows = {(row["system"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    assert float(rows["Meta RSC-1", "failure_rate_r_f"]) == RATES["rsc-1"].per_1000_node_days
    assert float(rows["Meta RSC-2", "failure_rate_r_f"]) == RATES["rsc-2"].per_1000_node_days
    assert float(rows["Meta RSC", "mttf_measured"]) == ANCHORS[1].mtbf_hours
    assert float(rows["Llama 3 405B", "mtti_derived"]) == pytest.approx(hours(2048), abs=0.01)


def test_the_estimate_goes_through_what_was_measured() -> None:
    assert hours(1) == pytest.approx(47.7 * 24)
    assert hours(128) == pytest.approx(7.9)  # not the 28.8 h of RSC-1's rate per node
    assert hours(2048) == pytest.approx(54 * 24 / 419)


def test_beyond_what_was_measured_twice_the_nodes_fail_twice_as_often() -> None:
    assert hours(4096) == pytest.approx(hours(2048) / 2)
    assert hours(1, devices=1) == hours(1)  # a node with one device is a node


def test_measurements_that_were_left_out_are_near_the_estimate() -> None:
    assert hours(124) == pytest.approx(7.5, rel=0.10)  # OPT 175B
    assert hours(1625) == pytest.approx(2.78, rel=0.25)  # ByteRobust, 1,200 to 2,048


def test_more_nodes_never_fail_less_often() -> None:
    sizes = [hours(nodes) for nodes in range(1, 5000, 7)]
    assert sizes == sorted(sizes, reverse=True)


def test_sixty_four_devices_in_one_chassis_count_as_eight_nodes() -> None:
    assert hours(1, devices=64) == hours(8)


def test_the_range_is_that_of_published_rates() -> None:
    found = estimate_mtbf(nodes=2048, devices=16_384)
    assert found.high_s == pytest.approx(1000 / 2.34 * 86_400 / 2048)  # RSC-2
    assert found.low_s == pytest.approx(64 * 86_400 / 2048)  # OPT: 2 of 128 a day
    few = estimate_mtbf(nodes=16, devices=128)
    assert few.low_s == few.seconds < few.high_s


def test_a_known_mtbf_of_a_node_overrides_what_was_published() -> None:
    found = estimate_mtbf(nodes=10, devices=80, hours_per_node=1000)
    assert (found.seconds, found.low_s, found.high_s) == (360_000, 360_000, 360_000)
    assert found.reason == "1000 h per node, as given, / 10"


def test_the_reason_names_the_measurements_it_rests_on() -> None:
    assert "between 1,145 h (RSC jobs of 8 GPUs" in estimate_mtbf(nodes=16, devices=128).reason
    beyond = estimate_mtbf(nodes=16_384, devices=131_072).reason
    assert beyond.startswith("16,384 x 8 devices, by 1 / nodes from 3.09 h (Llama 3")


def test_lines_are_straight_in_log_log_and_flat_outside() -> None:
    points = [(1.0, 100.0), (100.0, 1.0)]
    assert log_log(10, points) == pytest.approx(10)
    assert (log_log(0.1, points), log_log(1e6, points)) == (100, 1)


def shortages(spares: int, *, mean_out: float, failures: float) -> float:
    """Times a run comes up short: failures that meet exactly all spares out."""
    return failures * math.exp(-mean_out) * mean_out**spares / math.factorial(spares)


@pytest.mark.parametrize(("failures", "days"), [(1, 30), (12, 30), (70, 30), (330, 54)])
def test_spares_are_the_fewest_that_keep_the_risk(failures: float, days: float) -> None:
    run_s = days * 86_400
    found = spare_nodes(failures_per_s=failures / run_s, replacement_s=86_400, run_s=run_s)
    mean_out = failures / days
    accepted = -math.log(0.95)
    assert shortages(found, mean_out=mean_out, failures=failures) <= accepted
    assert shortages(found - 1, mean_out=mean_out, failures=failures) > accepted


def test_a_month_on_64_to_128_nodes_asks_for_the_spares_of_common_practice() -> None:
    # stas00/ml-engineering, training/fault-tolerance: 5 to 10 % more nodes than needed
    for nodes in (64, 128):
        per_s = 0.78 / (hours(nodes) * 3600)
        found = spare_nodes(failures_per_s=per_s, replacement_s=86_400, run_s=30 * 86_400)
        assert 0.05 <= found / nodes <= 0.10


def test_an_hour_on_one_node_needs_no_spare() -> None:
    assert spare_nodes(failures_per_s=1 / 4e6, replacement_s=86_400, run_s=3600) == 0


def test_spares_are_found_where_thousands_are_out() -> None:
    found = spare_nodes(failures_per_s=0.05, replacement_s=86_400, run_s=1e7)
    assert 4320 < found < 4320 * 1.2  # mean 0.05 x 86,400; exp(-4320) underflows


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_number_out_of_range_is_refused_with_its_name(value: float) -> None:
    with pytest.raises(RequestError, match=r"failures: steps=.* is out of range.*Correct steps"):
        require_positive("failures", nodes=1, steps=value)


def test_zero_is_allowed_where_it_means_none() -> None:
    require_not_negative("failures", write_s=0)
    with pytest.raises(RequestError, match="write_s=-1"):
        require_not_negative("failures", write_s=-1)


def test_spot_instances_are_taken_back_as_often_as_aws_says() -> None:
    """Of 100 nodes and 20 % a month, by the exponential law: -ln(0.8) a node in 30 days."""
    usual = estimate_mtbf(nodes=100, devices=800)
    spot = with_reclaims(usual, nodes=100)
    month_s = 30 * 86_400
    assert 1 / spot.seconds - 1 / usual.seconds == pytest.approx(100 * 0.2231435513 / month_s)
    assert spot.low_s <= spot.seconds < spot.high_s < usual.high_s
    lost = HARDWARE_SHARE / usual.seconds + 100 * 0.2231435513 / month_s
    assert spot.node_share == pytest.approx(lost * spot.seconds)
    assert "20% of spot instances" in spot.reason

"""Offers: nothing better can be rented, and what is picked is what was asked for."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.hardware.cluster import cluster_of
from shardyard.planner import instance_search as module
from shardyard.planner.effective_time import RecoverySettings
from shardyard.planner.failures import FailureForecast, failure_plan
from shardyard.planner.instance_search import NODES, ClusterQuote, ClusterQuotes, quote_clusters
from shardyard.planner.layouts import Relief, search
from tests.planner.workloads import workload

FEW = ("p4d.24xlarge", "p5.48xlarge")
TASK = workload("llama2-7b", global_batch=128, dp_shard=8)
STEPS = 1000
CHECKPOINT_BYTES = 81_000_000_000  # 12 bytes of each of 6.74 B parameters


@cache
def found_for(
    names: tuple[str, ...] = FEW,
    *,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
) -> ClusterQuotes:
    return quote_clusters(
        TASK, steps=STEPS, checkpoint_bytes=CHECKPOINT_BYTES, recovery=RecoverySettings(),
        deadline_s=deadline_s, budget_usd=budget_usd, names=names,
    )  # fmt: skip


@pytest.fixture(scope="module")
def front() -> tuple[ClusterQuote, ...]:
    return found_for().quotes


@pytest.fixture(scope="module")
def everything() -> list[ClusterQuote]:
    """What each instance type has to offer by itself."""
    return [offer for name in FEW for offer in found_for((name,)).quotes]


def test_each_next_offer_of_the_front_is_dearer_and_faster(front: tuple[ClusterQuote, ...]) -> None:
    assert len(front) > 2
    for cheaper, faster in pairwise(front):
        assert cheaper.usd < faster.usd
        assert cheaper.wall_s > faster.wall_s


@pytest.mark.heavy
def test_a_cluster_on_which_the_run_would_not_advance_is_no_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_failures = failure_plan

    def fails(**given: Any) -> FailureForecast:
        often = 0.001 if given["nodes"] > 2 else None
        return plan_failures(**given, mtbf_hours_per_node=often)

    monkeypatch.setattr(module, "failure_plan", fails)
    found = quote_clusters(
        TASK, steps=STEPS, checkpoint_bytes=CHECKPOINT_BYTES, recovery=RecoverySettings(), names=FEW
    )
    assert {offer.nodes for offer in found.quotes} <= {1, 2}
    monkeypatch.setattr(
        module, "failure_plan", lambda **given: plan_failures(**given, mtbf_hours_per_node=0.001)
    )
    with pytest.raises(RequestError, match="it would fail more often than it saves"):
        quote_clusters(
            TASK,
            steps=STEPS,
            checkpoint_bytes=CHECKPOINT_BYTES,
            recovery=RecoverySettings(),
            names=FEW,
        )


def test_nothing_that_can_be_rented_beats_the_front(
    front: tuple[ClusterQuote, ...], everything: list[ClusterQuote]
) -> None:
    for offer in front:
        better = [o for o in everything if o.usd < offer.usd and o.wall_s < offer.wall_s]
        assert better == []


def test_what_is_not_on_the_front_is_beaten(
    front: tuple[ClusterQuote, ...], everything: list[ClusterQuote]
) -> None:
    names = {(offer.instance, offer.nodes) for offer in front}
    for offer in everything:
        if (offer.instance, offer.nodes) not in names:
            assert any(o.usd <= offer.usd and o.wall_s <= offer.wall_s for o in front)


def test_an_offer_is_the_best_layout_of_its_cluster_at_its_price(
    front: tuple[ClusterQuote, ...],
) -> None:
    for offer in front:
        cluster = cluster_of(instance(offer.instance), offer.nodes)
        best = search(TASK, cluster, best=1, breadth="usual").best[0]
        assert offer.candidate == best
        assert offer.candidate.is_safe
        assert offer.devices == cluster.devices == best.layout.world_size
        assert offer.wall_s > STEPS * best.step_s
        rented = offer.nodes + offer.failures.spare_nodes
        price_per_hour = rented * (instance(offer.instance).usd_per_hour or 0)
        assert offer.usd == pytest.approx(offer.wall_s / 3600 * price_per_hour)


# --- picking ------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_deadline_picks_the_cheapest_within_it(
    front: tuple[ClusterQuote, ...], everything: list[ClusterQuote]
) -> None:
    deadline_s = (front[0].wall_s + front[-1].wall_s) / 2
    picked = found_for(deadline_s=deadline_s).selected
    assert picked is not None
    assert picked.wall_s <= deadline_s
    assert picked.usd == min(offer.usd for offer in everything if offer.wall_s <= deadline_s)


@pytest.mark.heavy
def test_a_budget_picks_the_fastest_within_it(
    front: tuple[ClusterQuote, ...], everything: list[ClusterQuote]
) -> None:
    budget_usd = (front[0].usd + front[-1].usd) / 2
    picked = found_for(budget_usd=budget_usd).selected
    assert picked is not None
    assert picked.usd <= budget_usd
    assert picked.wall_s == min(offer.wall_s for offer in everything if offer.usd <= budget_usd)


@pytest.mark.heavy
def test_a_deadline_and_a_budget_pick_the_cheapest_within_both(
    front: tuple[ClusterQuote, ...],
) -> None:
    last = front[-1]
    picked = found_for(deadline_s=last.wall_s, budget_usd=last.usd).selected
    assert picked == last
    assert found_for(deadline_s=last.wall_s, budget_usd=last.usd * 0.99).selected is None


def test_without_a_wish_the_cheapest_is_picked(front: tuple[ClusterQuote, ...]) -> None:
    assert found_for().selected == front[0]


@pytest.mark.heavy
def test_what_nobody_offers_is_not_picked(front: tuple[ClusterQuote, ...]) -> None:
    assert found_for(deadline_s=1).selected is None
    assert found_for(budget_usd=1).selected is None
    assert found_for(budget_usd=1).quotes == front


# --- what is passed over ------------------------------------------------------------------------


def test_instances_in_no_offer_say_why() -> None:
    found = found_for(("p5.48xlarge", "p5e.48xlarge", "trn1.32xlarge", "p3.16xlarge"))
    why = dict(found.passed_over)
    assert set(why) == {"p5e.48xlarge", "trn1.32xlarge", "p3.16xlarge"}
    assert why["p5e.48xlarge"] == "no on-demand price is known"
    assert "Trainium1" in why["trn1.32xlarge"]
    assert "no bf16 peak for V100" in why["p3.16xlarge"]


def test_no_offer_has_more_data_ranks_than_samples() -> None:
    few = workload("llama2-7b", global_batch=16, dp_shard=8)
    found = quote_clusters(
        few, steps=10, checkpoint_bytes=10**9, recovery=RecoverySettings(), names=("p5.48xlarge",)
    )
    assert found.quotes
    assert all(offer.candidate.layout.data_ranks <= 16 for offer in found.quotes)
    assert found.considered <= len(NODES)


def test_a_batch_per_device_needs_fewer_steps_on_more_nodes_for_the_same_samples() -> None:
    task = replace(workload("bert-large", global_batch=32, dp_shard=8), batch_per_device=4)
    given: dict[str, Any] = {"recovery": RecoverySettings(), "names": ("p4d.24xlarge",)}
    found = quote_clusters(task, steps=1600, checkpoint_bytes=10**9, **given).quotes
    assert len(found) > 1
    for offer in found:
        steps = round(offer.failures.productive_s / offer.candidate.step_s)
        assert steps * 4 * offer.devices == 1600 * 32


def test_a_model_that_nothing_can_train_is_refused_with_reasons() -> None:
    with pytest.raises(RequestError) as caught:
        quote_clusters(
            workload("llama3.1-405b", global_batch=4, dp_shard=8), steps=10,
            checkpoint_bytes=10**12, recovery=RecoverySettings(), names=("g5.xlarge", "g6e.xlarge"),
        )  # fmt: skip
    text = str(caught.value)
    assert "no instance type trains this within 64 nodes (g5.xlarge: " in text
    assert "memory.recompute=full, or describe a cluster of your own with cluster.file" in text


@pytest.mark.heavy
def test_the_whole_catalogue_is_considered_or_passed_over() -> None:
    tiny = workload("llama3.2-1b", global_batch=8, seq_len=512, dp_shard=8)
    found = quote_clusters(tiny, steps=10, checkpoint_bytes=10**9, recovery=RecoverySettings())
    passed = {name for name, _ in found.passed_over}
    assert {offer.instance for offer in found.quotes} <= set(instance_names()) - passed
    content = json.loads(json.dumps(found.to_json()))
    assert content["considered"] == found.considered
    assert content["picked"] == content["offers"][0]
    assert content["picked"]["candidate"]["fits"] == "fits"
    assert content["picked"]["failures"]["interval_steps"] >= 1


# --- levers, spot, rates that nobody measured ---------------------------------------------------


def test_of_settings_that_change_nothing_learnt_the_fastest_counts() -> None:
    compiled = replace(TASK, techniques=replace(TASK.techniques, kernels="compiled"))
    variant = Relief(settings=("model.compile=true",), work=compiled)
    found = quote_clusters(
        TASK, steps=STEPS, checkpoint_bytes=CHECKPOINT_BYTES, recovery=RecoverySettings(),
        names=FEW[1:],
        variants=[variant],
    )  # fmt: skip
    plain = {offer.nodes: offer for offer in found_for(FEW[1:]).quotes}
    for offer in found.quotes:
        assert offer.candidate.more == variant.settings
        assert offer.usd < plain[offer.nodes].usd


def test_spot_instances_fail_more_often_save_more_often_and_take_longer() -> None:
    def made(is_spot: bool) -> ClusterQuote:
        return quote_clusters(
            TASK, steps=100 * STEPS, checkpoint_bytes=CHECKPOINT_BYTES,
            recovery=RecoverySettings(is_spot=is_spot), names=FEW[1:], budget_usd=1e9,
            capacity="spot" if is_spot else "on-demand",
        ).quotes[0]  # fmt: skip

    usual, spot = made(False), made(True)
    assert spot.nodes == usual.nodes
    assert spot.failures.expected_failures > usual.failures.expected_failures
    assert spot.failures.interval_steps < usual.failures.interval_steps
    assert spot.wall_s > usual.wall_s
    assert spot.usd_per_hour == usual.usd_per_hour, "the upper limit of spot's price"


def test_an_offer_says_that_its_rate_was_not_measured() -> None:
    names = ("g6e.48xlarge", "p5.48xlarge")
    found = [found_for((name,)).quotes[0] for name in names]
    assert [bool(offer.unmeasured) for offer in found] == [True, False]
    assert "no bf16 product was timed on L40S" in found[0].unmeasured
    assert [offer.to_json()["unmeasured"] is None for offer in found] == [False, True]

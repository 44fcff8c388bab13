"""The difference of two plans in words: from their terms, and from nothing else."""

from dataclasses import replace

import pytest

from shardyard.config.layout import Layout
from shardyard.planner.memory import Term
from shardyard.planner.plan import Plan, plan_recipe
from shardyard.planner.plan_diff import classify_change, diff_plans
from shardyard.planner.step_time import TimeTerm
from tests.planner.recipes import resolved_recipe, shape_of
from tests.planner.workloads import p5

GIB = 2**30


def plan(**parallel: object) -> Plan:
    recipe = resolved_recipe(
        cluster={"nodes": 2, "instance": "p5.48xlarge"},
        optim={"global_batch": 16},
        parallel=dict(parallel),
    )
    return plan_recipe(
        recipe, shape=shape_of("llama2-7b"), steps=500, world_size=16, devices_per_node=8,
        machine=None,
    )  # fmt: skip


NOW = plan(strategy="FULL_SHARD")


def changed(
    *, gib: float = 0, seconds: float = 0, sent_gib: float = 0, fits: str = "fits", of: Plan = NOW
) -> Plan:
    """The plan with more of one term of each kind."""
    memory = [replace(t, bytes=t.bytes + round(gib * GIB * (t.name == "activations")))
              for t in of.memory]  # fmt: skip
    time = [replace(t, seconds=t.seconds + seconds * (t.name == "memory-bound")) for t in of.time]
    sent = [replace(t, bytes=t.bytes + round(sent_gib * GIB * (t.name == "all-gather")))
            for t in of.communication]  # fmt: skip
    return replace(
        of, memory=tuple(memory), time=tuple(time), communication=tuple(sent), fits=fits,
        device_bytes=of.device_bytes + round(gib * GIB),
    )  # fmt: skip


FULL = replace(NOW, fits="does not fit")


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (NOW, NOW, "makes no difference"),
        (NOW, changed(seconds=0.05), "does not help: slower"),
        (NOW, changed(gib=-9, seconds=0.05), "buys memory with time"),
        (NOW, changed(gib=9, seconds=-0.05), "buys time with memory"),
        (NOW, changed(gib=-9, seconds=-0.05), "faster and less memory"),
        (NOW, changed(seconds=-0.05), "faster"),
        (NOW, changed(gib=-9), "less memory, no slower"),
        (NOW, changed(gib=9), "does not help: more memory"),
        (NOW, changed(seconds=1e-6), "makes no difference"),
        (NOW, changed(gib=90, fits="does not fit"), "does not fit"),
        (FULL, changed(gib=-9, fits="fits"), "makes it fit"),
        (FULL, changed(gib=-9, fits="tight"), "makes it tight"),
        (
            FULL,
            changed(gib=-9, fits="does not fit"),
            "less memory, no slower, and still does not fit",
        ),
        (
            replace(NOW, time=()),
            replace(changed(gib=-9), time=()),
            "takes less memory",
        ),
        (replace(NOW, time=()), replace(changed(gib=9), time=()), "takes more memory"),
    ],
)
def test_a_verdict_goes_by_what_fits_then_by_memory_and_time(
    now: Plan, then: Plan, words: str
) -> None:
    assert classify_change(now, then) == words


def test_the_terms_that_changed_are_named_with_their_sizes_and_reasons() -> None:
    found = diff_plans(NOW, changed(gib=-4, seconds=0.05, sent_gib=12), p5())
    assert found.words() == (
        "buys memory with time; takes 4.0 GiB of activations off each device; each rank sends "
        "12.0 GiB more all-gather over 32 x EFA a step; a step: +50 ms of memory-bound (norms, "
        "residuals, activations: what memory passes)"
    )


def test_a_collective_that_stays_in_a_node_is_told_over_its_link() -> None:
    hybrid = plan(strategy="HYBRID_SHARD")
    assert hybrid.layout == Layout(dp_replicate=2, dp_shard=8, zero=3)
    sent = next(part for part in diff_plans(NOW, hybrid, p5()).why if part.startswith("each rank"))
    assert "less all-gather over 32 x EFA" in sent
    assert "more reduce-scatter over NVLink 4" in sent


def test_without_machines_no_link_is_named() -> None:
    why = diff_plans(NOW, changed(sent_gib=300), None).why
    assert why == ("each rank sends 300.0 GiB more all-gather a step",)


def test_a_peak_at_another_moment_is_told() -> None:
    then = replace(changed(gib=9), memory_moment="at the loss")
    assert "the peak is then at the loss" in diff_plans(NOW, then, None).why


def test_why_something_does_not_fit_is_told() -> None:
    then = replace(changed(gib=90, fits="does not fit"), fits_reason="the host is full")
    assert diff_plans(NOW, then, None).why[-1] == "the host is full"


def test_what_is_little_is_left_out_and_a_new_term_is_told() -> None:
    memory = (*NOW.memory, Term(name="in flight", bytes=5 * GIB, reason="x"))
    time = (*NOW.time, TimeTerm(name="offload", seconds=1e-4, reason="x"))
    found = diff_plans(NOW, replace(NOW, memory=memory, time=time), None)
    assert found.why == ("adds 5.0 GiB of in flight to each device",)

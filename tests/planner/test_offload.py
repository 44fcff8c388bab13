"""Offload takes host memory for what it spares the device."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.planner.estimate import estimate
from shardyard.planner.memory import memory
from shardyard.planner.offload import (
    host_bytes,
    host_shortage,
    moved_for_update,
    overlapped_transfer_bytes,
)
from shardyard.planner.workload import Techniques
from tests.planner.workloads import p5, workload

LLAMA2_7B = 6_738_415_616
"""Parameters, as counted from the published weights."""


@pytest.mark.parametrize(("what", "bytes_each"), [("optimizer", 8), ("params", 16)])
def test_states_lie_on_the_host(what: Any, bytes_each: int) -> None:
    w = workload(dp_shard=8, techniques=Techniques(kernels="eager", offload=what))
    assert host_bytes(w) == pytest.approx(bytes_each * LLAMA2_7B / 8, rel=1e-4)


def test_our_state_is_moved_up_and_down_at_once_and_others_move_gradients_and_weights() -> None:
    tech = Techniques(kernels="eager", offload="optimizer")
    ours, theirs = (
        moved_for_update(workload(dp_shard=8, techniques=replace(tech, updates_on_host=on_host)))
        for on_host in (False, True)
    )
    each = LLAMA2_7B / 8
    assert ours == pytest.approx(8 * each, rel=1e-4)  # two fp32 averages, each way
    assert theirs == pytest.approx((4 + 4) * each, rel=1e-4)


def test_our_weights_come_up_as_they_lie_there_and_once_more_for_the_update() -> None:
    tech = Techniques(kernels="eager", offload="params")
    ours, theirs = (
        workload(dp_shard=8, passes=2, techniques=replace(tech, updates_on_host=on_host))
        for on_host in (False, True)
    )
    each = LLAMA2_7B / 8
    # of two passes: fp32 weights twice, fp32 gradients; of theirs all in bf16
    assert overlapped_transfer_bytes(ours) == pytest.approx(2 * (4 + 4 + 4) * each, rel=1e-4)
    assert overlapped_transfer_bytes(theirs) == pytest.approx(2 * (2 + 2 + 2) * each, rel=1e-4)
    assert moved_for_update(ours) == pytest.approx((4 + 4 + 8) * each, rel=1e-4)
    assert moved_for_update(theirs) == 0
    for term in ("parameters", "gradients", "optimizer"):
        assert memory(ours).term(term) == 0


def test_the_host_holds_the_activations_that_the_device_is_spared() -> None:
    kept = workload(dp_shard=8, techniques=Techniques(kernels="eager"))
    moved = workload(dp_shard=8, techniques=Techniques(kernels="eager", offload="activations"))
    spared = memory(kept).term("activations") - memory(moved).term("activations")
    assert host_bytes(moved) == pytest.approx(spared * 32 / 30, rel=0.05)
    assert host_bytes(kept) == 0


def test_snapshots_are_copies_of_what_a_checkpoint_holds() -> None:
    kept = workload(dp_shard=8, techniques=Techniques(kernels="eager", snapshots=3))
    assert host_bytes(kept) == pytest.approx(3 * 12 * LLAMA2_7B / 8, rel=1e-4)
    small = replace(p5(1), host_memory_bytes=2**36)
    short = host_shortage(kept, small)
    assert short is not None and short.verdict == "does not fit"
    assert short.reason == (
        "3 copies of the state (elastic.snapshot_every) need 225.9 GiB of host memory a node, "
        "which has 64.0 GiB"
    )


def test_a_host_that_is_too_small_is_said() -> None:
    offloads = Techniques(kernels="eager", offload="activations")
    w = workload(dp_shard=8, micro_batch=64, techniques=offloads)
    short = host_shortage(w, p5(1))
    assert short is not None
    assert short.reason.startswith("memory.offload=activations needs ")
    assert short.reason.endswith(" a node, which has 2.0 TiB")
    assert estimate(w, p5(1)).fit == short
    assert host_shortage(workload(dp_shard=8, techniques=offloads), p5(1)) is None

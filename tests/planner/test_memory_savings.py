"""What a rank would need less: each saving is the difference of two plans."""

from dataclasses import replace

from shardyard.planner.memory import peak, savings
from tests.planner.workloads import workload


def test_the_largest_come_first_and_are_differences_of_plans() -> None:
    now = workload("llama3-8b", dp_shard=8, micro_batch=4, zero=2)
    found = savings(now, on_cpu=False)
    assert len(found) == 3
    assert [each.bytes for each in found] == sorted((e.bytes for e in found), reverse=True)
    of_half = peak(now)[0] - peak(replace(now, micro_batch=2))[0]
    assert {e.setting: e.bytes for e in found}["optim.micro_batch=2"] == round(of_half)


def test_nothing_is_moved_to_the_host_from_the_host() -> None:
    settings = {each.setting for each in savings(workload("llama-1b"), on_cpu=True)}
    assert settings and "memory.offload=activations" not in settings


def test_what_saves_nothing_is_not_named() -> None:
    least = workload("llama-tiny", recompute="full", seq_len=8)
    assert savings(least, on_cpu=True) == ()

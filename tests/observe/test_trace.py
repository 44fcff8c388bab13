"""Traces written by hand, whose answer is known: each moment of a step is told once, by one term.

Their form is that of torch 2.13 with gloo, and of Kineto's documented device events; no trace of an
accelerator was at hand.
"""

import random
from typing import Any

import pytest

from shardyard.observe.step_breakdown import TERMS, terms_of
from shardyard.observe.trace import (
    APART,
    DATA,
    EXCHANGE,
    LATER,
    OPTIMIZER,
    STEPS,
    NoStepsError,
    parse_trace,
)

Event = dict[str, Any]
_BEGIN_US = 4_634_130_927_000.0
"""Any clock: nothing may depend on where it begins."""


def span(
    name: str, begin_ms: float, length_ms: float, cat: str = "cpu_op", tid: Any = 1, **args: Any
) -> Event:
    return {
        "ph": "X", "cat": cat, "name": name, "tid": tid, "ts": _BEGIN_US + 1000 * begin_ms,
        "dur": 1000 * length_ms, "args": args,
    }  # fmt: skip


def ours(name: str, begin_ms: float, length_ms: float, tid: Any = 1) -> Event:
    return span(name, begin_ms, length_ms, "user_annotation", tid)


def gloo(name: str, begin_ms: float, length_ms: float) -> Event:
    return span(f"gloo:{name}", begin_ms, length_ms, "user_annotation", 77)


def told(events: list[Event], steps: int = 1) -> dict[str, Any]:
    """Milliseconds of a step by term, those that are not zero."""
    shuffled = random.Random(3).sample(events, len(events))
    terms = terms_of(parse_trace(shuffled), steps=steps)
    return {name: pytest.approx(1000 * s) for name, s in terms.items() if s > 1e-9}


def test_a_cpu_process_by_hand() -> None:
    events = [
        span("aten::mm", -9, 5),  # before the steps
        ours(STEPS, 0, 100),
        ours(DATA, 0, 10), span("aten::to", 2, 3),  # of the data
        span("aten::linear", 10, 10), span("aten::addmm", 11, 8), span("aten::copy_", 12, 1),
        span("aten::scaled_dot_product_attention", 20, 5), span("aten::bmm", 21, 3),
        ours(f"{EXCHANGE}fsdp", 25, 15), span("c10d::_allgather_base_", 26, 2),
        span("aten::empty", 26, 1), gloo("all_gather", 27, 12),
        span("autograd::engine::evaluate_function: MmBackward0", 40, 20),
        span("MmBackward0", 41, 18), span("aten::mm", 45, 10),
        ours(f"{EXCHANGE}tp", 60, 4), ours(f"{EXCHANGE}world", 64, 6),
        ours(APART, 70, 20), span("aten::mm", 71, 18),  # an evaluation
        ours(OPTIMIZER, 90, 6), span("aten::_fused_adamw_", 91, 4),
        {"ph": "M", "name": "process_name", "ts": 0.0, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "ts": _BEGIN_US + 1e6},
    ]  # fmt: skip
    assert told(events) == {
        "data": 10, "matrix products": 20, "attention": 5, "data parallel": 15,
        "launch": 5 + 5 + 4, "tensor parallel": 4, "stragglers": 6, "optimizer": 6,
    }  # fmt: skip
    assert told(events, steps=2)["data"] == 5


def test_what_is_waited_for_later_counts_only_where_nothing_is_computed() -> None:
    events = [
        ours(STEPS, 0, 50),
        ours(f"{LATER}dp_replicate", 0, 1),
        gloo("all_reduce", 1, 30),
        span("aten::mm", 5, 15),  # hides a half of it
        span("autograd::engine::evaluate_function: X", 22, 5),  # holds no operator: a wait
        gloo("recv", 40, 5),
        gloo("barrier", 60, 5),  # behind the steps
    ]
    assert told(events) == {
        "data parallel": 1 + 4 + 11, "matrix products": 15, "pipeline": 5, "launch": 9 + 5,
    }  # fmt: skip


def test_a_collective_that_nobody_named_is_dtensors_or_told_apart() -> None:
    events = [
        ours(STEPS, 0, 10),
        span("aten::mm", 0, 8),  # of a DTensor: it holds the collective that it needs
        span("_c10d_functional::all_reduce", 1, 1), span("c10d::allreduce_", 1.2, 0.5),
        span("_c10d_functional::wait_tensor", 2, 3), span("c10d::barrier", 5, 1),
        ours(f"{EXCHANGE}other", 8, 1),
    ]  # fmt: skip
    assert told(events) == {
        "matrix products": 3, "tensor parallel": 4, "other collectives": 2, "launch": 1,
    }  # fmt: skip


def test_a_range_that_begins_in_the_operator_that_opened_it_goes_on_behind_it() -> None:
    """As under selective recompute, whose mode sees the begin of a range as an operator."""
    events = [
        ours(STEPS, 0, 20),
        span("PythonDispatchMode", 1, 2), ours(f"{EXCHANGE}cp", 1.5, 8),
        span("c10d::_allgather_base_", 4, 2), gloo("all_gather", 5, 4),
        span("c10d::_allgather_base_", 12, 1),  # nobody named this one
        span("c10d::recv_", 15, 2), gloo("recv", 15, 4),
    ]  # fmt: skip
    assert told(events) == {
        "context parallel": 8, "other collectives": 1, "pipeline": 4, "launch": 1.5 + 2.5 + 2 + 1,
    }  # fmt: skip


def kernel(name: str, begin_ms: float, length_ms: float, correlation: int, **args: Any) -> Event:
    return span(name, begin_ms, length_ms, "kernel", 7, correlation=correlation, **args)


def launch(at_ms: float, correlation: int, tid: Any = 1) -> Event:
    return span("cudaLaunchKernel", at_ms, 0.01, "cuda_runtime", tid, correlation=correlation)


def test_a_device_by_hand() -> None:
    """Its own time counts: compute before a collective beside it, and why it waits."""
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        ours(STEPS, 0, 100),
        ours(DATA, 0, 12),  # the device has none of it after 10
        launch(1, 1), span("Memcpy HtoD (Pinned -> Device)", 8, 2, "gpu_memcpy", 7, correlation=1),
        ours(f"{EXCHANGE}fsdp", 12, 1), launch(12.5, 2),
        kernel(nccl, 14, 16, 2, **{"Process Group Description": "default_pg"}),
        launch(13, 3), kernel("sm90_xmma_gemm_bf16bf16_bf16f32", 20, 20, 3),
        launch(14, 4), kernel("void at::native::vectorized_elementwise_kernel<4>", 38, 7, 4),
        launch(15, 5), kernel("flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>", 45, 5, 5),
        # a backward pass has a thread of its own
        ours(f"{EXCHANGE}tp", 40, 2, tid=2), launch(41, 6, tid=2), kernel(nccl, 50, 5, 6),
        kernel(nccl, 55, 5, 99, **{"Process Group Description": "mesh_pp"}),  # launch not seen
        launch(50, 7), span("Memcpy DtoH (Device -> Pinned)", 60, 3, "gpu_memcpy", 8,
                            correlation=7),
        ours(OPTIMIZER, 60, 2), launch(61, 8),
        kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 70, 10, 8),
        ours(APART, 80, 15), kernel("sm90_xmma_gemm", 81, 10, 55),
    ]  # fmt: skip
    assert told(events) == {
        "data": 10 + 2, "data parallel": 6, "matrix products": 20, "memory-bound": 5,
        "attention": 5, "tensor parallel": 5, "pipeline": 5, "offload": 3, "optimizer": 10,
        "launch": 2 + 7 + 5,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_terms_add_up_to_the_time_of_the_steps(seed: int) -> None:
    draw = random.Random(seed)
    names = [
        "aten::mm", "aten::add", "c10d::allreduce_", "XBackward0", OPTIMIZER, DATA,
        f"{EXCHANGE}tp", f"{EXCHANGE}world", f"{LATER}fsdp", "aten::scaled_dot_product_attention",
    ]  # fmt: skip
    events = [ours(STEPS, 0, 1000)]

    def fill(begin: float, end: float, depth: int) -> None:
        while depth and end - begin > 1:
            first = draw.uniform(begin, end)
            last = draw.uniform(first, end)
            events.append(span(draw.choice(names), first, last - first))
            fill(first, last, depth - 1)
            begin = last

    fill(0, 1000, 5)
    events += [gloo("all_reduce", draw.uniform(-50, 1000), draw.uniform(0, 90)) for _ in range(30)]
    if seed % 2:  # a device's kernels overlap in any way
        events += [
            kernel(draw.choice(["gemm", "ncclDevKernel", "add"]), draw.uniform(-5, 1000), 40, n)
            for n in range(40)
        ]
    terms = terms_of(parse_trace(events), steps=4)
    assert set(terms) == set(TERMS)
    assert 4 * 1000 * sum(terms.values()) == pytest.approx(1000, rel=1e-6)


def test_a_trace_without_our_range_is_refused() -> None:
    with pytest.raises(NoStepsError, match="lacks the range"):
        parse_trace([span("aten::mm", 0, 1)])

"""How a run ends whose memory runs out: what holds it, what was planned, and what to change."""

from typing import Any

import torch
import torch.distributed as dist

from shardyard.errors import OutOfMemoryError
from shardyard.io.files import read_json_object
from shardyard.parallel.device import free_memory_bytes, held_memory_bytes
from shardyard.rundir.layout import RunDir
from shardyard.train.state import local_bytes, memory_by_kind
from shardyard.train.training import Training
from shardyard.units import format_bytes

_FIRST_STEPS = 2
"""Of a process: its first step finds no gradients and no state; from the second on all are alike,
so what runs out in these runs out again. Later it may be others that took the memory."""

_SAYS_SO = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",  # drivers, and errors of NCCL and cuBLAS that pass theirs on
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had nothing left: the device's, the CPU's, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAYS_SO)


def out_of_memory(
    error: BaseException,
    run_dir: RunDir,
    attempt: int,
    *,
    device: torch.device,
    training: Training | None,
    steps_done: int,
) -> Exception:
    """What to raise in place of it; call it while what holds the memory is still there.

    Args:
        training: None: it was still being set up.
        steps_done: By this process.

    Returns:
        An error that no restart cures; after the first steps one that a restart may.
    """
    phase = 0 if training is None else training.progress.phase
    plan = _plan(run_dir, attempt, phase)
    where = "while the model was set up"
    if training is not None:
        where = f"in step {training.progress.step + 1}"
    words = [
        f"rank {dist.get_rank()} ran out of memory on {device} {where} "
        f"({str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no memory'}).",
        _held(device, training),
        _planned(plan),
        _advice(plan, run_dir),
    ]
    text = " ".join(words)
    if steps_done < _FIRST_STEPS:
        return OutOfMemoryError(text)
    return RuntimeError(text)


def _held(device: torch.device, training: Training | None) -> str:
    total, free = held_memory_bytes(device), free_memory_bytes(device)
    kinds = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    if training is not None:
        by_kind = memory_by_kind(training.stepper.held(), device)
        kinds["parameters"] = by_kind["parameters_bytes"]
        kinds["optimizer state"] = by_kind["optimizer_bytes"]
        kinds["gradients"] = sum(map(local_bytes, training.stepper.gradients()))
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds.items())
    rest = max(0, total - sum(kinds.values()))
    what = "activations, Python and all else" if device.type == "cpu" else "activations and else"
    left = "" if free is None else f"; {format_bytes(free)} are free"
    return f"It held {format_bytes(total)}: {known}, {what} {format_bytes(rest)}{left}."


def _planned(plan: dict[str, Any]) -> str:
    if "memory" not in plan:
        return "There is no plan of its memory."
    terms = ", ".join(f"{each['name']} {format_bytes(each['bytes'])}" for each in plan["memory"])
    return (
        f"Planned were {format_bytes(plan['memory_bytes'])} {plan['memory_moment']} ({terms}), "
        f"{format_bytes(plan['device_bytes'])} with what is no tensor: {plan['fits']}."
    )


def _advice(plan: dict[str, Any], run_dir: RunDir) -> str:
    savings = plan.get("memory_savings", [])
    if not savings:
        return (
            "Use a smaller optim.micro_batch or data.seq_len, memory.recompute=full, or more "
            "devices to split the states over (parallel.zero=3)."
        )
    each = ", ".join(f"{each['setting']} ({format_bytes(each['bytes'])})" for each in savings)
    return (
        f"By the plan's numbers these save memory: {each}. Go on with "
        f"`shardyard resume {run_dir.handle} {savings[0]['setting']}`; more devices to split the "
        "states over help too."
    )


def _plan(run_dir: RunDir, attempt: int, phase: int) -> dict[str, Any]:
    """plan.json of the phase; empty where it cannot be read."""
    try:
        content = read_json_object(run_dir.plan(attempt))
        phases = content.get("phases") or [content]
        found: dict[str, Any] = phases[phase]
    except (OSError, ValueError, LookupError, AttributeError):
        return {}
    return found

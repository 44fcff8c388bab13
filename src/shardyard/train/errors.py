"""Problems that a training finds in its own numbers.

Numbers that are not finite and memory that runs out end it. A router of a mixture of experts that
has collapsed, so that one expert gets almost all tokens, is reported.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from shardyard.checkpoint.save import Abandoned
from shardyard.errors import NotFiniteError, OutOfMemoryError, TrainingError
from shardyard.io.files import read_json_object
from shardyard.parallel.device import allocated_memory_bytes, free_memory_bytes
from shardyard.rundir.layout import RunDir
from shardyard.train.state import local_bytes, memory_by_kind
from shardyard.train.step import StepResult
from shardyard.train.training import Training
from shardyard.units import format_bytes


def too_many_skipped(step: int, result: StepResult, *, latest: int) -> TrainingError:
    """The loss or the gradients of too many steps in a row were not finite.

    Args:
        latest: Step of the newest durable checkpoint; 0: there is none.
    """
    first = "precision.compute=fp32 if it was not"
    if result.loss_scale is not None and math.isfinite(result.loss):
        first = "precision.loss_scale=dynamic or a smaller one"
    return TrainingError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; "
        f"{result.skipped_in_row} steps in a row were skipped because they were not finite. "
        f"Restarting would repeat them. Resume with {first}, or start "
        f"a new run with a lower optim.lr or optim.grad_clip. {_describe_latest(latest)}",
        page=NotFiniteError.page,
    )


def scale_too_small(step: int, scale: float, *, latest: int) -> TrainingError:
    """Gradients overflow with the least scale that helps anybody.

    Args:
        latest: Step of the newest durable checkpoint; 0: there is none.
    """
    return TrainingError(
        f"step {step}: gradients overflow fp16 with a loss scale of {scale:g}, after the steps "
        "before have halved it as far as makes sense: not the scale makes them so large. Resume "
        "with precision.compute=fp32, or bf16 where the device has it, or start a new run with a "
        f"lower optim.lr. {_describe_latest(latest)}",
        page=NotFiniteError.page,
    )


def not_saved(save: Abandoned, *, latest: int) -> TrainingError:
    """The state itself is not finite; no later save of this process could succeed.

    Args:
        latest: Step of the newest durable checkpoint; 0: there is none.
    """
    return TrainingError(
        f"step {save.step} was not saved, as the state is not finite: {save.reason}. No step can "
        f"fix that. {_describe_latest(latest)} Resume the run: after a device fault it continues. "
        "If the same happens again, resume with precision.compute=fp32, or start a new run with a "
        "lower optim.lr or optim.grad_clip.",
        page=NotFiniteError.page,
    )


def _describe_latest(step: int) -> str:
    """Describe the checkpoint from which a resume would continue."""
    if not step:
        return "No checkpoint was saved yet."
    return f"The newest checkpoint is from step {step} and finite."


# A run that exhausts memory reports what holds it, what was planned, and which setting helps.

_FIRST_STEPS = 2
"""First steps of a process that differ: its first step finds no gradients and no state.

From the second on all are alike, so runs that exhaust memory in these steps will do so
again. Later, other processes may have taken the memory.
"""

_SAYS_SO = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",  # drivers, and errors of NCCL and cuBLAS that pass theirs on
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator ran out of memory: the device's, the CPU's, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Only the device's allocator has an error type. torch's CPU allocator, drivers, NCCL and cuBLAS
    # raise RuntimeError, which only its text distinguishes from other failures.
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
        _describe_usage(device, training),
        _planned(plan),
        _advice(plan, run_dir),
    ]
    text = " ".join(words)
    # OutOfMemoryError ends the run at once. The other counts for elastic.max_restarts.
    if steps_done < _FIRST_STEPS:
        return OutOfMemoryError(text)
    return RuntimeError(text)


def _describe_usage(device: torch.device, training: Training | None) -> str:
    total, free = allocated_memory_bytes(device), free_memory_bytes(device)
    kinds = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    if training is not None:
        by_kind = memory_by_kind(training.stepper.state_tensors(), device)
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
        return "Its memory was not planned."
    terms = ", ".join(f"{each['name']} {format_bytes(each['bytes'])}" for each in plan["memory"])
    return (
        f"Planned were {format_bytes(plan['memory_bytes'])} {plan['memory_moment']} ({terms}), "
        f"{format_bytes(plan['device_bytes'])} with memory outside of tensors: {plan['fits']}."
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
        f"By the plan's numbers these save memory: {each}. Continue with `shardyard resume "
        f"{run_dir.handle} {savings[0]['setting']}`; more devices to split the states over help "
        "too."
    )


def _plan(run_dir: RunDir, attempt: int, phase: int) -> dict[str, Any]:
    """plan.json of the phase; empty where it cannot be read."""
    try:
        content = read_json_object(run_dir.plan(attempt))
        phases = content.get("phases") or [content]
        plan: dict[str, Any] = phases[phase]
    except (OSError, ValueError, LookupError, AttributeError):
        return {}
    return plan


STEPS_IN_ROW = 3
NEAR_MOST = 0.9
"""Share of the way from an even load (1) to the largest possible one."""
_USUAL_LOSS = 0.01


class RouterWatch:
    """Reads the expert load of each step."""

    def __init__(self, *, experts: int, experts_per_token: int, router_aux_loss: float) -> None:
        """Args:
        experts: Experts of a block; 0: it has none, and no problem is found.
        experts_per_token: Experts that a token visits.
        router_aux_loss: Value in the recipe.
        """
        self._experts, self._experts_per_token = experts, experts_per_token
        self._loss = router_aux_loss
        self._steps = 0
        self._is_reported = False

    def after_step(self, step: int, load: float | None) -> str | None:
        """Return the problem and its remedy, once a process; else None.

        Args:
            load: Visits of the busiest expert of any block, as a multiple of the mean.
        """
        if load is None or not self._experts or self._experts <= self._experts_per_token:
            return None
        # A token visits an expert once at most, so the busiest has at most one visit of each token.
        most = self._experts / self._experts_per_token  # each token visits it
        has_collapsed = load >= 1 + NEAR_MOST * (most - 1)
        self._steps = self._steps + 1 if has_collapsed else 0
        if self._steps < STEPS_IN_ROW or self._is_reported:
            return None
        self._is_reported = True
        loss = max(_USUAL_LOSS, 10 * self._loss)
        return (
            f"A router has collapsed: since step {step + 1 - STEPS_IN_ROW:,} one expert of a block "
            f"gets {load / most:.0%} of all tokens (expert_load {load:.2f}; 1 is even, {most:.2f} "
            f"the most for {self._experts} experts of which a token visits "
            f"{self._experts_per_token}), so the others hardly learn. The likely fix: "
            f"model.router_aux_loss={loss:g} in place of {self._loss:g}."
        )

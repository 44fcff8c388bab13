"""The optimizer over this rank's shards, its state from the first step on, and the schedule.

torch's fused optimizers run on the local shards as plain tensors. On DTensors there is no fused
SGD, every call pays for a dispatch in Python, and fused AdamW has been seen to leak host memory
(pytorch/torchtitan issue 3790).

They want state in the format of the parameter, which is fp32. State that is held in bf16 is made
fp32 for the update, some parameters at a time, and rounded to the nearest again after it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardyard.config.schema import Optim
from shardyard.models.local_shard import parameter_of
from shardyard.parallel.gradients import local_part, square_sum
from shardyard.parallel.precision import DTYPES

_WIDENED_ELEMENTS = 2**26
"""Parameters whose state is fp32 at a time: 512 MiB of AdamW's, or those of one larger shard."""


class ShardOptimizer:
    """Updates a sharded model in place, shard by shard."""

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        *,
        states: str = "fp32",
        held_twice: Collection[str] = (),
        widened_elements: int = _WIDENED_ELEMENTS,
    ) -> None:
        """Take a model that has its storage. Matrices decay, norms and biases do not; what is
        frozen has no state.

        Args:
            states: Format in which averages are held, as precision.optimizer_states.
            held_twice: Names of parameters that two pipeline stages hold, with equal gradients.
            widened_elements: Most parameters whose bf16 averages are fp32 at the same time.
        """
        self._held_twice = frozenset(held_twice)
        self._params = dict(model.named_parameters())
        self._shards = {
            name: parameter_of(local_part(param.detach()), param)
            for name, param in self._params.items()
            if param.requires_grad
        }
        matrices = [shard for shard in self._shards.values() if shard.dim() >= 2]
        others = [shard for shard in self._shards.values() if shard.dim() < 2]
        self._torch, self._decay_apart = _fused(matrices, others, optim)
        dtype = DTYPES[states]
        self._states = {
            name: _zero_state(shard, optim, dtype) for name, shard in self._shards.items()
        }
        limit = math.inf if dtype == torch.float32 else widened_elements
        self._parts = list(_parts(self._shards, limit))

    def square_sum(self) -> Tensor:
        """This rank's share of the squared global norm of the gradients, fp64."""
        return square_sum(self._params, held_twice=self._held_twice)

    def gradients(self) -> list[Tensor]:
        """Those that there are, undivided."""
        return [param.grad for param in self._params.values() if param.grad is not None]

    def step(self, *, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Divide the gradients and apply them, or leave everything as it is where ``skip`` is 1.

        Both are decided on the device, without waiting for it. The gradients are gone afterwards.
        """
        for group in self._torch.param_groups:
            group["lr"] = lr
        fused: Any = self._torch  # fused optimizers read these two attributes
        fused.grad_scale = divisor.float()
        fused.found_inf = skip.float()
        kept = 1.0 - lr * self._decay_apart * (1.0 - skip.float())
        for names in self._parts:
            self._step_part(names, kept)

    def _step_part(self, names: list[str], kept: Tensor) -> None:
        """Update some parameters: torch's optimizer skips those that it is given no gradient of."""
        held, wide = [], []
        for name in names:
            shard, param = self._shards[name], self._params[name]
            shard.grad = None if param.grad is None else local_part(param.grad)
            param.grad = None
            self._torch.state[shard] = state = dict(self._states[name])
            for key, value in state.items():
                if value.dtype != torch.float32:
                    state[key] = torch.empty_like(value, dtype=torch.float32)
                    held.append(value)
                    wide.append(state[key])
        if held:
            torch._foreach_copy_(wide, held)
        shards = [self._shards[name] for name in names]
        decaying = [shard.data for shard in shards if shard.dim() >= 2 and shard.grad is not None]
        if self._decay_apart and decaying:
            torch._foreach_mul_(decaying, kept)
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        if held:
            torch._foreach_copy_(held, wide)
        self._torch.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """``model.<parameter>`` and ``optim.<state>.<parameter>``, sharing storage with both."""
        tensors: dict[str, Tensor] = {}
        for name, param in self._params.items():
            tensors[f"model.{name}"] = param.detach()
            for key, value in self._states.get(name, {}).items():
                tensors[f"optim.{key}.{name}"] = _placed_like(param, value)
        return tensors


def _fused(
    matrices: list[nn.Parameter], others: list[nn.Parameter], optim: Optim
) -> tuple[torch.optim.Optimizer, float]:
    """torch's optimizer, and the decay of matrices that is left to do before it steps.

    Decay is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101). torch's SGD would put it into
    the gradient, and so into the momentum.
    """
    lr, decay = float(optim.lr), float(optim.weight_decay)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    match optim.name:
        case "adamw":
            betas, eps = optim.betas, optim.eps
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True), 0.0
        case "sgd":
            groups[0]["weight_decay"] = 0.0
            return torch.optim.SGD(groups, lr=lr, momentum=optim.momentum, fused=True), decay
        case _:
            assert_never(optim.name)


def _parts(shards: Mapping[str, Tensor], limit: float) -> Iterable[list[str]]:
    """Names in parts of at most ``limit`` elements, or one shard."""
    part: list[str] = []
    elements = 0
    for name, shard in shards.items():
        if part and elements + shard.numel() > limit:
            yield part
            part, elements = [], 0
        part.append(name)
        elements += shard.numel()
    yield part


def _zero_state(shard: Tensor, optim: Optim, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state before the first step, so that saving and loading never depend on one."""
    zeros = torch.zeros_like(shard, requires_grad=False, dtype=dtype)
    match optim.name:
        case "adamw":
            # fused AdamW wants its step count on the device; fp32 counts exactly to 2**24
            step = torch.zeros((), dtype=torch.float32, device=shard.device)
            return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        case "sgd":
            return {"momentum_buffer": zeros} if optim.momentum else {}
        case _:
            assert_never(optim.name)


def _placed_like(param: Tensor, value: Tensor) -> Tensor:
    """State of a parameter, with its place in the whole; a scalar has none."""
    if not isinstance(param, DTensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def put_nan(tensors: Iterable[Tensor]) -> None:
    """Break the first of these that this rank holds a part of, for a drill."""
    for tensor in tensors:
        shard = local_part(tensor.detach())
        if shard.numel() and shard.is_floating_point():
            shard[(0,) * shard.dim()] = math.nan
            return


def lr_at(step: int, optim: Optim) -> float:
    """Learning rate of a step (1 is the first): linear warm-up, then the schedule, then its end.

    Needs resolved settings. The warm-up reaches the peak at step ``warmup_steps``; the decay
    reaches ``min_lr_ratio`` of the peak at step ``decay_steps`` and stays there.
    """
    peak, warmup, end = float(optim.lr), int(optim.warmup_steps), int(optim.decay_steps)
    if step <= warmup:
        return peak * step / warmup
    done = 1.0 if end <= warmup else min(1.0, (step - warmup) / (end - warmup))
    match optim.schedule:
        case "constant":
            return peak
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(optim.schedule)
    return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)

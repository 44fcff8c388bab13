"""The optimizer, its state from the first step on, and the learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardyard.config.schema import Optim


def build_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """The fused optimizer of a resolved recipe; matrices decay, norms and biases do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {
            "params": [param for param in params if param.dim() >= 2],
            "weight_decay": optim.weight_decay,
        },
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    lr = float(optim.lr)
    optimizer: torch.optim.Optimizer
    if optim.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=optim.momentum, fused=True)
    _create_state(optimizer, optim)
    return optimizer


def _create_state(optimizer: torch.optim.Optimizer, optim: Optim) -> None:
    """Zero state for every parameter, so that saving and loading never depend on a first step."""
    for param in optimized_parameters(optimizer):
        state = optimizer.state[param]
        if optim.name == "adamw":
            # fused AdamW wants its step count on the device; fp32 counts exactly to 2**24
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        elif optim.momentum:
            state["momentum_buffer"] = torch.zeros_like(param)


def optimized_parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """All parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, optim: Optim) -> float:
    """Learning rate of a step (1 is the first): linear warm-up, then the schedule, then its end.

    Needs resolved settings. The warm-up reaches the peak at step ``warmup_steps``; the decay
    reaches ``min_lr_ratio`` of the peak at step ``decay_steps`` and stays there.
    """
    peak, warmup, end = float(optim.lr), int(optim.warmup_steps), int(optim.decay_steps)
    if step <= warmup:
        return peak * step / warmup
    if optim.schedule == "constant":
        return peak
    done = 1.0 if end <= warmup else min(1.0, (step - warmup) / (end - warmup))
    share = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)

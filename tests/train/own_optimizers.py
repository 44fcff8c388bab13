"""Optimizers of the user's own that tests name in recipes: usable ones, and mistakes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Params = Iterable[nn.Parameter]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675; with a count of steps as a Python number."""

    def __init__(
        self, params: Params, lr: float, beta: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)

    def _step(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state["exp_avg"], state["count"] = torch.ones_like(param), 0
        state["count"] += 1
        direction = torch.lerp(param.grad, state["exp_avg"], group["beta"]).tanh()
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(direction / state["count"] ** 0.5, alpha=group["lr"])
        state["exp_avg"] = torch.lerp(state["exp_avg"], param.grad, 0.01)  # another tensor


class ByGroup(Lion):
    """Counts the steps of a group, and scales by it."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["beta"] = 1 - 1 / (group["k"] + 1)
        super().step(closure)


def slower_vectors(params: Params, lr: float, **settings: Any) -> Lion:
    """A factory with groups: vectors have a tenth of the rate."""
    params = list(params)
    groups: Any = [
        {"params": [each for each in params if each.dim() >= 2]},
        {"params": [each for each in params if each.dim() < 2], "lr": lr / 10},
    ]
    return Lion(groups, lr=lr, **settings)


class Normed(torch.optim.SGD):
    """Divides by the norm of a matrix, so it needs whole ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad /= param.grad.norm() + 1e-6
        super().step(closure)


class Hidden(torch.optim.SGD):
    """A mistake: a state outside of ``state``."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= self.steps
        super().step(closure)


class Noisy(torch.optim.SGD):
    """A mistake: noise without a seed."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad += torch.randn_like(param)
        super().step(closure)


class Evaluates(torch.optim.SGD):
    """A mistake: other weights in evaluations."""

    def eval(self) -> None:
        """Swap the weights."""


def half(params: Params, lr: float) -> torch.optim.Optimizer:
    """A mistake: only some of the parameters."""
    return torch.optim.SGD(list(params)[:1], lr=lr)


def nothing(params: Params, lr: float) -> None:
    """A mistake: no optimizer."""


def lists(params: Params, lr: float) -> torch.optim.Optimizer:
    """A mistake: a state that is no number and no tensor."""
    made = torch.optim.SGD(params, lr=lr)
    made.register_step_post_hook(_append)
    return made


def _append(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param].setdefault("losses", []).append(1.0)


def rising(step: float, steps: int) -> float:
    """A schedule: it rises to the peak by a tenth of it, then falls linearly to nothing."""
    return min(step / (steps / 10), (steps - step) / (steps * 0.9))


def negative(step: float, steps: int) -> float:
    """A mistake: no factor."""
    return (steps / 2 - step) / steps


class Counting:
    """A mistake: it counts its calls."""

    calls = 0

    def __call__(self, step: float, steps: int) -> float:  # noqa: ARG002
        self.calls += 1
        return 1 / self.calls


counting = Counting()

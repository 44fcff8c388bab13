"""Forms of the states that an optimizer of the user's own holds of a parameter.

Such an optimizer makes its states at its first step. A checkpoint needs tensors before that, and
only tensors. So each state has a tensor that is saved: the optimizer's own where it has the form of
the parameter, else one of a single number.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GROUP = "group_"
"""Prefix of the states that are numbers of a parameter's group, and change from step to step."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of one state."""

    is_like_param: bool
    """Whether it has the shape of the parameter, and so is split as that is."""
    dtype: torch.dtype
    device: torch.device
    """Device of a state of one number; others are where the parameter is."""
    shape: tuple[int, ...] = ()
    """Shape of a tensor of one number, as the optimizer holds it."""
    number: type[int | float | bool] | None = None
    """Type of a Python number; None: it is a tensor."""

    def zeros(self, param: Tensor) -> Tensor:
        """Return the tensor that is saved, before the first step."""
        if self.is_like_param:
            return torch.zeros_like(param, dtype=self.dtype, requires_grad=False)
        return torch.zeros((), dtype=self.dtype, device=self.device)

    def restored(self, saved: Tensor) -> Any:
        """The state that the optimizer takes, with the value of a tensor that was saved."""
        if self.is_like_param:
            return saved
        if self.number is not None:
            return self.number(saved.item())
        return saved.clone().reshape(self.shape)


Forms = Mapping[str, Form]
"""Name of a state -> its form."""


def form_of(value: Any, param: Tensor) -> Form | None:
    """Return the form of a state; None: it can be neither split nor saved."""
    if isinstance(value, bool | int | float):
        # fp64 holds every integer up to 2**53
        return Form(
            is_like_param=False, dtype=torch.float64, device=torch.device("cpu"), number=type(value)
        )
    if not isinstance(value, Tensor):
        return None
    if value.shape == param.shape:
        return Form(is_like_param=True, dtype=value.dtype, device=value.device)
    if value.numel() == 1:
        return Form(
            is_like_param=False, dtype=value.dtype, device=value.device, shape=tuple(value.shape)
        )
    return None


def states_of(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, group_keys: Collection[str]
) -> dict[str, Any]:
    """States that an optimizer holds of a parameter now, by name.

    Args:
        group_keys: Keys of a group that belong to its state.
    """
    held = {str(key): each for key, each in optimizer.state.get(param, {}).items()}
    group = group_of(optimizer, param) if group_keys else {}
    of_group = {f"{GROUP}{key}": group[key] for key in group_keys if key in group}
    return {key: each for key, each in {**held, **of_group}.items() if each is not None}


def give(optimizer: torch.optim.Optimizer, param: nn.Parameter, states: Mapping[str, Any]) -> None:
    """Give an optimizer the states of a parameter, as ``states_of`` returned them."""
    group = group_of(optimizer, param)
    for key, value in states.items():
        if key.startswith(GROUP):
            group[key.removeprefix(GROUP)] = value
        else:
            optimizer.state[param][key] = value


def group_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """The group of a parameter."""
    for group in optimizer.param_groups:
        if any(each is param for each in group["params"]):
            return group
    raise LookupError("the parameter is in no group")

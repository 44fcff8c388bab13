"""torch's own ``clip_grad_norm_`` for a model whose parameters are on several meshes.

Experts of ep are sharded over fewer ranks than the rest, and a rank of pp holds one stage: torch
ends with an error for the first, and takes the norm of one stage for that of all in the second.
"""

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.library.model import sharded
from shardyard.library.step import clip_gradients

_TORCHS: Any = torch.nn.utils.clip_grad_norm_
_models: "WeakSet[nn.Module]" = WeakSet()


def replace_clip_grad_norm(model: nn.Module) -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` take the norm over all ranks for this model.

    The function is replaced in every module that has it by name, so that the script stays.
    """
    _models.add(model)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("clip_grad_norm_") is _TORCHS:
            module.clip_grad_norm_ = _clip  # type: ignore[attr-defined]


@wraps(_TORCHS)
def _clip(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    model = next((each for each in _models if _holds(each, given)), None)
    if model is None:
        norm: Tensor = _TORCHS(given, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm
    if norm_type != 2.0 or len({*given}) < len(sharded(model).params):
        raise RequestError(
            f"clip_grad_norm_ of {len({*given})} of {len(sharded(model).params)} parameters of a "
            f"{type(model).__name__} with norm_type={norm_type}, whose experts or stages are on "
            "other ranks. Clip all of them by norm 2: clip_grad_norm_(model.parameters(), 1.0)."
        )
    norm = clip_gradients(model, max_norm)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the total norm of gradients is {float(norm)}, and cannot be clipped")
    return norm.float()


def _holds(model: nn.Module, parameters: list[Tensor]) -> bool:
    known = {*sharded(model).params.values()}
    return any(param in known for param in parameters)

"""Adapters (LoRA): two narrow trained matrices next to one that is not trained.

The two matrices are modules inside of their target, under PEFT's names, and a hook on the
target adds their output. The target stays a plain module. Code that splits, recomputes or
shards it therefore needs no knowledge of adapters, and parameters have the names that
PEFT's files have.

Shape suffixes: B = samples, l = tokens, I = inputs of the target, R = rank, O = its
outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Lora
from shardyard.families.lora import A, B, scale_of, targets_of
from shardyard.families.shape import ModelShape
from shardyard.models.local_shard import local_shard
from shardyard.models.random import Dropout, SampleKeys

_HOOK = "adapter"


class Adapter:
    """A forward hook of a target: adds scale B A x to what it returns."""

    def __init__(self, name: str, scale: float) -> None:
        self.name = name
        """The target's, from the top of the model."""
        self._scale = scale
        self.dropout: Dropout | None = None
        """Dropout of the input of A. None: no dropout."""
        self.input: Callable[[], Tensor] | None = None
        """Input of A where it differs from the target's: this rank's tokens. None: the same."""
        self.between: Callable[[Tensor], Tensor] | None = None
        """From what A returns to what B multiplies, where ranks meet between them."""

    def __call__(self, target: nn.Module, args: tuple[Any, ...], output_BlO: Tensor) -> Tensor:
        x_BlI = args[0] if self.input is None else self.input()
        if self.dropout is not None and target.training:
            x_BlI = self.dropout.mask(x_BlI)
        x_BlR = target.get_submodule(A)(x_BlI)
        if self.between is not None:
            x_BlR = self.between(x_BlR)
        added_BlO: Tensor = target.get_submodule(B)(x_BlR)
        return output_BlO + added_BlO * self._scale


def add_adapters(model: nn.Module, shape: ModelShape, lora: Lora) -> None:
    """Add an adapter to each matrix that ``model.lora`` names, in place and on its device."""
    assert lora.rank is not None
    scale = scale_of(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
    for targets in targets_of(shape, lora.targets).values():
        for name in (target.module for target in targets):
            target = model.get_submodule(name)
            assert isinstance(target, nn.Linear), name
            with torch.device(target.weight.device):
                # Trained in fp32, although the frozen target may be in a 16-bit format.
                down = nn.Linear(target.in_features, lora.rank, bias=False, dtype=torch.float32)
                up = nn.Linear(lora.rank, target.out_features, bias=False, dtype=torch.float32)
            target.add_module(A, down)
            target.add_module(B, up)
            adapter = Adapter(name, scale)
            target.register_forward_hook(adapter)
            setattr(target, _HOOK, adapter)


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Parameters of all adapters of a model; 0 where it has none."""
    rank = lora.rank or 0
    targets = targets_of(shape, lora.targets).values()
    return sum(sum(each.elements(shape, rank)) for found in targets for each in found)


def add_adapter_dropout(model: nn.Module, drop: float, *, seed: int, keys: SampleKeys) -> None:
    """Drop a share of each adapter's input. Call it once tp has split the adapters."""
    for target in model.modules():
        adapter = adapter_of(target)
        if adapter is None:
            continue
        down = local_shard(target.get_parameter(f"{A}.weight"))
        first, width = down.offsets[1], down.whole_shape[1]
        part = None if down.tensor.shape[1] == width else (first, width)
        place = f"{adapter.name}.{A}"
        adapter.dropout = Dropout(place, drop=drop, seed=seed, keys=keys, part=part)


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter of a matrix. None if it has none."""
    adapter: Adapter | None = getattr(module, _HOOK, None)
    return adapter

"""Models, inputs and losses of torch's own tests of DistributedDataParallel and FSDP, by name.

They are imported from the installed torch's test package, inside the ranks: it takes seconds.
"""

import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A model of torch's tests, and a step of it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    """Of a step on a rank; its seed is set already."""
    loss: Callable[[Any, Inputs], Tensor] = lambda out, _inputs: out.sum()
    is_mean: bool = False
    """Of samples; else it is their sum."""
    has_union: bool = True
    """Whether one process may compute all ranks' samples at once."""
    rejected: str = ""
    """What wrap() says in every layout."""
    rejected_sharded: str = ""
    """What wrap() says where ranks share the parameters."""


def _of(name: str) -> Any:
    """A module of torch's test package, which wants ``expecttest`` for classes that stay unused."""
    os.environ.setdefault("BACKEND", "gloo")
    if "expecttest" not in sys.modules:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    return importlib.import_module(f"torch.testing._internal.{name}")


def _ddp(name: str, *args: Any, **settings: Any) -> Any:
    return getattr(_of("distributed.distributed_test"), name)(*args, **settings)


def _fsdp(name: str, *args: Any, **settings: Any) -> Any:
    return getattr(_of("common_fsdp"), name)(*args, **settings)


def _dtensor(name: str, *args: Any, **settings: Any) -> Any:
    return getattr(_of("distributed._tensor.common_dtensor"), name)(*args, **settings)


def _composable(name: str) -> Any:
    return getattr(_of("common_dist_composable"), name)(torch.device("cpu"))


def _of_mode(name: str, **settings: Any) -> Any:
    """A model of FSDP's tests without FSDP, on the CPU."""
    fsdp = _of("common_fsdp")
    return getattr(fsdp, name).init(
        group=dist.group.WORLD,
        fsdp_init_mode=fsdp.FSDPInitMode.NO_FSDP,
        device_init_mode=fsdp.DEVICEInitMode.DEVICE_NEVER,
        deterministic=True,
        **settings,
    )


def _delayed() -> Any:
    fsdp = _of("common_fsdp")
    return fsdp.NestedWrappedModuleWithDelay.init(
        group=dist.group.WORLD,
        fsdp_init_mode=fsdp.FSDPInitMode.NO_FSDP,
        device_init_mode=fsdp.DEVICEInitMode.DEVICE_NEVER,
        deterministic=True,
        delay_after_loss_ms=1,
    )


def _transformer(**settings: Any) -> Any:
    args = _dtensor("ModelArgs", dropout_p=0.0, **settings)
    return _dtensor("Transformer", args)


def _normal(*sizes: int) -> Callable[[int, int], Inputs]:
    return lambda _step, _rank: (torch.randn(sizes),)


def _tokens(_step: int, _rank: int) -> Inputs:
    return (torch.randint(0, 8, (4, 16)),)


def _texts(_step: int, _rank: int) -> Inputs:
    """Of the model with shared parameters: (tokens, samples)."""
    return torch.randint(0, 23, (6, 2)), torch.randint(0, 23, (4, 2))


def _ones_or_not(is_same: bool) -> Callable[[int, int], Inputs]:
    """Ones let the model of control flow use its second layer."""

    def inputs(step: int, rank: int) -> Inputs:
        is_ones = step % 2 == 0 if is_same else (step + rank) % 2 == 0
        return (torch.ones(20, 10) if is_ones else torch.rand(20, 10),)

    return inputs


def _to_targets(out: Tensor, inputs: Inputs) -> Tensor:
    return nn.functional.mse_loss(out, inputs[0].repeat(1, 2))


def _of_texts(out: Tensor, inputs: Inputs) -> Tensor:
    target: Tensor = inputs[1]
    return nn.functional.cross_entropy(out.view(-1, out.size(-1)), target.view(-1), reduction="sum")


def _both(out: Any, _inputs: Inputs) -> Tensor:
    found: Tensor = out[0].sum() + out[1].sum()
    return found


def _first(out: Any, _inputs: Inputs) -> Tensor:
    found: Tensor = out[0].mean()
    return found


def _mean_square(out: Tensor, _inputs: Inputs) -> Tensor:
    return out.square().mean()


_NORM = "is a batch normalisation: each rank keeps running statistics of its own samples"
_OTHER = "rank 1 has built another model than rank 0"

CASES: dict[str, Case] = {
    # distributed_test.py
    "Net": Case(lambda: _ddp("Net"), _normal(4, 2), _to_targets, is_mean=True),
    "LargeNet": Case(lambda: _ddp("LargeNet"), _normal(2, 1000), lambda out, _: out.mean(), True),
    "Task": Case(
        lambda: _ddp("Task"), lambda step, rank: (torch.ones(2, 2) * (rank + step),),
        has_union=False,
    ),
    "BatchNormNet": Case(
        lambda: _ddp("BatchNormNet"), _normal(4, 2), _to_targets, True, has_union=False,
        rejected_sharded=_NORM,
    ),
    "BatchNormNet without affine": Case(
        lambda: _ddp("BatchNormNet", affine=False), _normal(4, 2), _to_targets, True,
        has_union=False, rejected_sharded=_NORM,
    ),
    "UnusedParamTwoLinLayerNet": Case(
        lambda: _ddp("UnusedParamTwoLinLayerNet"), _normal(6, 10), _both
    ),
    "DictOutputModule": Case(
        lambda: _ddp("DictOutputModule"), _normal(6, 10), lambda out, _: out["loss"]
    ),
    "TwoLinLayerNet": Case(lambda: _ddp("TwoLinLayerNet"), _normal(6, 10), _both),
    "TwoLinLayerNet, one output unused": Case(
        lambda: _ddp("TwoLinLayerNet"), _normal(6, 10), _first, True
    ),
    "EmbeddingNetDifferentParams": Case(
        lambda: _ddp("EmbeddingNetDifferentParams", dist.get_rank()),
        lambda _step, _rank: (torch.randint(0, 10, (4,)),), rejected=_OTHER,
    ),
    "EmbeddingNetDifferentParams, one more": Case(
        lambda: _ddp("EmbeddingNetDifferentParams", 0, diff_num_params=dist.get_rank() == 1),
        lambda _step, _rank: (torch.randint(0, 10, (4,)),), rejected=_OTHER,
    ),
    "ControlFlowToyModel, ranks alike": Case(
        lambda: _ddp("ControlFlowToyModel"), _ones_or_not(True), has_union=False
    ),
    "ControlFlowToyModel, ranks apart": Case(
        lambda: _ddp("ControlFlowToyModel"), _ones_or_not(False), has_union=False
    ),
    "NetWithBuffers": Case(
        lambda: _ddp("NetWithBuffers"), _normal(4, 10), lambda out, _: out.mean(), True
    ),
    # common_fsdp.py
    "TransformerWithSharedParams": Case(
        lambda: _of_mode("TransformerWithSharedParams", add_bn=False), _texts, _of_texts,
        has_union=False,  # samples are its second dimension
    ),
    "TransformerWithSharedParams, with a norm": Case(
        lambda: _of_mode("TransformerWithSharedParams", add_bn=True), _texts, _of_texts,
        has_union=False, rejected_sharded=_NORM,
    ),
    "NestedWrappedModule": Case(lambda: _of_mode("NestedWrappedModule"), _normal(4, 8)),
    "AlwaysWrapNestedWrappedModule": Case(
        lambda: _of_mode("AlwaysWrapNestedWrappedModule"), _normal(4, 8)
    ),
    "NonUniformReqGradNWM": Case(lambda: _of_mode("NonUniformReqGradNWM"), _normal(4, 8)),
    "NestedWrappedModuleWithDelay": Case(_delayed, _normal(4, 8)),
    "MixtureOfExperts": Case(lambda: _of_mode("MixtureOfExperts"), _normal(4, 8), has_union=False),
    "DummyDDP": Case(lambda: _fsdp("DummyDDP", _fsdp("MLP", 8)), _normal(4, 8)),
    "MLP": Case(lambda: _fsdp("MLP", 16), _normal(4, 16)),
    "MLP without bias": Case(lambda: _fsdp("MLP", 16, bias=False), _normal(4, 16)),
    "MLP with a buffer": Case(lambda: _fsdp("MLP", 16, with_buffer=True), _normal(4, 16)),
    "MLPStack": Case(lambda: _fsdp("MLPStack", 10), _normal(4, 10)),
    "MLPStack with a norm": Case(
        lambda: _fsdp("MLPStack", 10, with_seq_parallel=True), _normal(4, 10),
        lambda out, _: out.square().sum(),
    ),
    "DoubleLinear": Case(lambda: _fsdp("DoubleLinear", 9), _normal(4, 9), _both),
    "DoubleLinear, one unused": Case(
        lambda: _fsdp("DoubleLinear", 9, use_second_linear=False), _normal(4, 9)
    ),
    "SkipModel": Case(lambda: _fsdp("SkipModel", False), _normal(4, 10)),
    "SkipModel, nested": Case(lambda: _fsdp("SkipModel", True), _normal(4, 10)),
    # common_dist_composable.py
    "UnitModule": Case(lambda: _composable("UnitModule"), _normal(2, 100)),
    "CompositeModel": Case(lambda: _composable("CompositeModel"), _normal(2, 100)),
    "UnitParamModule": Case(lambda: _composable("UnitParamModule"), _normal(2, 100)),
    "CompositeParamModel": Case(lambda: _composable("CompositeParamModel"), _normal(2, 100)),
    # common_dtensor.py
    "MLPModule": Case(lambda: _dtensor("MLPModule", "cpu"), _normal(4, 10)),
    "MLPStacked": Case(lambda: _dtensor("MLPStacked", "cpu"), _normal(4, 10)),
    "RMSNormPython": Case(
        lambda: nn.Sequential(nn.Linear(10, 6), _dtensor("RMSNormPython", 6)), _normal(4, 10)
    ),
    "Transformer": Case(_transformer, _tokens, _mean_square, True),
    "Transformer, untied": Case(
        lambda: _transformer(weight_tying=False), _tokens, _mean_square, True
    ),
    "Transformer, checkpointed": Case(
        lambda: _transformer(checkpoint_activations=True), _tokens,
        _mean_square, True,
    ),
    "Transformer of experts": Case(
        lambda: _transformer(num_experts=4), _tokens, _mean_square, True
    ),
    # common_pruning.py, common_distributed.py
    "LSTMLinearModel": Case(
        lambda: _of("common_pruning").LSTMLinearModel(6, 8, 4, 2), _normal(5, 2, 6),
        lambda out, _: out[0].sum(), has_union=False,
    ),
    "LSTMLayerNormLinearModel": Case(
        lambda: _of("common_pruning").LSTMLayerNormLinearModel(6, 8, 4, 1), _normal(5, 2, 6),
        lambda out, _: out[0].square().sum(), has_union=False,
    ),
    "Conv2dPoolFlatten": Case(
        lambda: _of("common_pruning").Conv2dPoolFlatten(), _normal(2, 1, 28, 28)
    ),
    "SaveForwardInputsModel": Case(
        lambda: _of("common_distributed").SaveForwardInputsModel({}, False), _normal(2, 100)
    ),
}  # fmt: skip

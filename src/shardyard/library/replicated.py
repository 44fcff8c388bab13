"""Replication of the whole model: torch's DistributedDataParallel, but for its wrapper.

Every rank holds the model. The module stays itself: its parameters, their hooks and its
``state_dict()`` are what they were. So code that reads or writes them on only one rank
works. Only calls with gradients wait for other ranks.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from shardyard.errors import RequestError
from shardyard.torch_private import reducer_calls

_NAME = "_shardyard_replicas"


class Replicas:
    """Averages gradients of one module over all ranks, after each backward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0. All ranks call it together."""
        self._model = model
        self._trained: list[tuple[int, bool, torch.dtype]] = []
        self._reducer: DistributedDataParallel | None = None
        outside_graphs: Any = torch.compiler.disable
        self.pre_forward = outside_graphs(self._pre_forward)
        self.post_forward = outside_graphs(self._post_forward)
        self._refresh()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add up on this rank; the next one outside averages all of it."""
        return nullcontext() if self._reducer is None else self._reducer.no_sync()

    @property
    def joinable(self) -> DistributedDataParallel:
        """Return the object that ``torch.distributed.algorithms.Join`` needs.

        Raises:
            RequestError: There is only one rank, or every parameter is frozen.
        """
        if self._reducer is None:
            raise RequestError(
                "Join is for gradients that several ranks average, and here is one rank, or every "
                "parameter is frozen. Leave Join out."
            )
        return self._reducer

    def _pre_forward(self, args: Any, kwargs: Any) -> Any:
        """Arguments of a forward pass with gradients, once the reducer is ready for it."""
        self._refresh()
        if self._reducer is None:
            return args, kwargs
        return reducer_calls(self._reducer)[0](*args, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """The output whose loss the reducer follows, of a forward pass with gradients."""
        return output if self._reducer is None else reducer_calls(self._reducer)[1](output)

    def broadcast_buffers(self, *_args: Any) -> None:
        """Give every rank the buffers of rank 0, so that each may evaluate by itself."""
        if self._reducer is not None and any(True for _ in self._model.buffers()):
            reducer_calls(self._reducer)[2]()

    def _refresh(self) -> None:
        """Follow parameters that were frozen, freed, added or given another format."""
        params = list(self._model.parameters())
        if not all(isinstance(param, nn.Parameter) for param in params):
            return  # functional_call with tensors made of them, whose gradients come to them
        trained = [(id(param), param.requires_grad, param.dtype) for param in params]
        if trained == self._trained:
            return
        self._trained = trained
        self._reducer = None  # its hooks go before others come
        if dist.get_world_size() > 1 and any(is_trained for _, is_trained, _ in trained):
            self._reducer = DistributedDataParallel(
                _WithUnusedParameter(self._model), find_unused_parameters=True
            )


class _WithUnusedParameter(nn.Module):
    """A module and an unused parameter.

    Without one torch warns that no parameter was unused, on each rank, in the first step of
    most models.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))


class _Replicated:
    """First base of the class of a replicated module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class there was: a slice of a container makes one of its own."""
        return cls.__bases__[1](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():  # one rank may evaluate alone
            return call(*args, **kwargs)
        replicas = _replicas_of(self)
        args, kwargs = replicas.pre_forward(args, kwargs)
        return replicas.post_forward(call(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain module of its own, for averages of weights and teachers."""
        plain = object.__new__(_class_before(self))
        memo[id(self)] = plain
        kept = {key: value for key, value in vars(self).items() if not key.startswith("_shardyard")}
        plain.__dict__.update(copy.deepcopy(kept, memo))
        return plain

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """``torch.save(model)`` writes the plain module."""
        kept = {key: value for key, value in vars(self).items() if not key.startswith("_shardyard")}
        return object.__new__, (_class_before(self),), kept

    @property
    def _join_config(self) -> Any:
        return _replicas_of(self).joinable._join_config

    @_join_config.setter
    def _join_config(self, value: Any) -> None:
        _replicas_of(self).joinable._join_config = value

    @property
    def join_device(self) -> torch.device:
        device: torch.device = _replicas_of(self).joinable.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        return _replicas_of(self).joinable.join_process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook: JoinHook = _replicas_of(self).joinable.join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook


def replicate(model: nn.Module) -> Replicas:
    """Change the class of a module in place. All ranks call it together.

    Its name stays: transformers writes it into config.json.
    """
    replicas = Replicas(model)
    kind = type(model)
    attributes: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if not hasattr(model, "no_sync"):
        attributes["no_sync"] = lambda model: _replicas_of(model).no_sync()
    if not hasattr(model, "module"):
        attributes["module"] = property(_plain_view)
    setattr(model, _NAME, replicas)
    of_replicas: Any = type(kind.__name__, (_Replicated, kind), attributes)
    Joinable.register(of_replicas)  # a base of its own would change the layout of instances
    model.__class__ = of_replicas
    return replicas


def _plain_view(model: nn.Module) -> nn.Module:
    """Return the same module under the class it had; its calls do not wait for other ranks.

    It has its own parameters.
    """
    view: nn.Module = object.__new__(_class_before(model))
    object.__setattr__(view, "__dict__", model.__dict__)
    return view


def _class_before(model: Any) -> Any:
    """The class that a module had."""
    return type(model).__bases__[1]


def _replicas_of(model: Any) -> Replicas:
    replicas: Replicas = getattr(model, _NAME)
    return replicas

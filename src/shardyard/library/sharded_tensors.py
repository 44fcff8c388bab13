"""Operations of a script on sharded parameters, in a process whose model is sharded.

torch gives it a DTensor. A file of one would hold one rank's rows, ``.data = ...`` would change
nothing, random numbers would be the same on every rank, and tensors of the whole shape would not
fit. The methods are replaced on the class: torch names no other place where a script meets them.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from shardyard.errors import RequestError

GATHER = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)
_DRAWN = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "bernoulli_")
_WRITTEN = (
    "copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_",
    "__iadd__", "__isub__", "__imul__", "__itruediv__",
)  # fmt: skip
_COMBINED = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "add", "sub", "mul", "div",
)  # fmt: skip


def guard_sharded_tensors() -> None:
    """Replace these methods of torch's DTensor in this process, once."""
    if hasattr(DTensor, "shardyard_guards"):
        return
    kind: Any = DTensor
    kind.shardyard_guards = True
    for name in ("item", "__float__", "__int__", "__bool__"):
        setattr(kind, name, _whole_numbers_only(getattr(kind, name)))
    for name in ("numpy", "tolist"):
        setattr(kind, name, _whole_only(getattr(kind, name)))
    for name in _DRAWN:
        setattr(kind, name, _drawn_whole(getattr(kind, name)))
    for name in _WRITTEN:
        setattr(kind, name, _with_rows(getattr(kind, name)))
    for name in _COMBINED:
        setattr(kind, name, _with_whole(getattr(kind, name)))
    kind.__reduce_ex__ = _refuse_file(kind.__reduce_ex__)
    blocks: Any = FSDPModule
    blocks.__reduce_ex__ = refuse_pickle
    kind.data = property(lambda param: Tensor.data.__get__(param), _write)  # type: ignore[attr-defined]
    torch.autograd.grad = _by_whole_parameters(torch.autograd.grad)
    average: Any = AveragedModel
    average.update_parameters = _of_such_parameters(average.update_parameters)


def place_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Hook of an optimizer: take what was saved of whole parameters, by each rank its rows."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    placed = dict(state["state"])
    for number, param in zip(numbers, params, strict=False):
        of_one = placed.get(number)
        if isinstance(param, DTensor) and isinstance(of_one, dict):
            placed[number] = {key: _rows(value, param) for key, value in of_one.items()}
    return {**state, "state": placed}


def _is_sharded(tensor: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in tensor.placements)


def _rows(value: Any, like: DTensor) -> Any:
    """Return this rank's part of a plain tensor that has the shape of the whole parameter."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    if value.dim() == 0:
        return value
    kinds = {type(placement) for placement in like.placements}
    if not kinds <= {Shard, Replicate}:
        raise RequestError(
            f"a tensor of shape {tuple(value.shape)} does not fit what a rank has of this "
            "parameter, which is split twice. Give wrap() the model with its values."
        )
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _whole_numbers_only(whole: Any) -> Any:
    """``grad.norm().item()`` of a sharded gradient is this rank's share in torch.

    Adding it up here would wait for ever where one rank alone logs it.
    """

    @wraps(whole)
    def number(self: DTensor) -> Any:
        if any(placement.is_partial() for placement in self.placements):
            raise RequestError(
                "this number would be one rank's share: the parameters are sharded, and a norm, "
                "sum or maximum of them is not added up yet. Let all ranks call full_tensor() on "
                "it first, as in grad.norm().full_tensor().item()."
            )
        return whole(self)

    return number


def _whole_only(read: Any) -> Any:
    @wraps(read)
    def numbers(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if _is_sharded(self):
            raise RequestError(
                f"this tensor of shape {tuple(self.shape)} is sharded, and {read.__name__}() has "
                "one rank's part. Let all ranks call full_tensor() first, as in "
                f"param.full_tensor().{read.__name__}()."
            )
        return read(self.to_local().detach(), *args, **kwargs)

    return numbers


def _refuse_file(reduce: Any) -> Any:
    @wraps(reduce)
    def refuse(self: DTensor, protocol: Any) -> Any:
        if not _is_sharded(self):
            return reduce(self, protocol)
        raise RequestError(
            f"a file of this tensor of shape {tuple(self.shape)} holds one rank's shard of it, and "
            f"would lack the rest. Let all ranks call {GATHER} and save what rank 0 gets "
            "(get_optimizer_state_dict(model, optimizer, options=...) for the optimizer), or use "
            "shardyard.save_checkpoint(folder, model, optimizer, step=step)."
        )

    return refuse


def refuse_pickle(module: Any, _protocol: Any) -> NoReturn:
    """Method of a sharded module, and of a block of one."""
    ranks = torch.distributed.get_world_size()
    name = type(module).__name__.removeprefix("FSDP")  # of a block
    raise RequestError(
        f"a file of this {name} would hold one rank's shard of it. Let all ranks call {GATHER} and "
        "save what rank 0 gets, or let each rank hold the whole model: "
        f"SHARDYARD_PARALLEL=dp_replicate={ranks},dp_shard=1"
    )


def _drawn_whole(draw: Any) -> Any:
    """Each rank draws the whole tensor, as it does unsharded, and keeps its rows."""

    @wraps(draw)
    def drawn(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if any(placement.is_partial() for placement in self.placements):
            return draw(self, *args, **kwargs)
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.copy_(getattr(whole, draw.__name__)(*args, **kwargs))

    return drawn


def _with_rows(write: Any) -> Any:
    @wraps(write)
    def written(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return write(self, *(_rows(each, self) for each in args), **kwargs)

    return written


def _with_whole(combine: Any) -> Any:
    """A loss and a norm of parameters, or parameters and what they were once."""

    @wraps(combine)
    def combined(self: DTensor, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, DTensor) and isinstance(other, Tensor):
            if isinstance(other, DTensor):
                return combine(self, other, *args, **kwargs)
            if self.dim() == 0:
                method = getattr(Tensor, combine.__name__)
                return method(self.full_tensor(), other, *args, **kwargs)
            if not other.requires_grad:
                other = _rows(other, self)
        return combine(self, other, *args, **kwargs)

    return combined


@torch.no_grad()
def _write(param: DTensor, value: Tensor) -> None:
    """``param.data = value``: torch would keep the numbers that the rank has."""
    if value.shape != param.shape or value.dtype != param.dtype:
        raise RequestError(
            f"param.data = ... of shape {tuple(value.shape)}, {value.dtype}, and this sharded "
            f"parameter is of {tuple(param.shape)}, {param.dtype}. Change its shape or format "
            "before wrap()."
        )
    if isinstance(value, DTensor):
        value = value.redistribute(placements=param.placements)
    Tensor.data.__get__(param).copy_(value)  # type: ignore[attr-defined]


def _by_whole_parameters(grad: Any) -> Callable[..., Any]:
    @wraps(grad)
    def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given: Sequence[Any] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        sharded = any(isinstance(each, DTensor) for each in given)
        if not sharded:
            return grad(outputs, inputs, *args, **kwargs)
        try:
            found = grad(outputs, given, *args, **kwargs)
        except RuntimeError as error:
            _refuse_gradient(error)
        if any(
            each is None and isinstance(of, DTensor) for each, of in zip(found, given, strict=True)
        ):
            _refuse_gradient(None)
        return found

    return checked


def _refuse_gradient(error: BaseException | None) -> NoReturn:
    ranks = torch.distributed.get_world_size()
    raise RequestError(
        "torch.autograd.grad by parameters of a sharded model: a forward pass uses gathered "
        "parameters, which are other tensors. Call loss.backward() and read param.grad, or let "
        f"each rank hold the whole model: SHARDYARD_PARALLEL=dp_replicate={ranks},dp_shard=1"
    ) from error


def _of_such_parameters(update: Any) -> Any:
    @wraps(update)
    def updated(self: AveragedModel, model: Any) -> Any:
        pairs = zip(self.parameters(), model.parameters(), strict=False)
        if any(isinstance(of, DTensor) and not isinstance(mean, DTensor) for mean, of in pairs):
            ranks = torch.distributed.get_world_size()
            raise RequestError(
                "this AveragedModel was made before wrap(), of whole parameters, and the model is "
                "sharded. After wrap() keep averages = [p.detach().clone() for p in "
                "model.parameters()], and update them by a.lerp_(p.detach(), 1 - decay), or let "
                "each rank hold the whole model: "
                f"SHARDYARD_PARALLEL=dp_replicate={ranks},dp_shard=1"
            )
        return update(self, model)

    return updated

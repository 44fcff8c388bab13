"""The optimizer over this rank's shards, and its state from the first step on.

What an optimizer does with a step is in ``train/optimizers/``: one class each. Its state is fp32
there. State that is held in bf16 is made fp32 for the update, some parameters at a time, and
rounded to the nearest again after it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardyard.config.optimizers import (
    UNAVERAGED,
    evaluation_share,
    optimizer_of,
    param_kind,
    shape_of_state,
    states_of,
)
from shardyard.config.schema.recipe import Optim
from shardyard.errors import RequestError
from shardyard.models.batch_norm import batch_norms_in
from shardyard.models.local_shard import parameter_of
from shardyard.parallel.gradients import ParamNorms, local_part, placed_like, square_sum
from shardyard.parallel.low_precision import DTYPES, LowPrecisionCopies
from shardyard.torch_private import foreach_copy_
from shardyard.train.optimizer_offload import GRADIENT, MOVED_ELEMENTS, WEIGHT, StatesOnHost
from shardyard.train.optimizers import (
    KeepsStates,
    MakeUpdate,
    State,
    Update,
    make_one_pass,
    make_update,
)

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
        tied_across_stages: Collection[str] = (),
        names: Collection[str] | None = None,
        widened_elements: int = _WIDENED_ELEMENTS,
        on_host: StatesOnHost | None = None,
        moved_elements: int = MOVED_ELEMENTS,
        wrap_update: Callable[[Mapping[str, nn.Parameter], MakeUpdate], Update] | None = None,
        copies: LowPrecisionCopies | None = None,
    ) -> None:
        """Take a model that has its storage. Matrices decay, norms and biases do not; what is
        frozen has no state.

        Args:
            states: Format in which averages are held, as precision.optimizer_states.
            tied_across_stages: Names of parameters that two pipeline stages hold, with equal
                gradients.
            names: Names of the parameters of all stages; None: there is one stage.
            widened_elements: Most parameters whose bf16 averages are fp32 at the same time.
            on_host: What moves the state, or also the weights, to the device and back; None: all
                is there.
            moved_elements: Most parameters whose state moves together.
            wrap_update: From shards, and what makes an update of such, to an update of the shards:
                in what pieces the optimizer gets them; None: as they are.
            copies: What one rank computes with; None: it computes with its weights.
        """
        _check_running_statistics(model, optim)
        self._tied_across_stages = frozenset(tied_across_stages)
        # Taken once: after a forward pass without a backward pass FSDP shows gathered parameters
        # under the same names.
        self._params = dict(model.named_parameters())
        self._shards = {
            name: parameter_of(local_part(param.detach()), param)
            for name, param in self._params.items()
            if param.requires_grad
        }
        self._optim = optim
        norms = ParamNorms(self._params, names=names, tied_across_stages=self._tied_across_stages)
        make = partial(make_update, optim=optim, norms=norms)
        self._copies = copies
        one_pass = None
        if copies is not None:
            one_pass = make_one_pass(self._shards, optim, copies.tensors())
        self._writes_copies = one_pass is not None
        if one_pass is not None:
            self._update = one_pass
        else:
            self._update = (
                make(self._shards) if wrap_update is None else wrap_update(self._shards, make)
            )
        dtype = DTYPES[states]
        self._on_host = on_host
        if isinstance(self._update, KeepsStates):
            self._saved_states: Mapping[str, State] = self._update.states
            self._states: dict[str, State] = {name: {} for name in self._shards}
        else:
            self._states = {
                name: _zero_state(name, shard, optim, dtype, on_host)
                for name, shard in self._shards.items()
            }
            self._saved_states = self._states
        limit = self._update.most_elements
        if dtype != torch.float32:
            limit = min(limit, widened_elements)
        if on_host is not None:
            limit = min(limit, moved_elements)
        self._parts = list(_parts(self._shards, limit))

    @torch.no_grad()
    def begin(self) -> None:
        """Begin from the weights as they now are: states that are other weights equal them."""
        for name, state in self._states.items():
            weight = local_part(self._params[name].detach())
            for each in states_of(self._optim, param_kind(name, weight.dim())):
                if each.is_weight:
                    state[each.name].copy_(weight)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The model has the weights that are evaluated and exported meanwhile.

        Those that are trained wait in memory that gradients have during a step, and come back bit
        for bit.
        """
        share = evaluation_share(self._optim)
        if share is None:
            yield
            return
        self.synchronize()
        trained = {}
        with torch.no_grad():
            for name, state in self._states.items():
                weight = local_part(self._params[name].detach())
                trained[name] = weight.clone()
                weight.lerp_(state[UNAVERAGED].to(weight.device), share)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, kept in trained.items():
                    local_part(self._params[name].detach()).copy_(kept)

    def square_sum(self) -> Tensor:
        """This rank's share of the squared global norm of the gradients, fp64."""
        share = square_sum(self._params, tied_across_stages=self._tied_across_stages)
        return share if self._on_host is None else share.to(self._on_host.device)

    def gradients(self) -> list[Tensor]:
        """Return the existing gradients, undivided."""
        return [param.grad for param in self._params.values() if param.grad is not None]

    def _local_gradients(self) -> dict[str, Tensor]:
        named = ((name, self._params[name].grad) for name in self._shards)
        return {name: local_part(grad) for name, grad in named if grad is not None}

    def step(self, *, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Divide the gradients and apply them, or leave everything as it is where ``skip`` is 1.

        Both are decided on the device, without waiting for it. The gradients are gone afterwards.
        All ranks call it together.
        """
        self._update.begin(lr=lr, divisor=divisor, skip=skip, grads=self._local_gradients())
        if self._on_host is None:
            for names in self._parts:
                self._update_part(names, self._states)
        else:
            held = self._host_state() if self._on_host.with_weights else self._states
            for part, states in self._on_host.in_turn(self._parts, held):
                self._update_part(part, states)
        self._update.finish()
        if self._copies is not None:
            self._copies.mark(current=self._writes_copies)

    def synchronize(self) -> None:
        """Wait until state in host memory is that of the last step: before it is read there."""
        if self._on_host is not None:
            self._on_host.synchronize()

    def _update_part(self, names: Sequence[str], on_device: Mapping[str, State]) -> None:
        states: dict[str, State] = {}
        held, wide = [], []
        for name in names:
            param, shard = self._params[name], self._shards[name]
            states[name] = state = dict(on_device[name])
            shard.data = state.pop(WEIGHT, shard.data)
            gradient = None if param.grad is None else local_part(param.grad)
            shard.grad = state.pop(GRADIENT, gradient)
            param.grad = None
            for key, value in state.items():
                if value.dtype.itemsize < torch.float32.itemsize:
                    state[key] = torch.empty_like(value, dtype=torch.float32)
                    held.append(value)
                    wide.append(state[key])
        if held:
            foreach_copy_(wide, held)
        self._update.update(names, states)
        if held:
            foreach_copy_(held, wide)
        for name in names:  # where the weight lies between steps
            self._shards[name].data = local_part(self._params[name].detach())

    def _host_state(self) -> dict[str, State]:
        """State, weight and gradient of each."""
        held = {}
        # Made anew for each step, as the gradients are other tensors each time.
        for name in self._shards:
            param = self._params[name]
            held[name] = {**self._states[name], WEIGHT: local_part(param.detach())}
            if param.grad is not None:
                held[name][GRADIENT] = local_part(param.grad)
        return held

    def tensors(self) -> dict[str, Tensor]:
        """``model.<parameter>`` and ``optim.<state>.<parameter>``, sharing storage with both."""
        tensors: dict[str, Tensor] = {}
        for name, param in self._params.items():
            tensors[f"model.{name}"] = param.detach()
            states = states_of(self._optim, param_kind(name, param.dim()))
            forms = {each.name: each.form for each in states}
            for key, value in self._saved_states.get(name, {}).items():
                placed = placed_like(param, value, forms.get(key, "element"))
                tensors[f"optim.{key}.{name}"] = placed
        return tensors


def _check_running_statistics(model: nn.Module, optim: Optim) -> None:
    """Reject batch normalisation if other weights are evaluated than its statistics are of.

    Raises:
        RequestError: There is some.
    """
    norms = batch_norms_in(model) if evaluation_share(optim) is not None else {}
    if norms:
        raise RequestError(
            f"optim.name={optim.name} evaluates averaged weights, and running statistics of batch "
            f"normalisation ({next(iter(norms))}) are of the trained ones. Use optim.name=adamw "
            "with optim.ema_decay=0.9999."
        )


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


def _zero_state(
    name: str, shard: Tensor, optim: Optim, dtype: torch.dtype, on_host: StatesOnHost | None
) -> State:
    """The state before the first step, so that saving and loading never depend on one."""
    state = {
        each.name: shard.new_zeros(shape, requires_grad=False, dtype=held)
        if on_host is None
        else on_host.zeros(shape, held)
        for each in states_of(optim, param_kind(name, shard.dim()))
        for held in (torch.float32 if each.is_fp32 else dtype,)
        for shape in (shape_of_state(each.form, tuple(shard.shape)),)
    }
    # on the device, where a skip is decided
    device = shard.device if on_host is None else on_host.device
    if optimizer_of(optim).counts_steps:  # fp32 counts exactly to 2**24
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for each in optimizer_of(optim).sums:
        state[each] = torch.zeros((), dtype=torch.float64, device=device)
    return state


def inject_nan(tensors: Iterable[Tensor]) -> None:
    """Break the first of these that this rank holds a part of, for a drill."""
    for tensor in tensors:
        shard = local_part(tensor.detach())
        if shard.numel() and shard.is_floating_point():
            shard[(0,) * shard.dim()] = math.nan
            return


def flip_bit(tensors: Iterable[Tensor]) -> None:
    """Turn over one bit of the first of these that this rank holds a part of, for a drill."""
    for tensor in tensors:
        shard = local_part(tensor.detach())
        if shard.numel() and shard.is_floating_point():
            bytes_ = shard[(0,) * shard.dim()].reshape(1).view(torch.uint8)
            bytes_[-2] ^= 1 << 5  # of fp32 and bf16 the mantissa: finite before, finite after
            return

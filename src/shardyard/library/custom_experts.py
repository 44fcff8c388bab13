"""ep for lists of experts of one's own: each rank holds some, and all compute the same samples.

A call of an expert is a call on each rank of the group: the one that holds it computes, and sends
what it returns to the others. The backward pass sums the gradients of all ranks there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardyard import torch_private
from shardyard.errors import Problem, RequestError
from shardyard.library.model_group import divided_gradient
from shardyard.parallel.custom_module import names_matching
from shardyard.parallel.fsdp import Placement
from shardyard.parallel.mesh import Mesh
from shardyard.torch_private import tree_map

_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 8
_FAILED = -1


def read_experts(
    model: nn.Module, names: Sequence[str], *, ep: int
) -> tuple[dict[str, nn.ModuleList], list[Problem]]:
    """Lists of experts by name, and everything that is wrong with them.

    Args:
        names: Names of lists, or patterns of names (``layers.*.experts``).
    """
    named = {name: module for name, module in model.named_modules() if name}
    lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
    chosen: dict[str, nn.ModuleList] = {}
    found = []
    for pattern in names:
        matched = names_matching(pattern, named)
        if not matched:
            have = f"The model has {', '.join(lists[:6])}." if lists else "The model has none."
            found.append(Problem("experts", f"={pattern!r} names no nn.ModuleList. {have}"))
        for name in matched:
            module = named[name]
            if isinstance(module, nn.ModuleList):
                chosen[name] = module
                found += [
                    Problem("experts", text) for text in _expert_list_errors(name, module, ep)
                ]
            else:
                text = (
                    f"={pattern!r}: {name} is a {type(module).__name__}. Experts are the modules "
                    "of an nn.ModuleList, called one by one. Name the list."
                )
                found.append(Problem("experts", text))
    param_names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        param_names.setdefault(param, []).append(name)
    shared = [each for each in param_names.values() if len(each) > 1 and _is_in(each, chosen)]
    if shared:
        text = f"share a parameter: {' and '.join(shared[0])}. Ranks hold experts of their own."
        found.append(Problem("experts", text))
    return chosen, found


def _is_in(param_names: Sequence[str], lists: Mapping[str, nn.ModuleList]) -> bool:
    return any(place.startswith(f"{name}.") for place in param_names for name in lists)


def _expert_list_errors(name: str, experts: nn.ModuleList, ep: int) -> list[str]:
    """Why a list cannot be dealt over ranks."""
    number = len(experts)
    found = []
    if not number or number % ep:
        legal = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
        found.append(
            f"={name!r}: ep={ep} does not divide its {number} experts. Every rank holds equally "
            f"many. Use an ep of {', '.join(legal) or '1'}."
        )
    forms = [
        [(key, tuple(p.shape), str(p.dtype)) for key, p in each.named_parameters()]
        for each in experts
    ]
    other = next((index for index, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        apart = next((here for here in forms[other] if here not in forms[0]), f"not {forms[0][-1]}")
        found.append(
            f"={name!r}: expert {other} has {apart} and expert 0 has not. Experts of a list are "
            "alike in their parameters' names, shapes and formats."
        )
    buffer = next((key for key, _ in experts.named_buffers()), None)
    if buffer is not None:
        found.append(
            f"={name!r}: {buffer} is a buffer of an expert, which other ranks would not have. "
            "Keep it in a plain attribute, or outside of the list."
        )
    return found


def distribute_experts(
    lists: Mapping[str, nn.ModuleList], group: dist.ProcessGroup, *, control: dist.ProcessGroup
) -> set[nn.Parameter]:
    """Keep this rank's experts of each list, in place.

    Returns:
        Their parameters.
    """
    ranks = dist.get_process_group_ranks(group)
    local_params: set[nn.Parameter] = set()
    for name, experts in lists.items():
        each = len(experts) // len(ranks)
        for index, expert in enumerate(experts):
            owner = ranks[index // each]
            is_here = owner == dist.get_rank()
            call = _Call(
                f"{name}.{index}", expert.forward if is_here else None, owner, group, control
            )
            if is_here:
                local_params |= {*expert.parameters()}
                expert.forward = call
            else:
                experts[index] = _RemoteExpert(call)
    return local_params


def expert_placement(experts: set[nn.Parameter], mesh: Mesh) -> Placement:
    """Return how parameters are split: experts over fewer ranks than the rest."""
    of_mesh = torch_private.placement_on_mesh(mesh.sharding(of_experts=True))

    def placement(param: nn.Parameter) -> Any:
        return of_mesh(None) if param in experts else None

    return placement


class _RemoteExpert(nn.Module):
    """Placeholder in a list for an expert that another rank holds."""

    def __init__(self, call: "_Call") -> None:
        super().__init__()
        self.forward = call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            call = self.__dict__["forward"]
            raise AttributeError(
                f"{call.name} is on rank {call.owner}, and has no {name} here: ep spreads experts "
                "over ranks. A model may only call its experts."
            ) from None


class _Call:
    """The forward method of one expert, on each rank of its group."""

    def __init__(
        self, name: str, forward: Callable[..., Any] | None, owner: int, group: dist.ProcessGroup,
        control: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self.name = name
        self.owner = owner
        self._forward = forward
        self._group = group
        self._control = control
        self._ranks = dist.get_world_size(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the expert, a tensor."""
        if self._forward is not None:
            output = self._computed(self._forward, args, kwargs)
        else:
            output = self._empty_output(args, kwargs)
        # each rank has this node in its graph: the backward pass meets here too
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        sent: Tensor = _FromOwner.apply(output, anchor, self.owner, self._group)  # type: ignore[no-untyped-call]
        return sent

    def _computed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """On the rank that holds it; tells the others what comes.

        A gradient of its parameters is divided by the ranks of the group, each of which has added
        its loss; that of its inputs is whole.
        """
        form = torch.full((2 + _MOST_DIMENSIONS,), _FAILED)
        try:
            args, kwargs = tree_map(self._whole_gradient, (args, kwargs))
            output = forward(*args, **kwargs)
            if not isinstance(output, Tensor) or output.dtype not in _FORMATS:
                self._reject_output(output)
            form[0], form[1] = output.dim(), _FORMATS.index(output.dtype)
            form[2 : 2 + output.dim()] = torch.tensor(output.shape)
        finally:
            dist.broadcast(form, self.owner, group=self._control)
        return divided_gradient(output, self._ranks)

    def _whole_gradient(self, leaf: Any) -> Any:
        return divided_gradient(leaf, 1 / self._ranks) if isinstance(leaf, Tensor) else leaf

    def _reject_output(self, output: Any) -> NoReturn:
        raise RequestError(
            f"{self.name} returns {type(output).__name__}: an expert that ep deals over ranks "
            "returns one floating-point tensor."
        )

    def _empty_output(self, args: Any, kwargs: Any) -> Tensor:
        form = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64)
        dist.broadcast(form, self.owner, group=self._control)
        dimensions, place, *sizes = form.tolist()
        if dimensions == _FAILED:
            raise RequestError(f"{self.name} failed on rank {self.owner}; its own log says why.")
        device = next(x.device for x in torch_private.tree_leaves((args, kwargs)) if _is_tensor(x))
        return torch.empty(sizes[:dimensions], dtype=_FORMATS[place], device=device)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


class _FromOwner(torch.autograd.Function):
    """A tensor of one rank on all; its gradient is the sum of theirs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, owner: int, group: dist.ProcessGroup
    ) -> Tensor:
        del anchor
        ctx.owner, ctx.group = owner, group
        sent = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent, owner, group=group)
        return sent

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.reduce(total, ctx.owner, group=ctx.group)
        return (total if ctx.owner == dist.get_rank() else None), None, None, None

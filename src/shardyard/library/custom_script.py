"""Use of tp by a plan, or ep of lists of experts, in an unchanged script with its own model.

The script's ranks read samples of their own. Ranks that split the model first gather the
arguments of its calls. Each computes all samples of its group with its part of the model,
and gives back its own. Every rank's loss then counts: what a rank computes for others has
its gradient from them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from shardyard.config.layout import WHY_NOT, Layout
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.library.custom_experts import distribute_experts, expert_placement, read_experts
from shardyard.library.model_group import divided_gradient, group_of
from shardyard.library.model_parallel import generate_together
from shardyard.parallel.apply import shard_script
from shardyard.parallel.collectives import all_gather
from shardyard.parallel.custom_module import module_errors, read_plan, split_by_plan
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.rank_agreement import checksum_of
from shardyard.torch_private import tree_leaves, tree_map

Fact = tuple[tuple[int, ...], str, int]
"""Facts of a model's tensor argument: shape, format, and a checksum if it is alike on ranks."""
_ALIKE = -1


def shard_custom_script(
    model: nn.Module,
    mesh: Mesh,
    *,
    blocks: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    experts: Sequence[str],
) -> None:
    """Change a model in place that ``check_custom_script`` has found to fit."""
    layout = mesh.layout
    placement = None
    if layout.tp > 1:
        words, _ = read_plan(model, plan, tp=layout.tp)
        split_by_plan(model, mesh.dense["tp"], words)
    else:
        lists, _ = read_experts(model, experts, ep=layout.ep)
        group = mesh.group("ep")
        placement = expert_placement(
            distribute_experts(lists, group, control=group_of(group)), mesh
        )
    group = mesh.group("tp" if layout.tp > 1 else "ep")
    generate = getattr(model, "generate", None)
    if isinstance(model, PreTrainedModel) and generate is not None:
        model.generate = partial(generate_together, generate)
    # ranks of ep are among those over which gradients are averaged
    model.forward = JoinedForward(model.forward, group, divisor=layout.tp)
    shard_script(model, mesh, blocks=blocks, precision=MixedPrecisionPolicy(), placement=placement)


def check_custom_script(
    model: nn.Module,
    layout: Layout,
    *,
    blocks: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    experts: Sequence[str],
) -> None:
    """Check names and sizes, in every layout.

    Raises:
        RecipeError: Something does not fit; all that does not.
    """
    _, found = read_plan(model, plan, tp=layout.tp)
    found += read_experts(model, experts, ep=layout.ep)[1]
    for axis in ("cp", "pp"):
        degree = getattr(layout, axis)
        if degree > 1:
            text = f"={degree}: in a module of your own {WHY_NOT[axis]}. Use dp_shard, tp or ep."
            found.append(Problem(f"parallel.{axis}", text))
    if layout.tp > 1 and layout.ep > 1:
        text = f"={layout.ep} and tp={layout.tp}: a module of your own has one of them. Set one."
        found.append(Problem("parallel.ep", text))
    if layout.tp > 1 and not plan:
        text = (
            f"={layout.tp} but no plan says what it splits. Give plan=, for instance "
            '{"layers.*.up": "columns", "layers.*.down": "rows"}.'
        )
        found.append(Problem("parallel.tp", text))
    if layout.ep > 1 and not experts:
        text = (
            f"={layout.ep} but no list of experts is named. Give experts=, for instance "
            '"layers.*.experts".'
        )
        found.append(Problem("parallel.ep", text))
    if layout.tp > 1 or layout.ep > 1:
        found += module_errors(model, blocks, tp=layout.tp)
    dropouts = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if layout.ep > 1 and dropouts:
        text = (
            f"drops at {dropouts[0]}: the ranks of ep compute the same samples and would draw "
            "other masks for them. Set p=0, or use ep=1."
        )
        found.append(Problem("model", text))
    if found:
        raise RecipeError(found, "wrap()")


class JoinedForward:
    """A forward method that computes the samples of all ranks of a group, and returns its own."""

    def __init__(
        self, forward: Callable[..., Any], group: dist.ProcessGroup, *, divisor: int
    ) -> None:
        """Create the forward method. All ranks call it together.

        Args:
            divisor: Divisor of gradients, in addition to the ranks over which they are averaged.
        """
        self._forward = forward
        self._group = group
        self._divisor = divisor
        self._control = group_of(group)
        self._rank = dist.get_rank(group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. All ranks of the group call it together, alike."""
        rows, args, kwargs = self._gathered(args, kwargs)
        return self._own_rows(self._forward(*args, **kwargs), rows)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gathered(self, args: Any, kwargs: Any) -> tuple[list[int], Any, Any]:
        """Number of samples of each rank, and the arguments with the samples of all."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rows = self._rows(tensors)
        joined = iter(
            [self._joined(x, rows) if _is_of_samples(x, rows[self._rank]) else x for x in tensors]
        )
        args, kwargs = tree_map(
            lambda leaf: next(joined) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        return rows, args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _own_rows(self, output: Any, rows: Sequence[int]) -> Any:
        return tree_map(partial(self._own, rows=rows), output)

    def _rows(self, tensors: Sequence[Tensor]) -> list[int]:
        """Number of samples of each rank of the group.

        Raises:
            RequestError: The ranks' arguments do not go together.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RequestError(
                "the model is called with a tensor that needs a gradient. Ranks that split a model "
                "gather its arguments without gradients. Compute it inside the model, or train on "
                "the data axes: SHARDYARD_PARALLEL=dp_shard=N."
            )
        rows = next((len(x) for x in tensors if x.dim()), 0)
        signatures: list[Fact] = [
            (tuple(x.shape), str(x.dtype), _ALIKE if _is_of_samples(x, rows) else checksum_of(x))
            for x in tensors
        ]
        by_rank: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(by_rank, (rows, signatures), group=self._control)
        forms = [[_form(fact) for fact in found] for _, found in by_rank]
        if any(form != forms[0] for form in forms):
            shapes = [[fact[0] for fact in found] for _, found in by_rank]
            raise RequestError(
                f"ranks that split the model call it with arguments that do not go together: "
                f"shapes {shapes}. All give tensors with their samples first, of one size else "
                "(pad to one length), and the same values in a tensor that has no samples."
            )
        return [rows for rows, _ in by_rank]

    def _joined(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of all ranks."""
        pieces = x.detach().contiguous().view(len(x), -1).view(torch.uint8)
        padded = pieces.new_zeros(max(rows), pieces.shape[1])
        padded[: len(x)] = pieces
        each = all_gather(padded, 0, self._group).chunk(len(rows))
        found = torch.cat([piece[:number] for piece, number in zip(each, rows, strict=True)])
        return found.view(x.dtype).view(-1, *x.shape[1:])

    def _own(self, leaf: Any, rows: Sequence[int]) -> Any:
        """Return the part of an output from which the script computes its loss."""
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        first, total = sum(rows[: self._rank]), sum(rows)
        if not isinstance(leaf, Tensor) or (leaf.dim() and len(leaf) != total):
            found = f"a {type(leaf).__name__}"
            if isinstance(leaf, Tensor):
                found = f"a tensor of {tuple(leaf.shape)}"
            raise RequestError(
                f"the model returns {found} for {total} samples of its ranks. Each gets those of "
                "its own: return single numbers, or tensors with the samples first, also in "
                "tuples, lists and dicts (of transformers' models: use_cache=False)."
            )
        if leaf.dim():
            leaf = leaf[first : first + rows[self._rank]]
        return divided_gradient(leaf, self._divisor)


def _is_of_samples(x: Tensor, rows: int) -> bool:
    return x.dim() > 0 and len(x) == rows and x.numel() > 0


def _form(fact: Fact) -> tuple[Any, ...]:
    """Return the facts that must be the same on all ranks."""
    shape, dtype, checksum = fact
    return (shape[1:] if checksum == _ALIKE else shape, dtype, checksum)

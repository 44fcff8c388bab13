"""A module of the user's own: sharded block by block, and split over tp by a plan."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.library.known import request
from shardyard.parallel import apply
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.tensor_plan import names_matching, read_plan
from shardyard.tasks.base import Computation
from shardyard.tasks.own import Loss, OwnComputation

_OF_KNOWN_MODELS = {
    "cp": "attention would have to exchange keys and values, and where that is is not known",
    "pp": "where the model can be cut, and what passes there, is not known",
    "ep": "which of its tensors are experts, and how tokens reach them, is not known",
}
_OPTIONS = ("compile", "compute", "output", "prefetch", "recompute", "reduce")


def shard_own(
    model: nn.Module,
    mesh: Mesh,
    *,
    blocks: Sequence[str],
    plan: Mapping[str, str],
    options: Mapping[str, Any],
) -> "OwnModel":
    """Change a module in place.

    Raises:
        RecipeError: Axes, names or sizes that do not fit; all of them.
        RequestError: A setting is not for modules of one's own.
    """
    others = [name for name in options if name not in _OPTIONS]
    if others:
        raise RequestError(
            f"{others[0]} is for models of a known family; {type(model).__name__} is a module of "
            f"your own. It takes blocks, plan, {', '.join(_OPTIONS)}."
        )
    recipe = request(mesh, options, shape=None, seq_len=None)
    tp = mesh.layout.tp
    words, found = read_plan(model, plan, tp=tp)
    chosen, unmatched = _blocks(model, blocks)
    found += [*_axis_problems(mesh, plan), *unmatched, *_module_problems(model, chosen, tp=tp)]
    if found:
        raise RecipeError(found, "parallelize()")
    apply.parallelize_own(model, mesh, recipe=recipe, blocks=chosen, words=words)
    return OwnModel(model, mesh)


def _axis_problems(mesh: Mesh, plan: Mapping[str, str]) -> list[Problem]:
    found = []
    for axis, reason in _OF_KNOWN_MODELS.items():
        degree = getattr(mesh.layout, axis)
        if degree > 1:
            text = f"={degree}: in a module of your own {reason}. Use dp_replicate, dp_shard and tp"
            found.append(Problem(f"parallel.{axis}", f"{text}."))
    if mesh.layout.tp > 1 and not plan:
        text = (
            f"={mesh.layout.tp} but there is no plan of what it splits. Give plan=, for instance "
            '{"layers.*.up": "columns", "layers.*.down": "rows"}.'
        )
        found.append(Problem("parallel.tp", text))
    return found


def _blocks(model: nn.Module, names: Sequence[str]) -> tuple[dict[str, nn.Module], list[Problem]]:
    """Modules to shard one by one; a list of modules stands for those in it."""
    chosen: dict[str, nn.Module] = {}
    found = []
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in names:
        matched = names_matching(pattern, named)
        if not matched:
            lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
            have = lists or [name for name in named if "." not in name]
            text = f"={pattern!r} names no module. The model has {', '.join(have[:6])}."
            found.append(Problem("blocks", text))
        for name in matched:
            if isinstance(named[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
                inner = named[name].named_children()
                chosen |= {f"{name}.{child}": module for child, module in inner}
            else:
                chosen[name] = named[name]
    return chosen, found


def _module_problems(
    model: nn.Module, blocks: Mapping[str, nn.Module], *, tp: int
) -> list[Problem]:
    """What would go wrong in silence."""
    found = []
    if any(param.is_meta for param in model.parameters()):
        text = (
            "is on the meta device: how its weights begin only you know. Build it with its "
            "weights; each rank keeps its share, block by block."
        )
        found.append(Problem("model", text))
    dropouts = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if tp > 1 and dropouts:
        text = (
            f"drops at {dropouts[0]}: the ranks of tp compute the same tokens and would draw "
            "other masks for them. Set p=0, or use tp=1."
        )
        found.append(Problem("model", text))
    inward = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if tp > 1 and inward:
        text = (
            f"has {inward[0]}, an nn.MultiheadAttention: it uses the parameters of a module in it, "
            "which tp holds in parts. Use nn.Linear and scaled_dot_product_attention, or tp=1."
        )
        found.append(Problem("model", text))
    return found + _shared_parameters(model, blocks)


def _shared_parameters(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[Problem]:
    """A parameter in two groups would become two."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    found = []
    for places in names.values():
        homes = {next((b for b in blocks if place.startswith(f"{b}.")), "") for place in places}
        if len(homes) > 1:
            text = (
                f"keep {' and '.join(places)} apart, which are one parameter: as parts of two "
                "blocks they would be two. Leave their modules out of blocks."
            )
            found.append(Problem("blocks", text))
    nested = [b for b in blocks for other in blocks if b.startswith(f"{other}.")]
    if nested:
        found.append(Problem("blocks", f"name {nested[0]} and a module around it. Name one."))
    return found


class OwnModel:
    """Reads batches by the loss function that comes with each call."""

    held_twice: Collection[str] = ()

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[Computation[Any], Sequence[Any]]:
        """The batches as they are."""
        if loss is None:
            raise RequestError(
                f"what the loss of a {type(self._model).__name__} is, only you know. Give loss=, a "
                "function of (model, batch) that returns the sum of the losses and their number."
            )
        return OwnComputation(self._model, self._mesh, loss, said_by="loss="), batches

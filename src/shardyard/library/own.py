"""A module of the user's own: sharded block by block, and split over tp by a plan."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from shardyard.config.layout import WHY_NOT
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.library.supported import request
from shardyard.models.batch_norm import BatchNorms
from shardyard.parallel import apply
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.own_module import blocks_named, module_problems
from shardyard.parallel.tensor_plan import read_plan
from shardyard.tasks.custom import Loss, OwnComputation
from shardyard.tasks.loss_computation import Computation

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
    chosen, unmatched = blocks_named(model, blocks)
    found += [*_axis_problems(mesh, plan), *unmatched, *module_problems(model, chosen, tp=tp)]
    if found:
        raise RecipeError(found, "parallelize()")
    remedy = apply.REMEDY.format("build_mesh(zero=2)")
    norms = apply.parallelize_own(
        model, mesh, recipe=recipe, blocks=chosen, words=words, remedy=remedy
    )
    return OwnModel(model, mesh, norms)


def _axis_problems(mesh: Mesh, plan: Mapping[str, str]) -> list[Problem]:
    found = []
    for axis, reason in WHY_NOT.items():
        degree = 1 if axis == "tp" else getattr(mesh.layout, axis)  # a plan says how tp splits
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


class OwnModel:
    """Reads batches by the loss function that comes with each call."""

    held_twice: Collection[str] = ()

    def __init__(self, model: nn.Module, mesh: Mesh, norms: BatchNorms | None) -> None:
        self._model = model
        self._mesh = mesh
        self._norms = norms

    def read(
        self, batches: Sequence[Any], loss: Loss | None
    ) -> tuple[Computation[Any], Sequence[Any]]:
        """The batches as they are."""
        if loss is None:
            raise RequestError(
                f"what the loss of a {type(self._model).__name__} is, only you know. Give loss=, a "
                "function of (model, batch) that returns the sum of the losses and their number."
            )
        computation = OwnComputation(
            self._model, self._mesh, loss, said_by="loss=", norms=self._norms
        )
        return computation, batches

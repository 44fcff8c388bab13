"""Settings that a search may add where no layout fits the recipe as it is.

Only settings that the recipe's own check accepts are added: you can paste what a plan
prints.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardyard.config.layout import Layout
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.model import check_model
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.families.shape import ModelShape
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.dispatch import Model, work_of
from shardyard.planner.images.step import check_unplanned_settings
from shardyard.planner.layouts import Relief
from shardyard.planner.workload import Workload

_OFFLOAD = ("optimizer", "activations", "params")
_OPEN_AXES = (
    "parallel.strategy=null", "parallel.dp_shard=auto", "parallel.dp_replicate=auto",
    "parallel.zero=3",
)  # fmt: skip
"""Settings for weights on the host, which are gathered block by block: the search looks only
at zero 3.
"""


def reliefs_of(
    requested: Recipe,
    resolved: Recipe,
    model: Model,
    layout: Layout,
    cluster: ClusterHardware | None,
    *,
    chunks_by_rule: bool,
) -> tuple[Relief, ...]:
    """Offloads, and where a compiled block cannot be recomputed the same without compile.

    Args:
        requested: The recipe with what it leaves open.
        resolved: What it came to.
        layout: Of the step that is searched from.
        chunks_by_rule: Whether ``memory.loss_chunk`` is auto.
    """
    return _accepted(
        _tried(resolved), requested, resolved, model, layout, cluster, chunks_by_rule=chunks_by_rule
    )


def variants_of(
    requested: Recipe,
    resolved: Recipe,
    model: Model,
    layout: Layout,
    cluster: ClusterHardware | None,
    *,
    chunks_by_rule: bool,
) -> tuple[Relief, ...]:
    """Settings that may be faster, and change neither what is learnt nor how it is rounded.

    Layouts, micro-batch and recompute are searched anyway; what is left is compile.
    """
    compiled = str(resolved.model.compile is not True).lower()
    return _accepted(
        [(f"model.compile={compiled}",)], requested, resolved, model, layout, cluster,
        chunks_by_rule=chunks_by_rule,
    )  # fmt: skip


def _accepted(
    tried: Iterable[tuple[str, ...]],
    requested: Recipe,
    resolved: Recipe,
    model: Model,
    layout: Layout,
    cluster: ClusterHardware | None,
    *,
    chunks_by_rule: bool,
) -> tuple[Relief, ...]:
    found = []
    for settings in tried:
        if not _is_accepted(requested, resolved, model, settings):
            continue
        work = work_of(_with(resolved, settings), model, layout, cluster)
        if isinstance(work, Workload):
            work = replace(work, chunks_by_rule=chunks_by_rule)
        found.append(Relief(settings=settings, work=work))
    return tuple(found)


def _tried(resolved: Recipe) -> Iterator[tuple[str, ...]]:
    moved = [f"memory.offload={kind}" for kind in _OFFLOAD if kind != resolved.memory.offload]
    yield from ((setting,) for setting in moved)
    if resolved.model.compile is True:
        yield ("model.compile=false",)
        yield from (("model.compile=false", setting) for setting in moved)


def _is_accepted(
    requested: Recipe, resolved: Recipe, model: Model, settings: tuple[str, ...]
) -> bool:
    axes = _OPEN_AXES if "memory.offload=params" in settings else ()
    try:
        changed = load_checked_recipe(requested, [*axes, *settings], to_train=False)
    except RequestError:
        return False
    shape = model if isinstance(model, ModelShape) else None
    if shape is None and list(check_unplanned_settings(changed)):
        return False
    parallel = changed.parallel if axes else resolved.parallel
    tried = _with(resolved, settings).model_copy(update={"parallel": parallel})
    before, after = (
        {str(problem) for problem in check_model(recipe, shape, devices_per_node=None)}
        for recipe in (resolved, tried)
    )
    return after <= before


def _with(recipe: Recipe, settings: tuple[str, ...]) -> Recipe:
    for setting in settings:
        path, _, value = setting.partition("=")
        section, name = path.split(".")
        given = {"false": False, "true": True}.get(value, value)
        changed = getattr(recipe, section).model_copy(update={name: given})
        recipe = recipe.model_copy(update={section: changed})
    return recipe

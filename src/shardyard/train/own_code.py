"""The user's own functions of a recipe, imported by the processes that train and compared."""

from collections.abc import Sequence

import torch.distributed as dist

from shardyard.config.rules.own_code import DATASET, own_functions
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import own_metric_name, task_row
from shardyard.data.loader import MicroBatch
from shardyard.errors import RequestError
from shardyard.own_code import OwnFunction, load_own, source_digest
from shardyard.tasks.loss_computation import Computation
from shardyard.tasks.own_objective import OwnObjective


def with_own_code(
    computation: Computation[MicroBatch], recipe: Recipe, *, group: dist.ProcessGroup
) -> Computation[MicroBatch]:
    """Give a computation the functions that a recipe names. All ranks call it together.

    Args:
        group: A gloo group of all ranks.

    Raises:
        RequestError: A function cannot be imported, or ranks have different code.
    """
    loaded = load_all(recipe)
    modules = {setting: each.import_path for setting, each in loaded.items()}
    if recipe.model.module is not None and not recipe.model.module.startswith("shardyard."):
        modules["model.module"] = recipe.model.module
    if not modules:
        return computation
    digests = {setting: source_digest(path) for setting, path in modules.items()}
    _check_equal(digests, group)
    computation.code_digests = digests
    if "task.loss" in loaded or recipe.task.metrics:
        assert task_row(recipe.task.name).accepts_own_loss, "checked"
        computation.objective = OwnObjective(
            loss=loaded.get("task.loss"),
            metrics={
                own_metric_name(path): loaded[f"task.metrics.{own_metric_name(path)}"]
                for path in recipe.task.metrics
            },
        )
    return computation


def load_all(recipe: Recipe) -> dict[str, OwnFunction]:
    """Import every function that a recipe names and a step calls, by its setting.

    Not datasets, which readers call (``data/own/readers.py``), nor callbacks of rank 0.

    Raises:
        RequestError: One cannot be imported.
    """
    return {
        setting: load_own(setting, path, contract)
        for setting, (path, contract) in own_functions(recipe).items()
        if contract is not DATASET and not setting.startswith("observe.callbacks.")
    }


def changed_words(changed: Sequence[str]) -> str:
    """A warning that code is not what wrote the checkpoint."""
    named = ", ".join(each.removeprefix("code.") for each in changed)
    return (
        f"the source of your code changed since the checkpoint ({named}). The run continues with "
        "what is here now, so it is not the run that it would have been."
    )


def _check_equal(digests: dict[str, str], group: dist.ProcessGroup) -> None:
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, digests, group=group)
    for setting in digests:
        others = [rank for rank, each in enumerate(by_rank) if each[setting] != by_rank[0][setting]]
        if others:
            raise RequestError(
                f"{setting}: rank {others[0]} has other code than rank 0. All nodes need the same "
                "files: send them by launch.code, or install one version on all."
            )

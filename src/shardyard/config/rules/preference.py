"""Check recipes for pairs of answers, and settings of pairs in other recipes."""

from collections.abc import Iterable, Mapping

from shardyard.config.rules.labels import settings_without_effect
from shardyard.config.schema.recipe import Recipe, TaskSettings
from shardyard.config.tasks import TASKS, task_row
from shardyard.errors import Problem

_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "data": ("module", "pack", "attend_across_documents"),
    "memory": ("loss_chunk",),
}
"""Settings that pairs of answers do not have, by section."""
_OF_PREDICTED = ("loss_type", "beta")
_OF_REWARDS = ("center_rewards",)
"""Settings of ``task`` for pairs whose answers are predicted, and for pairs that get rewards."""


def check_preference(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    task = recipe.task
    row = task_row(task.name)
    for keys, gives_reward in ((_OF_PREDICTED, False), (_OF_REWARDS, True)):
        if not row.compares_answers or row.gives_reward is not gives_reward:
            yield from _of_another_task(recipe, keys, gives_reward=gives_reward)
    if not row.compares_answers:
        return
    pairs = f"on pairs of answers (task.name={task.name}), which are packed whole"
    yield from settings_without_effect(recipe, _WITHOUT_EFFECT, pairs)
    if row.gives_reward:
        yield from _of_rewards(recipe)
    elif task.label_smoothing and task.loss_type != "sigmoid":
        text = f"={task.label_smoothing} is of task.loss_type=sigmoid, and it is {task.loss_type}. "
        yield Problem("task.label_smoothing", f"{text}Leave it out.")
    if recipe.model.module is not None:
        text = f"={recipe.model.module}: answers are compared by models of known families. "
        yield Problem("model.module", f"{text}Use model.path, hub or preset.")


def _of_another_task(
    recipe: Recipe, keys: Iterable[str], *, gives_reward: bool
) -> Iterable[Problem]:
    """Find settings of pairs that the task does not read."""
    name = next(
        name
        for name, row in TASKS.items()
        if row.compares_answers and row.gives_reward is gives_reward
    )
    of = "reward models" if gives_reward else "pairs of answers that are predicted"
    for key in keys:
        value = getattr(recipe.task, key)
        if value != getattr(TaskSettings(), key):
            text = f"={value} is of {of}, and task.name is {recipe.task.name}. "
            yield Problem(f"task.{key}", f"{text}Use task.name={name}, or leave it out.")


def _of_rewards(recipe: Recipe) -> Iterable[Problem]:
    """Find settings that reward models do not have."""
    if recipe.task.label_smoothing:
        text = f"={recipe.task.label_smoothing} has no effect on reward models. Leave it out."
        yield Problem("task.label_smoothing", text)

"""Check recipes for pairs of answers, and settings of pairs in other recipes."""

from collections.abc import Iterable, Mapping

from shardyard.config.rules.labels import settings_without_effect
from shardyard.config.schema.recipe import Recipe, TaskSettings
from shardyard.config.tasks import task_row
from shardyard.errors import Problem

_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "data": ("mixture", "module", "pack", "attend_across_documents"),
    "memory": ("loss_chunk",),
}
"""Settings that pairs of answers do not have, by section."""


def check_preference(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    task = recipe.task
    if not task_row(task.name).compares_answers:
        for key in ("loss_type", "beta"):
            value = getattr(task, key)
            if value != getattr(TaskSettings(), key):
                text = f"={value} is of pairs of answers, and task.name is {task.name}. "
                yield Problem(f"task.{key}", f"{text}Use task.name=preference, or leave it out.")
        return
    pairs = f"on pairs of answers (task.name={task.name}), which are packed whole"
    yield from settings_without_effect(recipe, _WITHOUT_EFFECT, pairs)
    if task.label_smoothing and task.loss_type != "sigmoid":
        text = f"={task.label_smoothing} is of task.loss_type=sigmoid, and it is {task.loss_type}. "
        yield Problem("task.label_smoothing", f"{text}Leave it out.")
    if recipe.model.module is not None:
        text = f"={recipe.model.module}: the log-probabilities of answers are those of models of "
        yield Problem("model.module", f"{text}known families. Use model.path, hub or preset.")

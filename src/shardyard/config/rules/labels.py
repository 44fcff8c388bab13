"""Check recipes for labels of texts and tokens, and settings of labels in other recipes."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import TASKS, task_row
from shardyard.errors import Problem

_COLUMNS = {"samples": ("text", "text_pair", "label"), "tokens": ("tokens", "ner_tags")}
"""Columns that ``data.keys`` maps others to, by what has a label (``data/labels/rows.py``)."""

_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "data": ("mixture", "module", "bos", "attend_across_documents", "pack", "min_true_pairs"),
    "memory": ("loss_chunk",),
    "model": ("new_embeddings",),
    "task": ("label_smoothing",),
}
"""Settings that rows with labels do not have, by section."""


TAG = re.compile(r"([BIESLU])-(.+)")
"""A label of a word of an entity: B-PER, I-PER."""
_OF_NUMBERS = ("mse", "pearson", "spearman")
_OF_CLASSES = ("accuracy", "f1", "f1_macro", "matthews")
_OF_ENTITIES = ("precision", "recall", "f1")


def is_tagged(names: Sequence[str]) -> bool:
    """Whether labels are tags of entities: O, and others such as B-PER and I-PER."""
    return "O" in names and all(name == "O" or TAG.fullmatch(name) for name in names)


def check_label_targets(recipe: Recipe, data: DatasetMetadata) -> Iterable[Problem]:
    """Find targets that labels of this kind have no metric for, so that none would be reached."""
    labelled = task_row(recipe.task.name).labelled
    if labelled is None or data.num_labels is None:
        return
    unmeasured: tuple[str, ...]
    if labelled == "tokens":
        are = "no tags of entities such as B-PER"
        unmeasured = () if is_tagged(data.label_names) else _OF_ENTITIES
    elif data.num_labels == 1:
        are, unmeasured = "numbers to predict", _OF_CLASSES
    else:
        are, unmeasured = "classes", _OF_NUMBERS
    for name in recipe.run.target or ():
        if name in unmeasured:
            known = [each for each in task_row(recipe.task.name).metrics if each not in unmeasured]
            text = f"names {name}, and the labels are {are}. They have {', '.join(known)}."
            yield Problem("run.target", text)


def settings_without_effect(
    recipe: Recipe, settings: Mapping[str, tuple[str, ...]], on: str
) -> Iterable[Problem]:
    """Find settings with another value than their default that a kind of data does not have.

    Args:
        settings: Keys by section.
        on: The kind of data, in words.
    """
    for section, keys in settings.items():
        content = getattr(recipe, section)
        for key in sorted(content.model_fields_set & set(keys)):
            value = getattr(content, key)
            if value not in (getattr(type(content)(), key), "none"):
                yield Problem(f"{section}.{key}", f"={value} has no effect {on}. Leave it out.")


def check_labels(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    row, name = task_row(recipe.task.name), recipe.task.name
    if row.labelled is None:
        yield from _of_labels(recipe)
        return
    yield from _columns(recipe, _COLUMNS[row.labelled])
    yield from settings_without_effect(
        recipe, _WITHOUT_EFFECT, f"on rows with labels (task.name={name})"
    )
    if row.labelled == "tokens" and recipe.task.problem_type is not None:
        text = f"={recipe.task.problem_type}: each token has a class. Leave it out."
        yield Problem("task.problem_type", text)
    if row.labelled == "tokens" and "text_key" in recipe.data.model_fields_set:
        text = f"={recipe.data.text_key!r}: rows hold words. Use data.keys={{tokens: COLUMN}}."
        yield Problem("data.text_key", text)
    if len(set(recipe.data.labels)) != len(recipe.data.labels):
        yield Problem("data.labels", "names a label twice. Give each number a name of its own.")
    if recipe.data.labels and recipe.task.problem_type == "regression":
        text = "names classes, and task.problem_type=regression predicts a number. Leave one out."
        yield Problem("data.labels", text)
    if recipe.model.module is not None and not is_generic(recipe):
        text = f"={recipe.model.module}: task.name={name} puts a head on models of known families. "
        yield Problem("model.module", f"{text}Use task.name=causal_lm with your own task.loss.")


def _of_labels(recipe: Recipe) -> Iterable[Problem]:
    """Settings of labels, where the task has none."""
    names = " or ".join(name for name, row in TASKS.items() if row.labelled is not None)
    given = {"data.labels": recipe.data.labels, "task.problem_type": recipe.task.problem_type}
    for path, value in given.items():
        if value not in ((), None):
            shown = value if isinstance(value, str) else list(value)
            text = f"={shown} is of rows with labels, and task.name is {recipe.task.name}. "
            yield Problem(path, f"{text}Use task.name={names}, or leave it out.")


def _columns(recipe: Recipe, known: tuple[str, ...]) -> Iterable[Problem]:
    for key, yours in (recipe.data.keys or {}).items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            written = f"{near[0]}: {yours}" if near else f"{yours}: {key}"
            hint = f"Write data.keys={{{written}}}." if near or yours in known else ""
            text = f" has no column {key!r} of rows with labels; there are {', '.join(known)}."
            yield Problem("data.keys", f"{text} {hint}".strip())

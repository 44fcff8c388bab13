"""What contradicts itself in a recipe that learns from dialogues."""

import difflib
from collections.abc import Iterable

from shardyard.config.chat_templates import CHAT_TEMPLATES
from shardyard.config.credentials import show
from shardyard.config.schema.recipe import Recipe
from shardyard.config.task_lookup import task_row
from shardyard.config.tasks import BITS_PER_BYTE
from shardyard.errors import Problem


def dialogue_problems(recipe: Recipe) -> Iterable[Problem]:
    """What a recipe that learns from dialogues asks."""
    data, target = recipe.data, recipe.run.target or ()
    if data.chat_template is not None and data.chat_template not in CHAT_TEMPLATES:
        near = difflib.get_close_matches(data.chat_template, CHAT_TEMPLATES, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(CHAT_TEMPLATES)}."
        text = f"={show(data.chat_template)}: no such template is known. {hint} One of your own "
        text += "goes into the tokenizer's folder as chat_template.jinja."
        yield Problem("data.chat_template", text)
    if data.format != "chat":
        return
    if not task_row(recipe.task.name).reads_learnt:
        text = f"=chat: {recipe.task.name} would learn all of a dialogue. Use task.name=causal_lm."
        yield Problem("data.format", text)
    if BITS_PER_BYTE in target:
        text = f"names {BITS_PER_BYTE}, which is of running text. Use loss for dialogues."
        yield Problem("run.target", text)
    if data.loss_share[0] >= data.loss_share[1]:
        text = f"={list(data.loss_share)} is no range. Write the smaller share first."
        yield Problem("data.loss_share", text)

"""What a recipe with a model of the user's own may ask: nothing that needs to know what is inside.

``model.module`` names a function that makes it, ``package.module:function``. No part of it is
imported here: that is done by the processes that train.
"""

import re
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from shardyard.config.layout import WHY_NOT
from shardyard.config.schema.recipe import Recipe
from shardyard.config.task_lookup import task_row
from shardyard.errors import Problem, RequestError
from shardyard.families.shape import ModelShape

NO_SHAPE = "what a model of no known family needs is not known before it runs"

_FORM = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*:[^\W\d]\w*")

FOLLOWING_A_SHAPE = (
    "data.seq_len", "optim.lr", "optim.global_batch", "optim.micro_batch"
)  # fmt: skip
"""Settings whose auto is taken from the sizes of a model."""


def known_shape(shape: ModelShape | None) -> ModelShape:
    """The shape that a plan is made of.

    Raises:
        RequestError: There is none: the model is of the user's own.
    """
    if shape is None:
        raise RequestError(f"there is no plan: {NO_SHAPE}. Train a few steps and see the report.")
    return shape


def own_module_problems(
    recipe: Recipe, *, generic: str | None = None, has_sizes: bool = False
) -> Iterable[Problem]:
    """Everything that is wrong with a recipe that has ``model.module``, or with its settings.

    Args:
        generic: What messages call a model that transformers makes (``generic_model.py``), whose
            blocks and weights are known; None: it is of the user's own.
        has_sizes: Whether the sizes that auto follows are known all the same.
    """
    model, what = recipe.model, generic or "model.module"
    if model.module is None:
        if model.blocks:
            text = f"={', '.join(model.blocks)} is for model.module; other models have known blocks"
            yield Problem("model.blocks", f"{text}. Leave it out.")
        return
    if model.preset is not None:
        text = "model.module and model.preset each name a model. Keep one of them."
        yield Problem("model", text)
    yield from _place_problems(model.module)
    yield from axis_problems(recipe, generic or "a module of your own")
    for setting in () if has_sizes else FOLLOWING_A_SHAPE:
        section, key = setting.split(".")
        is_said = setting == "optim.global_batch" and recipe.optim.batch_per_device is not None
        if getattr(getattr(recipe, section), key) == "auto" and not is_said:
            text = f"=auto follows a model's sizes, and those of {what} are not known. Give it"
            yield Problem(setting, f"{text} a value.")
    for path, (is_asked, why) in _refused(recipe, what, is_generic=generic is not None).items():
        if is_asked:
            yield Problem(path, why)


def _place_problems(place: str) -> Iterable[Problem]:
    if not _FORM.fullmatch(place):
        text = f"={place!r} is not of the form package.module:function. Name a function that makes"
        yield Problem("model.module", f"{text} the model.")
        return
    first = place.partition(":")[0].partition(".")[0]
    if PathFinder.find_spec(first, [str(Path.cwd()), *sys.path]) is None:
        text = (
            f"={place}: there is no module {first} in {Path.cwd()} nor among installed packages. "
            "Start where it is, set PYTHONPATH, or install it."
        )
        yield Problem("model.module", text)


def axis_problems(recipe: Recipe, what: str) -> Iterable[Problem]:
    """Degrees that split what nobody here knows how to split."""
    for axis, reason in WHY_NOT.items():
        degree = getattr(recipe.parallel, axis)
        if degree > 1:
            hint = "Use dp_replicate and dp_shard"
            if axis == "tp":
                hint += "; a script gives tp a plan (docs/library.md)"
            text = f"={degree}: in {what} {reason}. {hint}."
            yield Problem(f"parallel.{axis}", text)


def _refused(recipe: Recipe, what: str, *, is_generic: bool) -> dict[str, tuple[bool, str]]:
    """Setting -> whether a recipe asks for what no module of one's own has, and why not."""
    model, given = recipe.model, recipe.model.model_fields_set
    recompute, is_split = recipe.memory.recompute, bool(model.blocks) or is_generic
    own = f"and what is inside of {what} is not known."
    metrics = task_row(recipe.task.name).metrics
    no_blocks = "is done block by block, and model.blocks names none. Name them, or leave it out."
    return {
        "model.weights": (
            model.weights == "load" and not is_generic,
            "=load, but the function of model.module gives its model the weights. Load them there.",
        ),
        "model.dropout": (
            model.dropout not in ("auto", 0),
            f"={model.dropout} is put behind known parts of a block, {own} Drop in the module.",
        ),
        "model.router_aux_loss": (
            "router_aux_loss" in given,
            f"={model.router_aux_loss} weighs a loss of known routers, {own} Leave it out.",
        ),
        "model.router_z_loss": (
            "router_z_loss" in given,
            f"={model.router_z_loss} weighs a loss of known routers, {own} Leave it out.",
        ),
        "model.compile": (model.compile is True and not is_split, f"=true {no_blocks}"),
        "memory.recompute": (
            recompute not in ("none", "auto") and not is_split,
            f"={recompute!r} {no_blocks}",
        ),
        "memory.loss_chunk": (
            recipe.memory.loss_chunk not in ("auto", "none"),
            f"={recipe.memory.loss_chunk} makes losses in the head of a known model, {own} "
            "Use none.",
        ),
        "memory.offload": (
            recipe.memory.offload in ("activations", "params"),
            f"={recipe.memory.offload} moves what known blocks hold, {own} Use memory.recompute, "
            "or memory.offload=optimizer.",
        ),
        "precision.compute": (
            recipe.precision.compute == "fp8",
            f"=fp8 multiplies known matrices of a block, {own} Use bf16 or fp32.",
        ),
        "task.generate_tokens": (
            recipe.task.generate_tokens > 0 and task_row(recipe.task.name).continues_text,
            f"={recipe.task.generate_tokens} needs logits, {own} Use 0.",
        ),
        "run.target": (
            any(metrics[name].is_of_logits for name in recipe.run.target or () if name in metrics),
            f"asks for what only logits tell, {own} Use loss or perplexity.",
        ),
    }

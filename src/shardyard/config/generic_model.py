"""Causal language models of transformers of no family here: trained as a module of one's own is.

On the data axes, that is, with recompute of their blocks; what is inside of them nobody here knows.
A recipe that names such a model by ``model.path`` or ``model.hub`` becomes one whose
``model.module`` is ours, so that there is no third way to train.
"""

from pathlib import Path
from typing import Any

from shardyard.config.own_module import own_module_problems
from shardyard.config.schema import Recipe
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.families.config_json import CAUSAL_CLASSES
from shardyard.families.registry import FAMILIES, is_family

MODULE = "shardyard.train.generic_model:open_causal_lm"
"""What ``model.module`` of such a recipe is."""

LACKS = (
    "it trains on data axes alone (dp_replicate, dp_shard with zero 1 to 3), without cp, tp, pp "
    "and ep, fp8, adapters, planned memory, time and price, and MFU; each process holds all of it "
    "while it is opened and exported"
)
"""What is told of such a model when a run starts, and by `plan`."""

_ENCODER_DECODER = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus")
"""Which are so by themselves: a config.json need not say it."""


def is_generic(recipe: Recipe) -> bool:
    """Whether a recipe's model takes this path."""
    return recipe.model.module == MODULE


def generic_type(config: dict[str, Any], source: str) -> str | None:
    """The type of a model that takes this path; None: it is of a family, or refused elsewhere.

    Args:
        config: Content of a config.json.
        source: What messages call it.

    Raises:
        RequestError: It is of no family, and no causal language model.
    """
    kind, names = config.get("model_type"), config.get("architectures") or ()
    if is_family(kind):
        return None
    if config.get("is_encoder_decoder") or kind in _ENCODER_DECODER:
        raise RequestError(
            f"{source}: model_type={kind!r} reads one text and writes another (encoder and "
            "decoder). Here a sample is one text, whose tokens are predicted: nothing feeds the "
            "encoder. Use a causal model, or a script with a module of your own (docs/library.md)."
        )
    if not any(str(name).endswith(CAUSAL_CLASSES) for name in names):
        return None  # refused where configs are read
    if config.get("quantization_config"):
        raise RequestError(
            f"{source}: quantization_config: its weights are quantised; training needs the full "
            "ones. Use the model that it was made from."
        )
    return str(kind)


def on_generic_path(recipe: Recipe, kind: str, folder: Path) -> Recipe:
    """The recipe that trains a model of no family by what its owner need not say.

    Raises:
        RecipeError: It asks for what needs to know the inside of the model; all that does.
    """
    model = recipe.model.model_copy(update={"module": MODULE})
    found = [
        *own_module_problems(
            recipe.model_copy(update={"model": model}), generic=f"a model of type {kind}"
        ),
        *_more_problems(recipe, kind),
    ]
    if found:
        known = ", ".join(FAMILIES)
        raise RecipeError(
            found,
            f"{folder}",
            hint=f"A model of type {kind} is of none of the families whose inside is known "
            f"({known}), so {LACKS}.",
        )
    return recipe.model_copy(update={"model": model})


def _more_problems(recipe: Recipe, kind: str) -> list[Problem]:
    found = []
    if not recipe.data.attend_across_documents:
        text = (
            f"=false: whether a model of type {kind} keeps documents apart is not known. Use true, "
            "or samples of one document."
        )
        found.append(Problem("data.attend_across_documents", text))
    if recipe.model.lora.rank is not None:
        text = (
            f"={recipe.model.lora.rank} puts adapters beside known matrices of a block. Use PEFT."
        )
        found.append(Problem("model.lora.rank", text))
    if recipe.model.compile is True:
        text = "=true was not tried with models whose inside is not known. Use false."
        found.append(Problem("model.compile", text))
    return found

"""Causal language models of transformers of no family here: trained as a module of one's own is.

On the data axes, that is, with recompute of their blocks; what is inside of them nobody here knows.
A recipe that names such a model by ``model.path`` or ``model.hub`` becomes one whose
``model.module`` is ours, so that there is no third way to train.
"""

from pathlib import Path
from typing import Any

from shardyard.config.model_sizes import ModelSizes
from shardyard.config.rules.own_module import own_module_problems
from shardyard.config.schema.recipe import Recipe
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

BY_POSITIONS = (
    "apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "exaone4", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt_bigcode", "gpt_neo", "gptj", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "ministral", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phimoe", "qwen2_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Types of which transformers keeps documents apart where positions begin anew."""
BY_MASK = ("biogpt", "falcon", "opt", "xglm")
"""Types that must be given a mask, too."""
KEEP_DOCUMENTS_APART = tuple(sorted({*BY_POSITIONS, *BY_MASK}))
"""Types whose documents in a sample do not see each other if that is asked for. A test holds each
against the documents alone. A state that runs through a sample (Mamba) knows no documents, and
ALiBi (BLOOM, MPT) is made of a sample as a whole."""

_ENCODER_DECODER = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus")
"""Which are so by themselves: a config.json need not say it."""


def is_generic(recipe: Recipe) -> bool:
    """Whether a recipe's model takes this path."""
    return recipe.model.module == MODULE


def needs_mask(kind: str) -> bool:
    """Whether a type keeps documents of a sample apart only by a mask that it is given."""
    return kind in BY_MASK


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


def on_generic_path(
    recipe: Recipe, kind: str, folder: Path, *, sizes: ModelSizes | None = None
) -> Recipe:
    """The recipe that trains a model of no family by what its owner need not say.

    Args:
        sizes: What auto follows, by its config.json; None: that lacks one of them.

    Raises:
        RecipeError: It asks for what needs to know the inside of the model; all that does.
    """
    model = recipe.model.model_copy(update={"module": MODULE})
    generic = recipe.model_copy(update={"model": model})
    what, has_sizes = f"a model of type {kind}", sizes is not None
    found = [
        *own_module_problems(generic, generic=what, has_sizes=has_sizes),
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
    return generic


def _more_problems(recipe: Recipe, kind: str) -> list[Problem]:
    found = []
    if not recipe.data.attends_across and kind not in KEEP_DOCUMENTS_APART:
        setting, value, other = "data.attend_across_documents", "false", "true"
        if recipe.data.pack == "whole":
            setting, value, other = "data.pack", "whole", "stream"
        text = (
            f"={value}: documents of a sample are each for itself, and a model of type {kind} is "
            f"not known to keep them apart. Set {setting}={other}, or use a model of another type, "
            "such as gemma, granite or olmo."
        )
        found.append(Problem(setting, text))
    if recipe.model.lora.rank is not None:
        text = (
            f"={recipe.model.lora.rank} puts adapters beside known matrices of a block. Use PEFT."
        )
        found.append(Problem("model.lora.rank", text))
    if recipe.model.compile is True:
        text = "=true was not tried with models whose inside is not known. Use false."
        found.append(Problem("model.compile", text))
    return found

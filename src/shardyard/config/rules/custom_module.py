"""Check settings of custom modules and of transformers' models that belong to no family.

They train on the data axes, with recompute of their blocks; their inside is unknown here. A
recipe that names such a model by ``model.path`` or ``model.hub`` becomes one whose
``model.module`` is ours, so that there is no third way to train.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardyard.config.layout import WHY_NOT
from shardyard.config.model_sizes import ModelSizes
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import TASKS, task_row
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.families.config_json import CAUSAL_CLASSES
from shardyard.families.registry import FAMILIES, is_family
from shardyard.families.shape import ModelShape
from shardyard.own_code import Contract, find_source

# What a recipe with a model of the user's own may ask: nothing that needs to know what is inside.
#
# ``model.module`` names a function that makes it, ``package.module:function``. No part of it is
# imported here: that is done by the processes that train.

MODEL = Contract(
    call="function(vocab_size=..., seq_len=...)",
    arguments=None,
    returns="an nn.Module and its loss, a function of (model, batch)",
)

NO_SHAPE = "what a model of no known family needs is not known before it runs"

FOLLOWING_A_SHAPE = (
    "data.seq_len", "optim.lr", "optim.global_batch", "optim.micro_batch"
)  # fmt: skip
"""Settings whose auto is taken from the sizes of a model."""


def require_shape(shape: ModelShape | None) -> ModelShape:
    """The shape that a plan is made of.

    Raises:
        RequestError: There is none: the model is of the user's own.
    """
    if shape is None:
        raise RequestError(
            f"no plan is possible: {NO_SHAPE}. Train a few steps and see the report."
        )
    return shape


def check_custom_module(
    recipe: Recipe, *, generic: str | None = None, has_sizes: bool = False
) -> Iterable[Problem]:
    """Everything that is wrong with a recipe that has ``model.module``, or with its settings.

    Args:
        generic: What messages call a model that transformers makes (``custom_module.py``), whose
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
    found = find_source(model.module, MODEL)
    # A node unpacks launch.code after this check, and its workers import from there.
    if found.wrong and not (found.is_missing and recipe.launch.code):
        yield Problem("model.module", found.wrong)
    yield from check_unsupported_axes(recipe, generic or "a module of your own")
    for setting in () if has_sizes else FOLLOWING_A_SHAPE:
        section, key = setting.split(".")
        is_said = setting == "optim.global_batch" and recipe.optim.batch_per_device is not None
        if getattr(getattr(recipe, section), key) == "auto" and not is_said:
            text = f"=auto follows a model's sizes, and those of {what} are not known. Give it"
            yield Problem(setting, f"{text} a value.")
    for path, (is_asked, why) in _unsupported_settings(
        recipe, what, is_generic=generic is not None
    ).items():
        if is_asked:
            yield Problem(path, why)


def check_unsupported_axes(recipe: Recipe, what: str) -> Iterable[Problem]:
    """Yield problems of degrees that would split parts of a model that Shardyard cannot split."""
    for axis, reason in WHY_NOT.items():
        degree = getattr(recipe.parallel, axis)
        if degree > 1:
            hint = "Use dp_replicate and dp_shard"
            if axis == "tp":
                hint += "; a script gives tp a plan (docs/library.md)"
            text = f"={degree}: in {what} {reason}. {hint}."
            yield Problem(f"parallel.{axis}", text)


def _unsupported_settings(
    recipe: Recipe, what: str, *, is_generic: bool
) -> dict[str, tuple[bool, str]]:
    """Setting -> whether a recipe asks for what no module of one's own has, and why not."""
    model, given = recipe.model, recipe.model.model_fields_set
    recompute, is_split = recipe.memory.recompute, bool(model.blocks) or is_generic
    own = f"and what is inside of {what} is not known."
    row = task_row(recipe.task.name)
    has_own_head = is_generic and has_generic_head(recipe.task.name)
    metrics = {} if has_own_head else row.metrics
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
            recipe.task.generate_tokens > 0 and row.continues_text,
            f"={recipe.task.generate_tokens} needs logits, {own} Use 0.",
        ),
        "data.eval_tasks": (bool(recipe.data.eval_tasks), f"needs logits, {own} Leave it out."),
        "run.target": (
            any(metrics[name].is_of_logits for name in recipe.run.target or () if name in metrics),
            f"asks for what only logits tell, {own} Use loss or perplexity.",
        ),
    }


MODULE = "shardyard.train.custom_model:open_causal_lm"
"""Value of ``model.module`` in such a recipe."""

LACKS = (
    "it trains only on data axes (dp_replicate, dp_shard with zero 1 to 3), without cp, tp, pp "
    "and ep, fp8, adapters, planned memory, time and price, and MFU; each process holds all of it "
    "while it is opened and exported"
)
"""Limits of such a model, printed when a run starts, and by `plan`."""

BY_POSITIONS = (
    "apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "exaone4", "flex_olmo", "gemma", "glm", "glm4",
    "glm4_moe", "gpt_bigcode", "gpt_neo", "gptj", "granitemoe", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "ministral", "nanochat", "nemotron", "olmo",
    "olmo3", "olmoe", "persimmon", "phi", "phimoe", "qwen2_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Types of which transformers keeps documents apart where positions restart."""
BY_MASK = ("biogpt", "falcon", "opt", "xglm")
"""Types that must be given a mask, too."""
KEEP_DOCUMENTS_APART = tuple(sorted({*BY_POSITIONS, *BY_MASK}))
"""Types whose documents in a sample do not see each other, if the recipe asks for that.

A test compares each with the documents on their own. A state that runs through a sample (Mamba)
knows no documents, and ALiBi (BLOOM, MPT) is made of a sample as a whole.
"""

_ENCODER_DECODER = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus")
"""Types that are encoder-decoders by themselves: a config.json need not say it."""


def is_generic(recipe: Recipe) -> bool:
    """Whether a recipe's model takes this path."""
    return recipe.model.module == MODULE


def has_generic_head(task: str) -> bool:
    """Whether transformers opens a model of no family with the head of a task, which is not causal.

    Those of labels it puts on any model.
    """
    row = task_row(task)
    return row.auto_class is not None and row.reads == "text" and not row.is_causal


def needs_mask(kind: str) -> bool:
    """Whether a type keeps documents of a sample apart only by a mask that it is given."""
    return kind in BY_MASK


def generic_type(config: dict[str, Any], source: str, *, task: str) -> str | None:
    """Return the type of a model that takes this path.

    None: it is of a family, or rejected elsewhere.

    Args:
        config: Content of a config.json.
        source: Its name in messages.
        task: Name of the task that it shall learn.

    Raises:
        RequestError: It is of no family, and reads and writes two texts, or is quantised.
    """
    kind, names = config.get("model_type"), config.get("architectures") or ()
    if is_family(kind):
        return None
    if config.get("is_encoder_decoder") or kind in _ENCODER_DECODER:
        raise RequestError(
            f"{source}: model_type={kind!r} reads one text and writes another (encoder and "
            "decoder). Here a sample is one text, whose tokens are predicted, so the encoder "
            "would have no input. Use a causal model, or a script with a module of your own "
            "(docs/library.md)."
        )
    is_causal = any(str(name).endswith(CAUSAL_CLASSES) for name in names)
    if not (is_causal or has_generic_head(task)) or kind is None:
        return None  # rejected where configs are read
    if config.get("quantization_config"):
        raise RequestError(
            f"{source}: quantization_config: its weights are quantised; training needs the full "
            "ones. Use the model that it was made from."
        )
    return str(kind)


def _generic_tasks() -> list[str]:
    return [name for name, row in TASKS.items() if row.auto_class and row.reads == "text"]


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
        *check_custom_module(generic, generic=what, has_sizes=has_sizes),
        *_check_model_type(recipe, kind, sizes),
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


def _check_model_type(recipe: Recipe, kind: str, sizes: ModelSizes | None) -> list[Problem]:
    found = []
    if task_row(recipe.task.name).auto_class is None:
        text = f"={recipe.task.name} is learnt by models of known families only. Use one of these, "
        text += f"or task.name={' or '.join(_generic_tasks())}."
        found.append(Problem("task.name", text))
    seq_len = recipe.data.seq_len
    if seq_len != "auto" and sizes is not None and sizes.has_limit:
        most = sizes.max_position_embeddings
        if seq_len > most:
            text = (
                f"={seq_len} is more than the model's context of {most} tokens. Use at most {most}."
            )
            found.append(Problem("data.seq_len", text))
    if not recipe.data.attends_across and kind not in KEEP_DOCUMENTS_APART:
        setting, value, other = "data.attend_across_documents", "false", "true"
        if recipe.data.pack == "whole":
            setting, value, other = "data.pack", "whole", "stream"
        text = (
            f"={value}: documents of a sample are each for itself, and a model of type {kind} is "
            f"not known to keep them apart. Set {setting}={other}, or use a model of another type, "
            "such as gemma, glm or olmo."
        )
        found.append(Problem(setting, text))
    if recipe.model.lora.rank is not None:
        text = f"={recipe.model.lora.rank} adds adapters to known matrices of a block. Use PEFT."
        found.append(Problem("model.lora.rank", text))
    if recipe.model.compile is True:
        text = "=true was not tried with models whose inside is not known. Use false."
        found.append(Problem("model.compile", text))
    return found

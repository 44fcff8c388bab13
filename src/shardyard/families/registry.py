"""Table of families and their modules: looked up here, imported on first use."""

import re
from dataclasses import replace
from functools import cache, partial

from shardyard.errors import RequestError
from shardyard.families.dimensions import Labelled
from shardyard.families.family import Family, ModuleSpec, always, hidden, labels
from shardyard.plugins import load_entry_point, load_object, plug_in_named

FAMILIES = {
    "llama": "shardyard.families.llama:LLAMA",
    "mistral": "shardyard.families.llama:MISTRAL",
    "mixtral": "shardyard.families.mixtral:MIXTRAL",
    "qwen2": "shardyard.families.qwen2:QWEN2",
    "qwen3": "shardyard.families.qwen3:QWEN3",
    "qwen3_moe": "shardyard.families.qwen3_moe:QWEN3_MOE",
    "phi3": "shardyard.families.phi3:PHI3",
    "gpt_neox": "shardyard.families.gpt_neox:GPT_NEOX",
    "olmo2": "shardyard.families.olmo2:OLMO2",
    "granite": "shardyard.families.granite:GRANITE",
    "gemma2": "shardyard.families.gemma2:GEMMA2",
    "gemma3_text": "shardyard.families.gemma3_text:GEMMA3_TEXT",
    "bert": "shardyard.families.bert:BERT",
    "gpt2": "shardyard.families.gpt2:GPT2",
}
"""``model_type`` of a Hugging Face config -> module and object; packages add others."""

PLANNED = {"deepseek_v3": "shardyard.families.deepseek_v3:DEEPSEEK_V3"}
"""The same of families that can be planned, not trained yet; they have presets only."""


@cache
def family_of(model_type: str) -> Family:
    """The family of a model type, ours or a package's.

    Raises:
        RequestError: There is none of this name, or a package's cannot be used.
    """
    family: Family
    builtin = FAMILIES | PLANNED
    if model_type in builtin:
        family = load_object(None, builtin[model_type])
    else:
        wrong = partial(_registration_error, model_type=model_type)
        family = load_entry_point("families", model_type, builtin=FAMILIES, validate=wrong)
    return family


def _registration_error(content: object, *, model_type: str) -> str:
    if not isinstance(content, Family):
        return f"is {type(content).__name__}, not a shardyard.families.family.Family"
    own = content.model_type
    return "" if own == model_type else f"is of model type {own!r}, and has to be named like it"


def is_family(model_type: object) -> bool:
    """Whether there is a family of this name, ours or a package's."""
    name = str(model_type)
    return name in FAMILIES or plug_in_named("families", name) is not None


# Families with a head over labels: of each sample, or of each token.
#
# The blocks are those of the language model, and so are their names in files. The head over the
# vocabulary is left out. Source: ForSequenceClassification and ForTokenClassification of
# transformers 5.23.


@cache
def labelled_family(model_type: str, labelled: Labelled) -> Family:
    """The family of a model type with a head over labels in the place of its own.

    Raises:
        RequestError: As ``family_of``, or transformers has no such head for it.
    """
    family = family_of(model_type)
    if labelled not in family.labels:
        of = " and ".join(family.labels) or "nothing"
        raise RequestError(
            f"transformers has no head over labels of {labelled} for model_type={model_type!r} "
            f"(it has: {of}), so no other tool could open the model. Use another family, such as "
            "model.preset=qwen3-8b."
        )
    names = family.label_head
    of_samples = labelled == "samples"
    has_bias = names.samples_have_bias or not of_samples
    pooler = names.pooler if of_samples else None
    return replace(
        family,
        labelled=labelled,
        # what is between the last block and the head over the vocabulary, and a part of that
        norm=family.norm if family.end is None else replace(family.norm, is_built=False),
        head=ModuleSpec(
            names.of_samples if of_samples else names.of_tokens, labels, hidden,
            bias=always if has_bias else None,
        ),
        pooler=None if pooler is None else ModuleSpec(pooler, hidden, hidden, bias=always),
        pair_head=None,
        end=None,
        tied_names={},
        is_always_tied=False,
        uncounted=lambda _: {},
        ignored_names={_of_vocabulary(family): "the task has no head over the vocabulary"},
    )  # fmt: skip


def _of_vocabulary(family: Family) -> str:
    """Return a pattern of the tensors that a language model has and one over labels has not."""
    base = f"{family.blocks.partition('.')[0]}."
    rows = (family.head, family.pooler, family.pair_head)
    names = {(family.head.in_files or f"{family.head.module}.weight").rpartition(".")[0]}
    names |= {row.module.removeprefix(base) for row in rows if row is not None}
    names |= set() if family.end is None else {family.end}
    tops = "|".join(re.escape(name) for name in sorted(names))
    return rf"({re.escape(base)})?({tops})\..*"

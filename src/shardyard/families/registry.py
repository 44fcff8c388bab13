"""Table of families and their modules: looked up here, imported on first use."""

from functools import cache, partial

from shardyard.families.family import Family
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
    "gemma2": "shardyard.families.gemma2:GEMMA2",
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

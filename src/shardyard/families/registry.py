"""Which families there are, and where each is: looked up here, imported when first asked for."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from shardyard.errors import RequestError

if TYPE_CHECKING:
    from shardyard.families.family import Family

FAMILIES = {
    "llama": "shardyard.families.llama:LLAMA",
    "mistral": "shardyard.families.llama:MISTRAL",
    "mixtral": "shardyard.families.mixtral:MIXTRAL",
    "qwen2": "shardyard.families.qwen2:QWEN2",
    "qwen3": "shardyard.families.qwen3:QWEN3",
    "qwen3_moe": "shardyard.families.qwen3_moe:QWEN3_MOE",
    "bert": "shardyard.families.bert:BERT",
    "gpt2": "shardyard.families.gpt2:GPT2",
}
"""``model_type`` of a Hugging Face config -> module and object."""


def registered() -> Mapping[str, str]:
    """Every family that can be named: model type -> module and object."""
    return FAMILIES


@cache
def family_of(model_type: str) -> "Family":
    """The family of a model type.

    Raises:
        RequestError: There is none of this name.
    """
    if model_type not in registered():
        raise RequestError(
            f"model type {model_type!r} is not known. Known: {', '.join(registered())}."
        )
    module, _, name = registered()[model_type].partition(":")
    family: Family = getattr(import_module(module), name)
    return family


def can_be_trained(model_type: object) -> bool:
    """Whether models of a type can be trained; of the others only the counts are known."""
    return model_type in registered() and family_of(str(model_type)).is_trained


def trained_types() -> list[str]:
    """All model types that can be trained."""
    return [name for name in registered() if can_be_trained(name)]


def trained_family_of(model_type: str) -> "Family":
    """The family of a model that shall be trained.

    Raises:
        RequestError: It can be planned at most.
    """
    if not can_be_trained(model_type):
        raise RequestError(
            f"model type {model_type!r} is not supported: where its blocks are is not known. "
            f"Supported: {', '.join(trained_types())}."
        )
    return family_of(model_type)

"""What contradicts itself in the section ``data``."""

from collections.abc import Iterable

from shardyard.config.schema import Data, Recipe
from shardyard.errors import Problem


def data_problems(recipe: Recipe) -> Iterable[Problem]:
    """Everything of this kind."""
    data = recipe.data
    is_trained = data.tokenizer in ("auto", "train")
    if data.tokenizer_kind != Data().tokenizer_kind and not is_trained:
        yield Problem("data.tokenizer_kind", not_trained(data.tokenizer_kind, data.tokenizer))


def not_trained(kind: str, tokenizer: str) -> str:
    """Why a kind that is asked for cannot be had."""
    return (
        f"={kind} is what a tokenizer becomes that is trained here, and data.tokenizer={tokenizer} "
        "is one that exists. Set data.tokenizer=train, or leave data.tokenizer_kind out."
    )

"""Rows of a model's embedding and head for tokens that were added to its tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardyard.config.inspection import loads_weights
from shardyard.config.model.source import table_rows
from shardyard.config.model.vocabulary import Vocabulary, check_tokens, reads_tokens
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem
from shardyard.families.lora import trained_modules
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import is_frozen


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A model's shape for a tokenizer, and what is wrong with the two."""

    shape: ModelShape | None
    errors: tuple[Problem, ...] = ()
    note: str = ""


def grow(
    recipe: Recipe,
    shape: ModelShape | None,
    *,
    given: Vocabulary | None,
    size: int,
    model_dir: Path | None,
) -> Growth:
    """Give a model rows for all tokens, if its tokenizer allows for that.

    Args:
        shape: The model's own; None: it is of no family, and grows where it is made.
        given: Tokens of the tokenizer; None: only their number is known.
        size: Rows that the tokenizer needs.
        model_dir: The model's own files; None: it is a preset.
    """
    rows = table_rows(recipe.model, shape)
    if shape is None or rows is None or not reads_tokens(recipe):
        return Growth(shape=shape)
    errors = check_tokens(recipe, given, rows=rows, size=size, model_dir=model_dir)
    if errors or size <= rows:
        return Growth(shape=shape, errors=tuple(errors))
    errors = list(_untrained_rows(recipe, shape, size - rows))
    is_mean = recipe.model.new_embeddings == "mean"
    words = "the mean of the others" if is_mean else "random values"
    begin = f" (new rows begin as {words})" if loads_weights(recipe) else ""
    note = f"the tokenizer has more tokens than the model: its embedding grows from {rows:,} to "
    return Growth(
        shape=replace(shape, vocab_size=size), errors=tuple(errors), note=f"{note}{size:,} rows"
        f"{begin}",
    )  # fmt: skip


def _untrained_rows(recipe: Recipe, shape: ModelShape, number: int) -> Iterator[Problem]:
    """New rows that would stay as they begin."""
    model, family = recipe.model, shape.family
    table = f"{family.embedding.module}.{family.embedding.parameter}"
    if is_frozen(table, model.frozen):
        text = (
            f"={', '.join(model.frozen)} freezes {table}, and {number:,} tokens are new: their "
            "rows would not be learnt. Leave the embedding out of model.frozen, or add no tokens."
        )
        yield Problem("model.frozen", text)
    if model.lora.rank is None:
        return
    ends = [family.embedding] if shape.tie_word_embeddings else [family.embedding, family.head]
    trained = trained_modules(shape, model.lora.modules_to_save)
    if not all(f"{row.module}.{row.parameter}" in trained for row in ends):
        names = [row.module.rpartition(".")[2] for row in ends]
        fix = f"Set model.lora.modules_to_save=[{', '.join(names)}]"
        if family.end is not None:
            fix = "Train the whole model (leave model.lora out), or add no tokens"
        text = f"={model.lora.rank} trains only adapters, and {number:,} tokens are new: their "
        yield Problem("model.lora.rank", f"{text}rows would not be learnt. {fix}.")

"""Tokens of a tokenizer compared with the model's own, and with the rows of its embedding.

Only names and ids are read, without the tokenizers library, so a plan knows them too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.errors import Problem
from shardyard.io.files import parse_json

_MAIN_FILE, _LINES_FILE = "tokenizer.json", "vocab.txt"
_SHOWN = 3


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a tokenizer by their ids."""

    tokens: Mapping[int, str]
    added: frozenset[str]
    """Tokens that were added to it, special ones among them."""

    @property
    def size(self) -> int:
        """Rows that an embedding needs."""
        return max(self.tokens) + 1

    def with_tokens(self, data: Data) -> "Vocabulary":
        """Return it with the tokens that a recipe adds, numbered as the tokenizers library does."""
        known = set(self.tokens.values())
        names = dict.fromkeys((*data.add_special_tokens, *data.add_tokens))
        new = [name for name in names if name not in known]
        tokens = {**self.tokens, **dict(enumerate(new, self.size))}
        return Vocabulary(tokens, self.added | {*names})


@lru_cache(maxsize=2)
def parse_vocabulary(content: bytes) -> Vocabulary | None:
    """Return the tokens of a tokenizer.json, or of a vocab.txt; None: they are in another form."""
    try:
        parsed = parse_json(content.decode()) if content.lstrip()[:1] == b"{" else None
        if parsed is None:
            lines = content.decode().removesuffix("\n").split("\n")
            return Vocabulary(dict(enumerate(lines)), frozenset())
        added = {int(each["id"]): str(each["content"]) for each in parsed["added_tokens"] or ()}
        tokens = _numbered(parsed["model"]["vocab"]) | added
        return Vocabulary(tokens, frozenset(added.values())) if tokens else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # the tokenizers library says what is wrong with it


def _numbered(vocab: Any) -> dict[int, str]:
    if isinstance(vocab, dict):
        return {int(number): str(token) for token, number in vocab.items()}
    return {number: str(token) for number, (token, _) in enumerate(vocab)}  # with scores: Unigram


def vocabulary_in(folder: Path | None) -> Vocabulary | None:
    """Return the tokens of a folder's tokenizer; None: it has none that can be read."""
    for name in (_MAIN_FILE, _LINES_FILE) if folder is not None else ():
        assert folder is not None
        if (folder / name).is_file():
            try:
                return parse_vocabulary((folder / name).read_bytes())
            except OSError:
                return None  # opening it for tokenization says why
    return None


def vocabulary_of_recipe(recipe: Recipe, model_dir: Path | None) -> Vocabulary | None:
    """Return the tokens that a recipe will train on, with those that it adds.

    None: they are known once the data is prepared. The tokenizer is trained first, or is on the
    hub.
    """
    data = recipe.data
    if data.tokenizer == "train" or not reads_tokens(recipe):
        return None
    named = Path(data.tokenizer).expanduser()
    folder = model_dir if data.tokenizer == "auto" else named.parent if named.is_file() else named
    found = vocabulary_in(folder)
    return None if found is None else found.with_tokens(data)


def reads_tokens(recipe: Recipe) -> bool:
    """Whether a recipe trains on text."""
    return task_row(recipe.task.name).reads != "images"


def check_tokens(
    recipe: Recipe, given: Vocabulary | None, *, rows: int, size: int, model_dir: Path | None
) -> list[Problem]:
    """Find why a tokenizer is not that of the model, or the model's with further tokens.

    Args:
        given: Its tokens; None: only their number is known.
        rows: Rows of the model's embedding, before any are added.
        size: Largest id of the tokenizer, and one.
        model_dir: The model's own files.
    """
    data = recipe.data
    is_named = (
        data.tokenizer not in ("auto", "train") and not DATA_FORMATS[data.format].holds_samples
    )
    own = vocabulary_in(model_dir) if is_named and recipe.model.weights != "random" else None
    if given is not None and own is not None:
        difference = difference_of(own, given)
        if difference:
            text = (
                f"={data.tokenizer} is not the tokenizer of {model_dir}: {difference}. The rows of "
                "the embedding belong to the model's own tokens. Use data.tokenizer=auto, or add "
                "tokens to the model's own tokenizer: data.add_special_tokens or data.add_tokens."
            )
            return [Problem("data.tokenizer", text)]
    elif size > rows:
        return check_vocabulary(
            tokenizer=data.tokenizer, vocab_size=size, rows=rows, added=_added_from(given, rows)
        )
    return []


def _added_from(given: Vocabulary | None, rows: int) -> bool:
    """Whether all tokens behind the rows of an embedding were added to a tokenizer."""
    if given is None:
        return False
    return all(token in given.added for number, token in given.tokens.items() if number >= rows)


def difference_of(own: Vocabulary, given: Vocabulary) -> str:
    """Say which of the model's tokens have another meaning, or are missing; empty: none."""
    changed = [
        number
        for number, token in own.tokens.items()
        # a reserved token may get another name
        if given.tokens.get(number, token) != token
        and not (token in own.added and given.tokens[number] in given.added)
    ]
    missing = [number for number in own.tokens if number not in given.tokens]
    parts = []
    if changed:
        shown = [
            f"{number} is {given.tokens[number]!r}, not {own.tokens[number]!r}"
            for number in sorted(changed)[:_SHOWN]
        ]
        count = f"{len(changed):,} of {len(own.tokens):,} ids are other tokens"
        parts.append(f"{count} ({', '.join(shown)})")
    if missing:
        shown = [repr(own.tokens[number]) for number in sorted(missing)[:_SHOWN]]
        parts.append(f"it lacks {len(missing):,} of the model's tokens ({', '.join(shown)})")
    return " and ".join(parts)


def check_vocabulary(
    *, tokenizer: str, vocab_size: int, rows: int | None, added: bool = False
) -> list[Problem]:
    """Find a vocabulary that the model has no room for; known once there is a tokenizer.

    Args:
        tokenizer: ``data.tokenizer``.
        rows: Rows of the model's embedding; None: as many as the tokenizer wants.
        added: Whether the tokens without a row were added to the tokenizer, so the model grows.
    """
    if rows is None or vocab_size <= rows or (added and tokenizer != "train"):
        return []
    text = f"={tokenizer} has {vocab_size:,} tokens, the model's embedding has {rows:,} rows"
    if tokenizer == "train":
        text += f". Use a smaller vocabulary: data.vocab_size={rows}."
    else:
        text += (
            ", and not all tokens without a row were added to it, so it is another model's "
            "tokenizer. Use the model's own: copy its tokenizer.json into the model's folder, and "
            "set data.tokenizer=auto."
        )
    return [Problem("data.tokenizer", text)]

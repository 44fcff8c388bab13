"""Columns of rows with labels: which hold the text, and which the label."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardyard.data.byte_ranges import escape_text
from shardyard.data.readers.columns import check_surrogates, kind_of, some_keys
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

PAIRS: tuple[tuple[str, str], ...] = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "passage"),
)
"""Columns of two texts; those of GLUE and SuperGLUE."""
TEXTS = ("text", "sentence", "content", "review")
"""Columns of one text, where there are no two."""
LABELS = ("label", "labels", "score")
TOKENS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags")

KEYS_OF_SAMPLES = ("text", "text_pair", "label")
KEYS_OF_TOKENS = ("tokens", "ner_tags")
"""Names of columns that ``data.keys`` maps others to."""


class LabelledRow(NamedTuple):
    """One row of a dataset with labels."""

    texts: list[str]
    """A text, or two; with labels of tokens, the words."""
    label: Any
    """A number or a word; with labels of tokens, one of each word."""


def sample_row(row: Any, location: object) -> str:
    """Return the texts and the label of a row, as JSON.

    Raises:
        SourceError: A column is missing, or holds something else.
    """
    keys = _text_columns(_object(row, location), location)
    label = _first(row, LABELS, location, "label", "label")
    texts = [_text(row, key, location) for key in keys]
    value = row[label]
    if value is None or not isinstance(value, int | float | str) or value == "":
        found = "is empty" if value in (None, "") else f"holds {kind_of(value)}"
        raise SourceError(
            f"{location}: {label!r} {found}. A label is a number or a word: take rows without one "
            "out."
        )
    return json.dumps([texts, value], ensure_ascii=False)


def token_row(row: Any, location: object) -> str:
    """Return the words and their labels, as JSON; raises as ``sample_row``."""
    row = _object(row, location)
    tokens = _first(row, TOKENS, location, "words", "tokens")
    tags = _first(row, TAGS, location, "labels of words", "ner_tags")
    words, labels = row[tokens], row[tags]
    for key, value, kinds in ((tokens, words, str), (tags, labels, int | str)):
        is_list = isinstance(value, list) and all(isinstance(each, kinds) for each in value)
        if not is_list or not value:
            raise SourceError(
                f"{location}: {key!r} holds {kind_of(value)}, not a list of "
                f"{'words' if key == tokens else 'numbers or words'}. Write rows as JSON lines: "
                '{"tokens": ["In", "Paris"], "ner_tags": ["O", "B-LOC"]}.'
            )
    if len(words) != len(labels):
        raise SourceError(
            f"{location}: {len(words)} words in {tokens!r}, and {len(labels)} labels in {tags!r}. "
            "Each word has one label: fix the row."
        )
    for word in words:
        check_surrogates(word, location, f"{tokens!r}")
    return json.dumps([words, labels], ensure_ascii=False)


def parse_row(text: str) -> LabelledRow:
    """Return the row of a text that ``sample_row`` or ``token_row`` made."""
    texts, label = parse_json(text)
    return LabelledRow(texts, label)


def _object(row: Any, location: object) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise SourceError(f"{location}: {kind_of(row)}, not an object with columns. Fix the line.")
    return row


def _text_columns(row: Mapping[str, Any], location: object) -> tuple[str, ...]:
    """Return the columns of the texts: of two where there are two."""
    if "text" in row:  # also where data.keys names another column
        return PAIRS[0] if "text_pair" in row else ("text",)
    pairs = [pair for pair in PAIRS if all(key in row for key in pair)]
    texts = [key for key in TEXTS if key in row]
    if len(pairs) == 1:
        return pairs[0]
    if not pairs and len(texts) == 1:
        return (texts[0],)
    found = [" and ".join(pair) for pair in pairs] or texts
    what = f"several columns of text ({', '.join(found)})" if found else "no column of text"
    raise SourceError(
        f"{location}: {what} (its columns: {some_keys(row)}). Name yours: "
        f"data.keys={{text: {_likely_text(row)}}}, and text_pair for a second one."
    )


def _likely_text(row: Mapping[str, Any]) -> str:
    texts = [key for key, value in row.items() if isinstance(value, str) and key.isidentifier()]
    return max(texts, key=lambda key: len(row[key]), default="COLUMN")


def _first(
    row: Mapping[str, Any], names: tuple[str, ...], location: object, what: str, key: str
) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise SourceError(
            f"{location}: no column of {what} (its columns: {some_keys(row)}). Name yours: "
            f"data.keys={{{key}: COLUMN}}."
        )
    return found


def _text(row: Mapping[str, Any], key: str, location: object) -> str:
    value = row[key]
    if not isinstance(value, str):
        shown = repr(escape_text(key))
        raise SourceError(f"{location}: {shown} holds {kind_of(value)}, not a text. Fix the row.")
    check_surrogates(value, location, repr(escape_text(key)))
    return value

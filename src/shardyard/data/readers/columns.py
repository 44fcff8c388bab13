"""Choice of the text of a document in a row: a JSON object or a row of a table."""

import json
from dataclasses import dataclass
from typing import Any

from shardyard.config.data_choices import ID_KEYS, TURN_KEYS, chat_rows_of
from shardyard.config.tasks import imported
from shardyard.data.byte_ranges import escape_text
from shardyard.errors import SourceError


@dataclass(frozen=True)
class TextOf:
    """Takes the text of a document from a row."""

    key: str = "text"
    """Key of the text, unless it is made of the whole row: ``data.text_key``."""
    whole_row: str | None = None
    """module:function (row, place) -> text; equal rows give equal text."""
    keys: tuple[tuple[str, str], ...] = ()
    """Key that the function reads, and the key of the rows that has it: ``data.keys``."""
    id_type: str = "uint16"
    """Numbers in a file of ids that does not say it: ``data.id_type``."""
    end_id: int | None = None
    """Id that ends a document in a file of ids; None: not known yet."""
    is_stream: bool = False
    """Whether rows are blocks cut from one stream: ``data.id_rows``."""

    def __call__(self, row: Any, location: object) -> str:
        """The text of a row.

        Raises:
            SourceError: It has none, or none that can be used.
        """
        if self.whole_row is None:
            return _text_under(row, location, self.key)
        if self.keys:
            row = _renamed(row, location, dict(self.keys))
        text: str = imported(self.whole_row)(row, location)
        return text


def _renamed(row: Any, location: object, keys: dict[str, str]) -> Any:
    """The row with its keys as the function reads them; those of messages and turns too.

    Raises:
        SourceError: A key of the row is not there.
    """
    if not isinstance(row, dict):
        return row
    own = {key: yours for key, yours in keys.items() if key not in TURN_KEYS}
    for key, yours in own.items():
        if yours not in row:
            raise SourceError(
                f"{location}: no key {escape_text(yours)!r} (its keys: {some_keys(row)}), which "
                f"data.keys reads as {key}. Correct data.keys or the line."
            )
    kept = {key: value for key, value in row.items() if key not in own.values() and key not in own}
    renamed = {**kept, **{key: row[yours] for key, yours in own.items()}}
    of_turn = {key: yours for key, yours in keys.items() if key in TURN_KEYS}
    if of_turn:
        for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
            if isinstance(renamed.get(name), list):
                renamed[name] = [_renamed_turn(turn, of_turn) for turn in renamed[name]]
    return renamed


def _renamed_turn(turn: Any, keys: dict[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    kept = {key: value for key, value in turn.items() if key not in keys.values()}
    return {**kept, **{key: turn[yours] for key, yours in keys.items() if yours in turn}}


def chat_hint(keys: Any) -> str:
    """Say that keys are those of chat rows; empty where they are not."""
    rows = chat_rows_of(list(keys))
    if not rows:
        return ""
    return f" These are chat rows ({rows[0]}): set data.format=chat (docs/chat.md)."


def _text_under(row: Any, location: object, text_key: str) -> str:
    """The text of a row.

    Raises:
        SourceError: It has none, or holds what is no character.
    """
    text = row.get(text_key) if isinstance(row, dict) else None
    if isinstance(text, str):
        check_surrogates(text, location, repr(escape_text(text_key)))
        return text
    if not isinstance(row, dict):
        found = f"{kind_of(row)}, not an object"
    elif text_key in row:
        found = f"{escape_text(text_key)!r} holds {kind_of(row[text_key])}, not a string"
    else:
        found = f"no key {escape_text(text_key)!r} (its keys: {some_keys(row)})"
    raise SourceError(f"{location}: {found}. {_setting_for(row)} or correct the line.")


def _setting_for(row: Any) -> str:
    """Return the likeliest fix of a row without the wanted text."""
    keys = set(row) if isinstance(row, dict) else set()
    if chat_rows_of(keys):
        return "It is a dialogue: set data.format=chat,"
    if keys & {*ID_KEYS}:
        return "It holds ids of a tokenizer: set data.format=token_ids,"
    texts = [
        key for key in sorted(keys, key=str) if isinstance(row[key], str) and key.isidentifier()
    ]
    if texts:
        return f"Set data.text_key={max(texts, key=lambda key: len(row[key]))},"
    return "Set data.text_key to the key that holds the text,"


def check_surrogates(text: str, location: object, what: str) -> None:
    """Raise where text holds half of a surrogate pair, which JSON can write.

    No encoding has such a half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{location}: {what} holds \\u{ord(text[error.start]):04x} as its character "
            f"{error.start + 1:,}: half of a surrogate pair, which is not a character. Its other "
            "half is missing, as when a text was cut in the middle of it. Fix or remove the line."
        ) from error


def kind_of(value: Any) -> str:
    """Describe a JSON value in a few words."""
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__}"
    if isinstance(value, str):
        return "a JSON string"
    return json.dumps(value)[:40]


def some_keys(keys: Any) -> str:
    """The first few of them."""
    named = [escape_text(key[:40]) for key in sorted(keys)]
    more = f", and {len(named) - 8} more" if len(named) > 8 else ""
    return (", ".join(named[:8]) + more) or "none"


# Values of JSON, and how one that is none is told.

_MOST_DIGITS = 4000
"""Python refuses to read longer integers, as that takes quadratic time."""


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


class _Decoder(json.JSONDecoder):
    """Python's own JSON decoder; nesting too deep for it counts as invalid JSON."""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        try:
            return super().raw_decode(s, idx)
        except RecursionError as error:
            why = "Lists or objects in one another, deeper than can be read"
            raise json.JSONDecodeError(why, s, idx) from error


DECODER = _Decoder(parse_int=_whole_number)


def not_json(location: object, error: json.JSONDecodeError, form: str) -> SourceError:
    """The error for what cannot be parsed.

    Args:
        form: What the file ought to hold, as a sentence.
    """
    return SourceError(
        f"{location}: not JSON ({error.msg}, column {error.colno:,}). {form} Fix or remove the "
        "line."
    )

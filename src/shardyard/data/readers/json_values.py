"""Values of JSON, and how one that is none is told."""

import json
from typing import Any

from shardyard.errors import SourceError

_MOST_DIGITS = 4000
"""Python refuses to read longer integers, as that takes quadratic time."""


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


class _Decoder(json.JSONDecoder):
    """As Python's own; what it can parse no further is no JSON for us."""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        try:
            return super().raw_decode(s, idx)
        except RecursionError as error:
            why = "Lists or objects in one another, deeper than can be read"
            raise json.JSONDecodeError(why, s, idx) from error


DECODER = _Decoder(parse_int=_whole_number)


def not_json(place: object, error: json.JSONDecodeError, form: str) -> SourceError:
    """The error for what cannot be parsed.

    Args:
        form: What the file ought to hold, as a sentence.
    """
    return SourceError(
        f"{place}: not JSON ({error.msg}, column {error.colno:,}). {form} Mend or remove the line."
    )

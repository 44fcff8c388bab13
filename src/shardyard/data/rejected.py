"""Count the dialogues that a chat template rejects, and end where they are too many."""

import math
from collections.abc import Sequence
from typing import Any

from shardyard.config.schema.data import Data
from shardyard.errors import SourceError

Records = Sequence[dict[str, Any]]
"""Records of finished pieces (``work_units.py``)."""


def check_rejected_in(records: Records, data: Data) -> None:
    """Apply ``check_rejected`` to the dialogues of finished pieces."""
    rejected, of = _rejected_in(records), _sections_in(records)
    check_rejected(rejected, data, of=of, example=_first(records))


def check_rejected(rejected: int, data: Data, *, of: int, example: str = "") -> None:
    """Raise where more dialogues are rejected by the template than may be left out.

    Args:
        of: Dialogues that there are.
        example: The first of them, with the reason; empty: it is not known any more.

    Raises:
        SourceError: More are, or all of them.
    """
    if not rejected or (rejected <= data.max_rejected * of and rejected < of):
        return
    share = math.ceil(10_000 * rejected / of) / 10_000
    first = f"{example} " if example else f"data.source={data.source!r}: "
    remedy = (
        "Choose another template with data.chat_template."
        if rejected == of
        else f"To leave them out, set data.max_rejected={share:g}; else correct the rows, or "
        "choose another template with data.chat_template."
    )
    raise SourceError(
        f"{first}The chat template rejects {rejected:,} of {of:,} dialogues ({share:.2%}), and "
        f"data.max_rejected is {data.max_rejected:g}. {remedy}"
    )


def _rejected_in(records: Records) -> int:
    """Rows that were rejected; none in records of earlier versions."""
    return sum(record.get("rejected", 0) for record in records)


def _sections_in(records: Records) -> int:
    return sum(record.get("sections", 0) for record in records)


def _first(records: Records) -> str:
    return next((row for record in records for row in record.get("first_rejected", ())), "")


def rejected_of(records: Records) -> dict[str, int]:
    """Return the counts of rejected rows; empty where no row was, as in older manifests."""
    rejected = _rejected_in(records)
    return {"rejected": rejected, "rejected_of": _sections_in(records)} if rejected else {}

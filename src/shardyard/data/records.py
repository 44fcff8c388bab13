"""Samples made elsewhere, with the tokens that are hidden: what prepared data keep of one.

A record is as many tokens as all others of its set, padding included, and two columns say of each
token what the arrays of the file say of it.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

from shardyard.data.byte_ranges import Section
from shardyard.data.encoders import Column, Encoded, PlainText
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

RECORD, HIDDEN = "record", "hidden"
"""Columns: what a token is in its record, and what stood there if it was hidden."""

OF_RECORD, IS_TEXT, SECOND, RANDOM_B = 1, 2, 4, 8
"""Bits of RECORD: a token of a record, and no [SEP] that ends a document; no padding; of segment 1;
the record's b is no continuation of its a."""
IGNORED = -100
"""As ``micro_batch.IGNORED``, which needs torch: workers that prepare data do without."""


def record_text(
    ids: list[int], *, length: int, second: list[int], hidden: list[tuple[int, int]], label: int
) -> str:
    """A record as text, which a reader hands to the encoder.

    Args:
        length: Tokens before the padding.
        second: Places of segment 1.
        hidden: Place and id of each token that was hidden.
        label: 1: b is no continuation of a.
    """
    return json.dumps([ids, length, second, hidden, label], separators=(",", ":"))


class Record(PlainText):
    """A record as tokens and columns."""

    columns: ClassVar[Mapping[str, Column]] = {
        RECORD: Column(dtype="|u1", begin=0, end=0),
        HIDDEN: Column(dtype="<i4", begin=IGNORED, end=IGNORED),
    }

    def encode(self, section: Section) -> list[Encoded]:
        """Raises:
        SourceError: An id is outside the vocabulary.
        """
        ids, length, second, places, label = parse_json(section.text)
        largest = max([*ids, *(token for _, token in places)])
        size = self.tokenizer.vocab_size
        if largest >= size:
            raise SourceError(
                f"{section.place}: there is token id {largest}, and the tokenizer has {size:,} "
                "tokens. Set data.tokenizer to the one that the files were made with."
            )
        every = OF_RECORD | (RANDOM_B if label else 0)
        kinds = [every | (IS_TEXT if place < length else 0) for place in range(len(ids))]
        hidden = [IGNORED] * len(ids)
        for place in second:
            kinds[place] |= SECOND
        for place, token in places:
            hidden[place] = token
        return [Encoded(ids, {RECORD: kinds, HIDDEN: hidden})]

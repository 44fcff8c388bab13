"""What ``data.format`` can say: one row each, without the code that does it."""

from dataclasses import dataclass

PLAIN_TEXT = "shardyard.data.encoders:PlainText"
SENTENCES = "shardyard.data.sentences:SentenceText"


@dataclass(frozen=True, kw_only=True)
class DataFormat:
    """How files are taken, and what is made of a document."""

    encoder: str
    """module:class of its ``data.encoders.Encoder``."""
    whole_row: str | None = None
    """module:function (row, place) -> text that is made of a whole row of a file; None: what stands
    under ``data.text_key``."""
    text: str | None = None
    """What a file of plain text is read as; None: as one document."""
    unknown: str | None = None
    """What a file of no known suffix is read as, by its row in ``data.formats``; None: refused."""


DATA_FORMATS: dict[str, DataFormat] = {
    "by_suffix": DataFormat(encoder=PLAIN_TEXT),
    "text": DataFormat(encoder=PLAIN_TEXT, unknown="text"),
    "sentences": DataFormat(encoder=SENTENCES),
    "documents": DataFormat(encoder=SENTENCES, text="documents", unknown="documents"),
}
"""``data.format`` -> its row."""

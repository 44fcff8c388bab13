"""What ``data.format`` can say: one row each, without the code that does it."""

from dataclasses import dataclass

PLAIN_TEXT = "shardyard.data.encoders:PlainText"
SENTENCES = "shardyard.data.sentences:SentenceText"
RECORDS = "shardyard.data.records:Record"


@dataclass(frozen=True, kw_only=True)
class DataFormat:
    """How files are taken, and what is made of a document."""

    encoder: str
    """module:class of its ``data.encoders.Encoder``."""
    whole_row: str | None = None
    """module:function (row, place) -> text that is made of a whole row of a file; None: what stands
    under ``data.text_key``."""
    only: str | None = None
    """What all files have to be, by the row in ``data.formats``; no other ``data.format`` takes it.
    None: files are what their suffixes say."""
    holds_ids: bool = False
    """Whether files hold ids of a tokenizer, which has to be named, and whole samples."""
    text: str | None = None
    """What a file of plain text is read as; None: as one document."""
    settings: tuple[str, ...] = ()
    """Those of ``data`` that this format alone reads."""
    options: tuple[str, ...] = ()
    """Those of them that its encoder is made with, and its tokens depend on."""
    ignores: tuple[str, ...] = ()
    """Those that mean nothing here."""
    unknown: str | None = None
    """What a file of no known suffix is read as, by its row in ``data.formats``; None: refused."""


DATA_FORMATS: dict[str, DataFormat] = {
    "by_suffix": DataFormat(encoder=PLAIN_TEXT),
    "text": DataFormat(encoder=PLAIN_TEXT, unknown="text"),
    "sentences": DataFormat(encoder=SENTENCES),
    "documents": DataFormat(encoder=SENTENCES, text="documents", unknown="documents"),
    "bert_h5": DataFormat(encoder=RECORDS, only="bert_h5", holds_ids=True),
    "chat": DataFormat(
        encoder="shardyard.data.chat:Dialogue",
        whole_row="shardyard.data.conversations:dialogue_text",
        settings=("chat_template", "loss_on", "loss_share", "max_rejected"),
        options=("loss_on",),
        ignores=("text_key", "bos"),
    ),
}
"""``data.format`` -> its row."""

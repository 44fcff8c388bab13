"""Words of ``data.tokenizer``, and kinds of tokenizer, without the library that trains one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardyard.config.schema.data import TokenizerKindName

TOKENIZER_WORDS = ("auto", "train")
"""Values of data.tokenizer that are neither a folder nor a hub name."""


@dataclass(frozen=True, kw_only=True)
class TokenizerKind:
    """A tokenizer that is trained on the corpus."""

    words: str
    begin: str | None
    """The token that it puts before a text."""


TOKENIZER_KINDS: "dict[TokenizerKindName, TokenizerKind]" = {
    "bpe": TokenizerKind(words="byte-level BPE", begin=None),
    "wordpiece": TokenizerKind(words="WordPiece without capitals", begin="[CLS]"),
    "wordpiece-cased": TokenizerKind(words="WordPiece with capitals", begin="[CLS]"),
}
"""``data.tokenizer_kind`` -> its row."""

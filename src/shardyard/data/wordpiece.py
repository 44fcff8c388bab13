"""WordPiece, BERT's tokenizer: trained on a corpus, or built from only a vocabulary file.

Words are cut at spaces and around punctuation; each is the longest pieces of the vocabulary
from its beginning on, later ones marked by ``##``. A word with a character that no piece has is
the one token [UNK].

Source: Devlin et al. 2019, arXiv:1810.04805, section 3, and its code (google-research/bert,
tokenization.py), which the tokenizers library follows.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_PREFIX = "##"
_LONGEST_WORD = 100
"""Characters; a longer word is [UNK] (tokenization.py: max_input_chars_per_word)."""
_ALPHABET_SHARE = 4
"""A vocabulary has room for so many times the characters that are taken: those of a Chinese corpus
would fill a small one. One of a script with spaces is in it twice: to begin a word, and within."""


def train_wordpiece(
    texts: Callable[[], Iterator[str]], *, vocab_size: int, lowercase: bool
) -> dict[str, bytes]:
    """Return files of a WordPiece tokenizer trained on texts, which are read twice.

    The same texts give the same bytes. The library's trainer by itself does not guarantee that.
    It numbers ``##c`` as a hash table lists words, and ties between pieces go by number
    (huggingface/tokenizers issue 1794). So the characters are counted first, and handed to it
    in order.

    Args:
        texts: Gives the same texts at every call.
        vocab_size: Entries wanted; a small corpus may give fewer.
        lowercase: Whether capitals and accents are dropped, as in BERT's uncased models.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    normalizer = _normalizer({"do_lower_case": lowercase})
    tokenizer.normalizer = normalizer
    # longer words are [UNK] whatever is learnt of them, and would take time with their square
    short = pre_tokenizers.FixedLength(length=_LONGEST_WORD)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), short])
    alphabet = _alphabet(map(normalizer.normalize_str, texts()), vocab_size // _ALPHABET_SHARE)
    within = [_PREFIX + character for character in alphabet if _joins(character, normalizer)]
    known = [*_SPECIAL, *alphabet, *within]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=known,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    return _files(vocabulary, {"do_lower_case": lowercase})


def from_vocabulary(content: bytes, config: Mapping[str, Any], *, name: str) -> dict[str, bytes]:
    """Files of the tokenizer whose vocab.txt this is: one entry a line, its id the line's number.

    Args:
        config: Of its tokenizer_config.json, {} where there is none: BERT's uncased then, as
            transformers takes it.
        name: What messages call the file.

    Raises:
        ValueError: It is no vocabulary of WordPiece; says why.
    """
    lines = content.decode().splitlines()
    vocabulary = {entry.rstrip("\n"): number for number, entry in enumerate(lines)}
    if len(vocabulary) != len(lines):
        twice = next(entry for entry, count in Counter(lines).items() if count > 1)
        raise ValueError(f"{name} has the entry {twice!r} twice")
    tokens = _special_tokens(config)
    missing = [token for token in tokens.values() if token not in vocabulary]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}, which a WordPiece vocabulary has")
    return _files(vocabulary, config)


def _alphabet(texts: Iterator[str], most: int) -> list[str]:
    """The most frequent characters, in the order of their code points."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    shown = [(-count, character) for character, count in counts.items() if not character.isspace()]
    return sorted(character for _, character in sorted(shown)[:most])


def _joins(character: str, normalizer: normalizers.BertNormalizer) -> bool:
    """Return whether a word can continue with it.

    Punctuation and Chinese characters are words of their own.
    """
    twice = normalizer.normalize_str(character * 2)
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(twice)) == 1


def _normalizer(config: Mapping[str, Any]) -> normalizers.BertNormalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """BERT's own, or those that a config names in another way."""
    named = {name: config.get(name, token) for name, token in zip(_NAMES, _SPECIAL, strict=True)}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
    }


def _files(vocabulary: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, bytes]:
    tokens = _special_tokens(config)
    unk, cls, sep = tokens["unk_token"], tokens["cls_token"], tokens["sep_token"]
    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unk))
    tokenizer.normalizer = _normalizer(config)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    tokenizer.add_special_tokens(list(tokens.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, vocabulary[token]) for token in (cls, sep)],
    )
    side: dict[str, Any] = {"do_lower_case": True, **config, **tokens}
    side["tokenizer_class"] = "BertTokenizer"
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json_bytes(side),
        "special_tokens_map.json": _json_bytes(tokens),
    }


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()

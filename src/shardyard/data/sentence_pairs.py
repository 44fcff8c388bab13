"""Pairs of texts as samples: ``[CLS] a [SEP] b [SEP]``; b follows a, or is another text.

A text is some sentences of one document. Sample i begins near token i x ``data.seq_len`` of
its split, at the first sentence there, and takes sentences until they fill it. They are cut in
two between sentences: a, and the b that follows it. In half the samples, and where there is
only one sentence, b is text from another document instead. One sample in ten is shorter, by a
random length, as inputs often are when a model is used. Samples that are too long lose tokens
of the longer text, from its beginning or its end at random.

Every draw is a function of (seed, split, epoch, sample): the same on any ranks, new in each
epoch, and never stored. The code of BERT draws once, when it writes its files, and writes some
duplicates of the corpus; a, b and the hidden tokens then repeat.

Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.2;
google-research/bert, create_pretraining_data.py. There a document is drawn for b with equal
chances. Here a token of the split is drawn. So long documents are as frequent among b as among
a, and b's document itself gives no hint. Shape suffix: L = tokens in a sample.
"""

# ruff: noqa: RUF001 - full stops and quotes of many scripts

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from tokenizers import Tokenizer

from shardyard.data.byte_ranges import TextSection
from shardyard.data.loader import IGNORED
from shardyard.data.order import GOLDEN, mix
from shardyard.data.samples import Sample
from shardyard.data.shards import Tokens, TokenShards
from shardyard.data.work_units import Column, Encoded, PlainText
from shardyard.errors import RequestError

# Where sentences end, and documents as sentences: a rule of our own, the same on every machine.
#
# A sentence ends behind ``. ! ?`` and their like in other scripts, with the quotes and brackets
# that close there, if a space follows and no small letter; behind the full stops of Chinese and
# Japanese without a space. A full stop ends none behind a single letter (``J. Smith``, ``e.g.``), a
# usual abbreviation (``Mr.``) or a number that begins a sentence (``2. Then``). A blank line ends a
# sentence, and so does a line end before an item of a list. Other line ends are spaces: lines are
# often broken by their length alone.
#
# After rules SB6 to SB11 of https://unicode.org/reports/tr29/ (version 16), which know no
# abbreviations. No package is needed, whose next version would cut the same text in another way.

SENTENCE = "sentence"
"""Name of the column."""
WITHIN, BEGINS, NO_SENTENCE = 0, 1, 2
"""Values of the column; tokens that begin or end a document have NO_SENTENCE."""

_END = re.compile(
    r"(?<![.!?…؟۔।॥։])[.!?…؟۔।॥։]++[\"'”’»)\]]*+(?=\s)"
    r"|[。！？｡]++[”’」』）]*+"
    r"|\n[^\S\n]*+\n"
    r"|\n(?=[^\S\n]*(?:[-*•+]|\d{1,3}[.)])\s)"
)
"""Each part is read once, also of a million dots: possessive, and begun at the first of a run."""
_SPACE = re.compile(r"\s++")
_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
"""A letter, or some with full stops between them."""
_LONGEST_WORD = 20
"""Characters before a full stop that are looked at."""
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "sgt", "capt", "lt", "st", "mt", "no",
    "nos", "vol", "vols", "fig", "figs", "eq", "ch", "sec", "pp", "ed", "eds", "vs", "cf",
    "approx", "al", "inc", "ltd", "co", "corp", "jr", "sr", "dept", "est", "bros", "hr", "fr",
    "nr", "bzw", "ca", "usw", "bd", "mme", "mlle",
}  # fmt: skip


def split_sentences(text: str) -> Iterator[str]:
    """The sentences of a text, one after the other: together they are the text, space included.

    The space between two belongs to the second, as the tokens of a byte-level BPE have it.
    """
    start, first = 0, _first_letter(text, 0)
    for found in _END.finditer(text):
        is_line = found[0][0] == "\n"
        stop = found.start() if is_line else found.end()
        if stop > first and (is_line or _ends(text, start, found)):
            yield text[start:stop]
            start, first = stop, _first_letter(text, stop)
    if start < len(text):
        yield text[start:]


def _first_letter(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether a sentence that began at ``start`` ends here."""
    behind = _first_letter(text, match.end())
    if behind > match.end() and text[behind : behind + 1].islower():
        return False
    if match[0] != ".":
        return True
    before = text[max(start, match.start() - _LONGEST_WORD) : match.start()]
    words = before.split()
    if not words or before[-1].isspace():
        return True
    word = words[-1].lstrip("([\"'“‘«").lower()
    is_item = len(words) == 1 and word.isdigit()
    return not (is_item or word in _ABBREVIATIONS or _LETTERS.fullmatch(word))


class SentenceText(PlainText):
    """A document as sentences: a column says of each token whether one begins with it."""

    columns: ClassVar[Mapping[str, Column]] = {
        SENTENCE: Column(dtype="|u1", begin=NO_SENTENCE, end=NO_SENTENCE)
    }

    def encode(self, section: TextSection) -> list[Encoded]:
        ids: list[int] = []
        marks: list[int] = []
        for sentence in split_sentences(section.text):
            own = self.tokenizer.encode(sentence)
            begins = BEGINS if sentence.strip() else WITHIN
            ids += own
            marks += [begins, *[WITHIN] * (len(own) - 1)][: len(own)]
        return [Encoded(ids, {SENTENCE: marks})]


FOLLOWS, RANDOM = 0, 1
"""next_sentence_labels: b is what follows a, or from another document."""

_SHORT = 0.1
_RANDOM = 0.5
_TRIES = 10
"""Draws of another document before the one behind is taken (create_pretraining_data.py)."""
_SHORTEST = 2
_MARKS = 3
"""[CLS] and twice [SEP]."""
_DRAWN = 1000
"""Pairs that the share of true ones is taken from."""


@dataclass(frozen=True)
class PairMarks:
    """Ids of the tokens that hold a pair together."""

    cls_id: int
    sep_id: int


def pair_marks(folder: Path) -> PairMarks:
    """Return the marks of a prepared dataset.

    Raises:
        RequestError: Its tokenizer has none.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cls_id, sep_id = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    if cls_id is None or sep_id is None:
        raise RequestError(
            f"the tokenizer of {folder} has no [CLS] or no [SEP], and pairs of texts are "
            "[CLS] a [SEP] b [SEP]. Set data.tokenizer to BERT's own, or have one trained: "
            "data.tokenizer=train data.tokenizer_kind=wordpiece."
        )
    return PairMarks(cls_id, sep_id)


class SentencePairs:
    """The ``SampleSet`` of pairs.

    Fields: tokens, targets (all ignored: what is hidden is the task's to say), positions and
    segments (L,); next_sentence_labels (), ignored of padding.
    """

    def __init__(self, shards: TokenShards, marks: PairMarks, *, seq_len: int, seed: int) -> None:
        """Args:
            seq_len: At least 5: the marks, and a token each.

        Raises:
            RequestError: The split has less than two documents.
            DataError: It was prepared without sentences.
        """
        shards.require_columns([SENTENCE])
        documents = shards.num_documents
        if documents < 2:
            raise RequestError(
                f"the {shards.split} split in {shards.folder} has {documents} documents; pairs of "
                "texts from two need two. Give more documents, or change data.eval_fraction."
            )
        self.num_samples = -(-(shards.num_tokens - 1) // seq_len)
        self._shards = shards
        self._marks = marks
        self._seq_len = seq_len
        self._max_tokens = seq_len - _MARKS
        self._key = mix(mix(seed) + (1 if shards.split == "train" else 2))

    def sample(self, index: int, epoch: int) -> Sample:
        """Return pair ``index`` of an epoch: a function of these two only."""
        of_epoch = _RandomStream(mix(self._key + epoch))
        rng = _RandomStream(mix(of_epoch.key + GOLDEN * (index + 1)))
        begin = index * self._seq_len + of_epoch.randint(self._seq_len)
        a, b, label = self._pair(begin % self._shards.num_tokens, rng)
        a, b = _truncate_pair(a, b, self._max_tokens, rng)
        fields = self.padding().fields
        split, length = len(a) + 2, len(a) + len(b) + _MARKS
        sep = [self._marks.sep_id]
        fields["tokens"][:length] = np.concatenate([[self._marks.cls_id], a, sep, b, sep])
        fields["segments"][split:length] = 1
        fields["next_sentence_labels"][()] = label
        return Sample(fields, length)

    def padding(self) -> Sample:
        """Return a padding sample: tokens 0 of segment 0, without anything to predict."""
        fields = {
            "tokens": np.zeros(self._seq_len, dtype=np.int64),
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": np.arange(self._seq_len, dtype=np.int64),
            "segments": np.zeros(self._seq_len, dtype=np.int64),
            "next_sentence_labels": np.array(IGNORED, dtype=np.int64),
        }
        return Sample(fields, 0)

    def _pair(self, near: int, rng: "_RandomStream") -> tuple[Tokens, Tokens, int]:
        """a and b, not yet cut, and what b is to a."""
        wanted = self._max_tokens
        if rng.uniform() < _SHORT:
            wanted = _SHORTEST + rng.randint(self._max_tokens - _SHORTEST + 1)
        begin = self._sentence_near(near)
        ends = self._sentence_ends(begin, wanted)
        cut = ends[rng.randint(len(ends) - 1)] if len(ends) > 1 else ends[0]
        a = self._shards.read(begin, cut)
        if len(ends) > 1 and rng.uniform() >= _RANDOM:
            return a, self._shards.read(cut, ends[-1]), FOLLOWS
        other = self._start_in_other_document(begin, rng)
        stop = self._sentence_ends(other, max(1, wanted - len(a)))[-1]
        return a, self._shards.read(other, stop), RANDOM

    def _sentence_near(self, position: int) -> int:
        """Return the start of the first sentence at or after a position.

        The end of the split is followed by its beginning. Within a sentence longer than a
        sample, return the position itself.
        """
        for _ in range(2 + self._shards.num_tokens // self._max_tokens):
            stop = min(position + self._max_tokens, self._shards.num_tokens)
            marks = self._shards.read(position, stop, SENTENCE)
            begins = np.flatnonzero(marks == BEGINS)
            if len(begins):
                return position + int(begins[0])
            if marks[0] != NO_SENTENCE:
                return position
            position = stop % self._shards.num_tokens
        raise RequestError(
            f"the {self._shards.split} split in {self._shards.folder} has no sentence: its "
            "documents are empty. Give documents with text."
        )

    def _sentence_ends(self, begin: int, target_tokens: int) -> list[int]:
        """Ends of the sentences from one that begins here on, in its document, until they have as
        many tokens as are wanted. One that is longer than a sample counts as several."""
        stop = min(begin + 2 * self._max_tokens, self._shards.num_tokens)
        marks = self._shards.read(begin, stop, SENTENCE)
        over = np.flatnonzero(marks == NO_SENTENCE)
        limit = int(over[0]) if len(over) else len(marks)
        ends: list[int] = []
        for end in [*(1 + np.flatnonzero(marks[1:limit] == BEGINS)).tolist(), limit]:
            while (last := ends[-1] if ends else 0) < min(end, target_tokens):
                ends.append(min(end, last + self._max_tokens))
        return [begin + end for end in ends]

    def _start_in_other_document(self, begin: int, rng: "_RandomStream") -> int:
        """Return the start of a sentence of another document."""
        document = self._shards.document_at(begin)
        for _ in range(_TRIES):
            found = self._sentence_near(rng.randint(self._shards.num_tokens))
            if found not in document:
                return found
        return self._sentence_near(document.stop % self._shards.num_tokens)


def share_of_true_pairs(folder: Path, *, seq_len: int) -> float | None:
    """Share of the pairs of a prepared training split whose second text follows the first, of up to
    1,000 that are drawn; None: the split is too small for a pair."""
    shards = TokenShards(folder, "train")
    if shards.num_documents < 2 or seq_len < _MARKS + 2:
        return None
    pairs = SentencePairs(shards, pair_marks(folder), seq_len=seq_len, seed=0)
    epochs = -(-_DRAWN // pairs.num_samples)
    labels = [
        int(pairs.sample(index, epoch).fields["next_sentence_labels"])
        for epoch in range(epochs)
        for index in range(min(pairs.num_samples, _DRAWN))
    ]
    return labels.count(FOLLOWS) / len(labels)


def _truncate_pair(
    a: Tokens, b: Tokens, max_tokens: int, rng: "_RandomStream"
) -> tuple[Tokens, Tokens]:
    """Both within ``max_tokens`` tokens: the longer one, at last both in turn, loses one by one."""
    most_a, most_b = max_tokens - max_tokens // 2, max_tokens // 2
    size_a = len(a) if len(a) <= most_a else max(most_a, max_tokens - len(b))
    size_b = len(b) if len(b) <= most_b else max(most_b, max_tokens - len(a))
    return _truncate(a, size_a, rng), _truncate(b, size_b, rng)


def _truncate(text: Tokens, size: int, rng: "_RandomStream") -> Tokens:
    """Return ``size`` tokens of a text; coins decide if its first or last tokens are dropped."""
    if size >= len(text):
        return text
    first = rng.binomial(len(text) - size)
    return text[first : first + size]


class _RandomStream:
    """Random numbers by a key and a counter, one after the other."""

    def __init__(self, key: int) -> None:
        self.key = key
        self._count = 0

    def _bits(self) -> int:
        self._count += 1
        return mix(self.key + self._count * GOLDEN)

    def uniform(self) -> float:
        """In [0, 1)."""
        return (self._bits() >> 11) * 2.0**-53

    def randint(self, limit: int) -> int:
        """From 0 to limit - 1, with equal chances but for one part in 2**64 / limit."""
        return self._bits() * limit >> 64

    def binomial(self, coins: int) -> int:
        """Return how many of these coins show heads."""
        number = 0
        for left in range(coins, 0, -64):
            number += (self._bits() >> max(0, 64 - left)).bit_count()
        return number

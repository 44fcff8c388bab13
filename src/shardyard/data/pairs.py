"""Pairs of texts as samples: ``[CLS] a [SEP] b [SEP]``, where b follows a, or is from elsewhere.

A text is some sentences of one document. Sample i begins near token i x ``data.seq_len`` of its
split, at the first sentence there, and takes sentences until they fill it. They are cut in two
between sentences: a, and the b that follows it. Of half the samples, and where there is one
sentence alone, b is text from another document instead. One sample in ten is shorter, by a length
drawn at random, as what a model is used for often is. What is too long loses tokens of the longer
text, from its beginning or its end at random.

Every draw is a function of (seed, split, epoch, sample): the same on any ranks, new in each epoch,
and nothing is kept of it. The code of BERT draws once, when it writes its files, and writes some
duplicates of the corpus; a, b and the tokens hidden then come again and again.

Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.2; google-research/bert,
create_pretraining_data.py. There a document is drawn for b with equal chances; here a token of the
split is, so that long documents are as frequent among b as they are among a, and b's document
itself tells nothing. Shape suffix: L = tokens in a sample.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from shardyard.data.micro_batch import IGNORED
from shardyard.data.order import GOLDEN, mix
from shardyard.data.samples import Sample
from shardyard.data.sentences import BEGINS, NO_SENTENCE, SENTENCE
from shardyard.data.shards import Tokens, TokenShards
from shardyard.errors import RequestError

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
    """Those of a prepared data set.

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
        self._room = seq_len - _MARKS
        self._key = mix(mix(seed) + (1 if shards.split == "train" else 2))

    def sample(self, index: int, epoch: int) -> Sample:
        """Pair ``index`` as it is in an epoch: a function of nothing else."""
        of_epoch = _Draws(mix(self._key + epoch))
        draws = _Draws(mix(of_epoch.key + GOLDEN * (index + 1)))
        begin = index * self._seq_len + of_epoch.below(self._seq_len)
        a, b, label = self._pair(begin % self._shards.num_tokens, draws)
        a, b = _cut(a, b, self._room, draws)
        fields = self.padding().fields
        split, length = len(a) + 2, len(a) + len(b) + _MARKS
        sep = [self._marks.sep_id]
        fields["tokens"][:length] = np.concatenate([[self._marks.cls_id], a, sep, b, sep])
        fields["segments"][split:length] = 1
        fields["next_sentence_labels"][()] = label
        return Sample(fields, length)

    def padding(self) -> Sample:
        """Tokens 0 of segment 0, with nothing to say of them."""
        fields = {
            "tokens": np.zeros(self._seq_len, dtype=np.int64),
            "targets": np.full(self._seq_len, IGNORED, dtype=np.int64),
            "positions": np.arange(self._seq_len, dtype=np.int64),
            "segments": np.zeros(self._seq_len, dtype=np.int64),
            "next_sentence_labels": np.array(IGNORED, dtype=np.int64),
        }
        return Sample(fields, 0)

    def _pair(self, near: int, draws: "_Draws") -> tuple[Tokens, Tokens, int]:
        """a and b, not yet cut, and what b is to a."""
        wanted = self._room
        if draws.share() < _SHORT:
            wanted = _SHORTEST + draws.below(self._room - _SHORTEST + 1)
        begin = self._sentence_near(near)
        ends = self._sentence_ends(begin, wanted)
        cut = ends[draws.below(len(ends) - 1)] if len(ends) > 1 else ends[0]
        a = self._shards.read(begin, cut)
        if len(ends) > 1 and draws.share() >= _RANDOM:
            return a, self._shards.read(cut, ends[-1]), FOLLOWS
        other = self._elsewhere(begin, draws)
        stop = self._sentence_ends(other, max(1, wanted - len(a)))[-1]
        return a, self._shards.read(other, stop), RANDOM

    def _sentence_near(self, position: int) -> int:
        """Where the first sentence begins at a position or behind it; behind the end of the split
        comes its beginning. Within one longer than a sample: the position itself."""
        for _ in range(2 + self._shards.num_tokens // self._room):
            stop = min(position + self._room, self._shards.num_tokens)
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

    def _sentence_ends(self, begin: int, wanted: int) -> list[int]:
        """Ends of the sentences from one that begins here on, in its document, until they have as
        many tokens as are wanted. One that is longer than a sample counts as several."""
        stop = min(begin + 2 * self._room, self._shards.num_tokens)
        marks = self._shards.read(begin, stop, SENTENCE)
        over = np.flatnonzero(marks == NO_SENTENCE)
        limit = int(over[0]) if len(over) else len(marks)
        ends: list[int] = []
        for end in [*(1 + np.flatnonzero(marks[1:limit] == BEGINS)).tolist(), limit]:
            while (last := ends[-1] if ends else 0) < min(end, wanted):
                ends.append(min(end, last + self._room))
        return [begin + end for end in ends]

    def _elsewhere(self, begin: int, draws: "_Draws") -> int:
        """Where a sentence of another document begins."""
        document = self._shards.document_at(begin)
        for _ in range(_TRIES):
            found = self._sentence_near(draws.below(self._shards.num_tokens))
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


def _cut(a: Tokens, b: Tokens, room: int, draws: "_Draws") -> tuple[Tokens, Tokens]:
    """Both within ``room`` tokens: the longer one, at last both in turn, loses one by one."""
    most_a, most_b = room - room // 2, room // 2
    size_a = len(a) if len(a) <= most_a else max(most_a, room - len(b))
    size_b = len(b) if len(b) <= most_b else max(most_b, room - len(a))
    return _part(a, size_a, draws), _part(b, size_b, draws)


def _part(text: Tokens, size: int, draws: "_Draws") -> Tokens:
    """So many tokens of a text; each that goes is its first or its last by a coin."""
    if size >= len(text):
        return text
    first = draws.heads(len(text) - size)
    return text[first : first + size]


class _Draws:
    """Random numbers by a key and a counter, one after the other."""

    def __init__(self, key: int) -> None:
        self.key = key
        self._count = 0

    def _bits(self) -> int:
        self._count += 1
        return mix(self.key + self._count * GOLDEN)

    def share(self) -> float:
        """In [0, 1)."""
        return (self._bits() >> 11) * 2.0**-53

    def below(self, limit: int) -> int:
        """From 0 to limit - 1, with equal chances but for one part in 2**64 / limit."""
        return self._bits() * limit >> 64

    def heads(self, coins: int) -> int:
        """How many of so many coins show heads."""
        number = 0
        for left in range(coins, 0, -64):
            number += (self._bits() >> max(0, 64 - left)).bit_count()
        return number

"""Which tokens are hidden: the published shares, the same in every micro-batch, never padding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.errors import RequestError
from shardyard.models.attention import document_mask
from shardyard.models.random import keep_mask, key_of, random_bits
from shardyard.tasks.masked_lm import Masking, mark_ids, mask_token_id

MASK_ID = 1000
MASKING = Masking(seed=3, split="train", mask_id=MASK_ID, vocab_size=1000)
LENGTH = 512


def _text(samples: range, *, valid: int = LENGTH) -> MicroBatch:
    tokens = torch.stack([(torch.arange(LENGTH) * 7 + sample * 131) % 1000 for sample in samples])
    targets = tokens.roll(-1, dims=1)
    targets[:, valid:] = IGNORED
    positions = torch.arange(LENGTH).expand_as(tokens)
    rows = torch.tensor(list(samples))
    fields = {"tokens": tokens, "targets": targets, "positions": positions}
    return MicroBatch(fields=fields, samples_B=rows, work=len(rows) * valid)


def _lengths(batch: MicroBatch, *, valid: int = LENGTH) -> torch.Tensor:
    return torch.full((len(batch.samples_B),), valid)


def _hidden(batch: MicroBatch, *, valid: int = LENGTH) -> MicroBatch:
    return MASKING(batch, _lengths(batch, valid=valid))


def test_hidden_tokens_have_the_published_shares() -> None:
    before = _text(range(200))
    after = _hidden(before)
    chosen = after["targets"] != IGNORED
    assert torch.equal(after["targets"][chosen], before["tokens"][chosen])
    assert torch.equal(after["tokens"][~chosen], before["tokens"][~chosen])
    count = int(chosen.sum())
    assert count / chosen.numel() == pytest.approx(0.15, abs=0.005)
    seen, original = after["tokens"][chosen], before["tokens"][chosen]
    assert float((seen == MASK_ID).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float((seen == original).float().mean()) == pytest.approx(0.1, abs=0.01)
    others = seen[(seen != MASK_ID) & (seen != original)]
    assert others.min() >= 0 and others.max() < 1000
    assert len(set(others.tolist())) > 700  # drawn from all of the vocabulary


def test_a_sample_is_masked_alike_in_every_micro_batch_and_anew_in_each_epoch() -> None:
    together, alone = _hidden(_text(range(4))), _hidden(_text(range(2, 3)))
    assert torch.equal(together["tokens"][2:3], alone["tokens"])
    assert torch.equal(together["targets"][2:3], alone["targets"])
    assert not torch.equal(together["targets"][0] != IGNORED, together["targets"][1] != IGNORED)


def test_padding_is_never_hidden() -> None:
    after = _hidden(_text(range(8), valid=100), valid=100)
    assert (after["targets"][:, :100] != IGNORED).any()
    assert (after["targets"][:, 100:] == IGNORED).all()


def test_no_text_attends_to_padding() -> None:
    after = _hidden(_text(range(2), valid=100), valid=100)
    may_attend = document_mask(after["positions"], is_causal=False)[:, 0]
    assert may_attend[:, :100, :100].all()
    assert not may_attend[:, :100, 100:].any()
    assert may_attend.any(dim=2).all()  # a token that saw nothing would be no number


def test_what_holds_samples_together_is_never_hidden() -> None:
    before = _text(range(200))
    marks = tuple(before["tokens"][0, :300].tolist())  # three tokens of ten
    after = replace(MASKING, marks=marks)(before, _lengths(before))
    is_mark = torch.isin(before["tokens"], torch.tensor(marks))
    is_hidden = after["targets"] != IGNORED
    assert not is_hidden[is_mark].any()
    assert float(is_hidden[~is_mark].float().mean()) == pytest.approx(0.15, abs=0.01)
    every = replace(MASKING, marks=tuple(range(1000)))(before, _lengths(before))
    assert (every["targets"] == IGNORED).all() and torch.equal(every["tokens"], before["tokens"])


def test_the_marks_are_those_of_bert_that_a_tokenizer_has(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words = {"a": 0, "[MASK]": 1, "[SEP]": 2, "[CLS]": 3}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(path))
    assert mark_ids(path) == (3, 2)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    assert mark_ids(path) == ()


def test_a_sample_that_has_text_has_a_hidden_token_and_one_without_has_none() -> None:
    """At 15 %, one of eleven tokens: a sixth of the samples of eleven would have none."""
    for length in (1, 2, 11):
        after = _hidden(_text(range(300), valid=length), valid=length)
        counts = (after["targets"] != IGNORED).sum(dim=1)
        assert int(counts.min()) == 1
        assert (after["targets"][:, length:] == IGNORED).all()
    places = (_hidden(_text(range(300), valid=2), valid=2)["targets"] != IGNORED).sum(dim=0)
    assert places[0] > 120 and places[1] > 120  # either of two, not always the first
    assert (_hidden(_text(range(3), valid=0), valid=0)["targets"] == IGNORED).all()


def test_where_some_are_hidden_no_other_is_added_for_it() -> None:
    """Runs that were begun before go on with what was hidden."""
    before = _text(range(50), valid=100)
    key = random_bits(key_of(3, "masking", "train"), before.samples_B)[:, None]
    drawn = ~keep_mask(key, 3 * torch.arange(100), drop=0.15)
    assert drawn.any(dim=1).all()
    assert torch.equal(_hidden(before, valid=100)["targets"][:, :100] != IGNORED, drawn)


def test_the_last_token_is_hidden_as_often_as_others_if_a_document_ends_there() -> None:
    before = _text(range(400), valid=100)
    before["targets"][:, 99] = IGNORED  # documents apart: it predicts no first token
    hidden = (_hidden(before, valid=100)["targets"] != IGNORED).float().mean(dim=0)
    assert float(hidden[99]) == pytest.approx(0.15, abs=0.05)


def test_the_mask_token_is_the_tokenizers_own_or_the_last_row(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "[MASK]": 1}, unk_token="a")).save(str(path))
    assert mask_token_id(path, vocab_size=10, tokenizer_size=2) == 1
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    assert mask_token_id(path, vocab_size=10, tokenizer_size=2) == 9
    with pytest.raises(RequestError, match=r"none of \[MASK\], <mask>.*smaller data.vocab_size"):
        mask_token_id(path, vocab_size=2, tokenizer_size=2)

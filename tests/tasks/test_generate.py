"""The next token of a sample of text."""

import torch

from shardyard.tasks.causal_lm import _next_token, possible


def test_rows_beyond_the_tokenizer_are_never_drawn() -> None:
    logits_V = torch.tensor([1.0, 2.0, 9.0, 0.0, 9.0])  # a hole at 2, padding at 4
    left_V = possible(logits_V, [0, 1, 3])
    assert _next_token(left_V, 0.0, torch.Generator()) == 1
    draw = torch.Generator().manual_seed(0)
    assert {_next_token(left_V, 1.0, draw) for _ in range(200)} == {0, 1, 3}
    assert torch.softmax(left_V, 0)[[0, 1, 3]].sum() == 1
    assert torch.equal(possible(logits_V, None), logits_V)

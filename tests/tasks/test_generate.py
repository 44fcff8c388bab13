"""The next token of a sample of text."""

import math

import torch

from shardyard.tasks.causal_lm import _next_token, possible


def test_rows_beyond_the_tokenizer_are_never_drawn() -> None:
    logits_V = torch.tensor([1.0, 2.0, 9.0, 0.0, 9.0])  # a hole at 2, padding at 4
    left_V = possible(logits_V, [0, 1, 3])
    assert _next_token(left_V, 0.0, 0, torch.Generator()) == 1
    draw = torch.Generator().manual_seed(0)
    assert {_next_token(left_V, 1.0, 0, draw) for _ in range(200)} == {0, 1, 3}
    assert torch.softmax(left_V, 0)[[0, 1, 3]].sum() == 1
    assert torch.equal(possible(logits_V, None), logits_V)


def test_only_the_likeliest_tokens_are_drawn_by_their_probability() -> None:
    logits_V = torch.tensor([1.0, 2.5, -torch.inf, 0.0, 3.0, 2.0])
    draw, other = (torch.Generator().manual_seed(7) for _ in range(2))
    found = [_next_token(logits_V, 0.7, 3, draw) for _ in range(3000)]

    weights = [0.0] * 6
    for token in sorted(range(6), key=lambda each: -float(logits_V[each]))[:3]:
        weights[token] = math.exp(float(logits_V[token]) / 0.7)
    shares = [weight / sum(weights) for weight in weights]
    plain = [int(torch.multinomial(torch.tensor(shares), 1, generator=other)) for _ in range(3000)]
    assert found == plain
    assert all(abs(found.count(token) / 3000 - shares[token]) < 0.03 for token in range(6))


def test_no_limit_and_one_above_the_vocabulary_are_the_same_draw() -> None:
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1))
    drawn = [
        [_next_token(logits_V, 1.0, top_k, draw) for _ in range(100)]
        for top_k in (0, 50, 1000)
        for draw in [torch.Generator().manual_seed(3)]
    ]
    assert drawn[0] == drawn[1] == drawn[2] and len(set(drawn[0])) > 10


def test_one_likeliest_token_is_the_greedy_one() -> None:
    logits_V = torch.tensor([0.0, 2.0, 1.9])
    draw = torch.Generator().manual_seed(0)
    assert {_next_token(logits_V, 5.0, 1, draw) for _ in range(50)} == {1}

"""How much of a text is hidden, for those who hide it and those who plan for it.

Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.
"""

MASKED_SHARE = 0.15
"""Of the tokens of a text, those that a masked language model predicts."""

TILE = 64
"""Predicted tokens are computed in multiples of it: matrix products work in tiles, and one size
serves steps that hide a few more or less."""


def predicted_rows(tokens: int) -> int:
    """Tokens that the head computes of so many, where they hide as many as on average."""
    return TILE * max(1, round(tokens * MASKED_SHARE / TILE))

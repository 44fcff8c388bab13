"""Inputs of a model of a known family.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes, S =
places for documents of a sample.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Inputs of a model for one micro-batch."""

    x: Tensor
    """Token ids (B, l) for a model or its first stage, else a hidden state."""
    positions_BL: Tensor
    """Positions in the whole samples, also where this rank computes a part of them."""
    samples_B: Tensor
    """Position of each sample in the stream, which dropout goes by."""
    segments_BL: Tensor | None = None
    """Row of the table of token types that is added to each token. None: the first for all."""
    predicted_1N: Tensor | None = None
    """Tokens that the head computes, of those (B x l) whose residual stream this rank holds.

    None: all.
    """
    targets: Tensor | None = None
    """For a head that makes the sum of losses itself (``parallel/loss.py``), one for each
    token that it computes; None: logits are asked for."""
    starts_BS: Tensor | None = None
    """Starts of documents (``document_starts``), for a model that attends by their lengths."""
    lengths_B: Tensor | None = None
    """Tokens of each sample, which padding follows; None: all samples are full."""

    def without_weight(self) -> "Inputs":
        """Return the same tokens as rows of padding, which have no weight."""
        return self._replace(samples_B=torch.full_like(self.samples_B, -1))

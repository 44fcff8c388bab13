"""Attention, as a function that transformers calls by name.

Our own, for three reasons: transformers' mask code asks the device whether positions restart, which
stalls an accelerator at every forward pass; a mask of documents must come from us anyway; and where
a sample is split over ranks, attention is where they meet. So what the models hand through as their
attention mask is here the function to call.

Shape suffixes: B = samples, H = heads, K = KV heads, L = tokens, E = head width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "shardyard"


class Attention(Protocol):
    """How the tokens of one micro-batch attend to each other."""

    def __call__(
        self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, /, *, scale: float
    ) -> Tensor:
        """Attention output (B, H, L, E)."""


@dataclass(frozen=True)
class SampleAttention:
    """Attention within whole samples."""

    mask_B1LL: Tensor | None
    """True where a token may attend; None: to all earlier ones if causal, else to all."""
    is_causal: bool

    def __call__(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, *, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(
            q_BHLE,
            k_BKLE,
            v_BKLE,
            attn_mask=self.mask_B1LL,
            is_causal=self.is_causal and self.mask_B1LL is None,
            scale=scale,
            enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1],
        )


def sample_attention(
    positions_BL: Tensor, *, is_causal: bool, attend_across: bool
) -> SampleAttention:
    """Attention of whole samples; a document begins wherever the position is 0."""
    if attend_across:
        return SampleAttention(None, is_causal)
    return SampleAttention(document_mask(positions_BL, is_causal=is_causal), is_causal)


def document_mask(
    positions_BL: Tensor, *, is_causal: bool = True, queries: slice = slice(None)
) -> Tensor:
    """True where a token may attend: in its document, and earlier if causal.

    Works without asking the device anything.

    Args:
        queries: Tokens whose rows are wanted; all by default.

    Returns:
        (B, 1, queries, L).
    """
    document_BL = documents(positions_BL)
    same_BqL = document_BL[:, queries, None] == document_BL[:, None, :]
    if not is_causal:
        return same_BqL[:, None]
    token_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    return (same_BqL & (token_L[queries, None] >= token_L))[:, None]


def documents(positions_BL: Tensor) -> Tensor:
    """Number of the document of each token (B, L); one begins wherever the position is 0."""
    return (positions_BL == 0).cumsum(dim=-1)


def _attend(
    module: nn.Module,
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    attention: Attention | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns (B, L, H, E)."""
    if attention is None:  # transformers' own forward pass, as after an export
        attention = SampleAttention(None, bool(module.is_causal))
    out_BHLE = attention(q_BHLE, k_BKLE, v_BKLE, scale=scaling)
    return out_BHLE.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)

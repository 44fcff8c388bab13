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
from torch.nn.attention.bias import CausalBias
from transformers import AttentionInterface

NAME = "shardyard"


class Attention(Protocol):
    """How the tokens of one micro-batch attend to each other."""

    def __call__(
        self,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        /,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention output (B, H, L, E).

        Args:
            window: A token sees itself and those before it, so many in all; None: all of them.
            softcap: c of c x tanh(score / c); None: scores are as they are.
        """


@dataclass(frozen=True)
class SampleAttention:
    """Attention within whole samples."""

    mask_B1LL: Tensor | None
    """True where a token may attend; None: to all earlier ones if causal, else to all."""
    is_causal: bool
    windowed_B1LL: Tensor | None = None
    """The same within the model's window, made once for all blocks; None: made when asked for."""

    def __call__(
        self,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        mask = self.mask_B1LL
        if window is not None and window < k_BKLE.shape[2]:
            mask = self.windowed_B1LL
            if mask is None:
                mask = within_window(self.mask_B1LL, window, k_BKLE)
        return attend(
            q_BHLE, k_BKLE, v_BKLE, mask=mask, is_causal=self.is_causal, scale=scale,
            softcap=softcap,
        )  # fmt: skip


def attend(
    q_BHqE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    *,
    mask: Any,
    is_causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of some queries, (B, H, q, E).

    Args:
        mask: True where a query may attend, or torch's causal bias; None: as ``is_causal`` says.
        is_causal: Queries are the last of the tokens, and see earlier ones alone.
        softcap: As of ``Attention``; scores are then held whole, as no fused kernel bends them.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q_BHqE,
            k_BKLE,
            v_BKLE,
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=scale,
            enable_gqa=q_BHqE.shape[1] != k_BKLE.shape[1],
        )
    if is_causal and (mask is None or isinstance(mask, CausalBias)):
        queries, length = q_BHqE.shape[2], k_BKLE.shape[2]
        mask = earlier(length, q_BHqE.device)[length - queries :]
    groups = (k_BKLE.shape[1], -1)
    scores = torch.unflatten(q_BHqE, 1, groups) @ k_BKLE[:, :, None].mT  # (B, K, H / K, q, L)
    scores = softcap * torch.tanh(scores * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask[:, None]), -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(v_BKLE.dtype)
    return (weights @ v_BKLE[:, :, None]).flatten(1, 2)


def sample_attention(
    positions_BL: Tensor, *, is_causal: bool, attend_across: bool, window: int | None = None
) -> SampleAttention:
    """Attention of whole samples; a document begins wherever the position is 0.

    Args:
        window: Of the model's blocks, or of some of them.
    """
    mask = None if attend_across else document_mask(positions_BL, is_causal=is_causal)
    windowed = None
    if window is not None and window < positions_BL.shape[1]:
        windowed = within_window(mask, window, positions_BL[:, None])
    return SampleAttention(mask, is_causal, windowed)


def within_window(mask: Tensor | None, window: int, of_tokens: Tensor) -> Tensor:
    """What a causal mask leaves within a window: True for a token and ``window`` - 1 before it.

    Args:
        mask: (B, 1, L, L); None: all earlier ones.
        of_tokens: (B, 1, L, ...), for device and length.
    """
    length = of_tokens.shape[2]
    near_LL = earlier(length, of_tokens.device, window)
    return near_LL[None, None] if mask is None else mask & near_LL


def earlier(length: int, device: torch.device, window: int | None = None) -> Tensor:
    """True for a token and those before it (L, L); with a window, for so many of them in all."""
    token_L = torch.arange(length, device=device)
    back_LL = token_L[:, None] - token_L
    return (back_LL >= 0) if window is None else (back_LL >= 0) & (back_LL < window)


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


def attend_as_asked(
    module: nn.Module,
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    attention: Attention | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns (B, L, H, E)."""
    if attention is None:  # transformers' own forward pass, as after an export
        attention = SampleAttention(None, bool(module.is_causal))
    out_BHLE = attention(
        q_BHLE, k_BKLE, v_BKLE, scale=scaling, window=sliding_window, softcap=softcap
    )
    return out_BHLE.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend_as_asked)

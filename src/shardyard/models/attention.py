"""Attention, as a function that transformers calls by name.

Our own, for three reasons: transformers' mask code asks the device whether positions restart, which
stalls an accelerator at every forward pass; a mask of documents must come from us anyway; and where
a sample is split over ranks, attention is where they meet. So what the models hand through as their
attention mask is here the function to call.

Shape suffixes: B = samples, H = heads, K = KV heads, L = tokens, E = head width, S = places for
documents of a sample, T = tokens of all samples.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "shardyard"

_SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 shares KV heads unasked."""


class Attention(Protocol):
    """Attention between the tokens of one micro-batch."""

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


@dataclass(frozen=True)
class AttentionByLength:
    """Causal flash attention by document lengths: no mask, and no masked score is computed."""

    cu_seqlens_N: Tensor
    """Start of each document among the tokens of all samples, int32 (B x S + 1).

    The last entry is the number of tokens.
    """

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
        assert softcap is None, "refused: config/formulas.py"
        samples, heads, length = q_BHLE.shape[:3]
        q_THE, k_TKE, v_TKE = (
            x.transpose(1, 2).flatten(0, 1) for x in (q_BHLE, k_BKLE, v_BKLE)
        )  # fmt: skip
        grouped: dict[str, Any] = {"enable_gqa": heads != k_BKLE.shape[1]} if _SAYS_GROUPED else {}
        out_THE = varlen_attn(
            q_THE, k_TKE, v_TKE, self.cu_seqlens_N, self.cu_seqlens_N, length, length, scale=scale,
            # tokens to the left of one, and to the right; -1: all
            window_size=(-1 if window is None else window - 1, 0), **grouped,
        )  # fmt: skip
        assert isinstance(out_THE, Tensor)
        return out_THE.view(samples, length, heads, -1).transpose(1, 2)


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
    """Compute the attention of some queries, (B, H, q, E).

    Args:
        mask: True where a query may attend, or torch's causal bias; None: as ``is_causal`` says.
        is_causal: Queries are the last of the tokens, and see only earlier ones.
        softcap: Same as in ``Attention``; scores are then held whole, as no fused kernel caps them.
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
    # The softmax is fp32 and its result not, as in transformers' own capped attention.
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


def attention_by_length(starts_BS: Tensor, length: int) -> AttentionByLength:
    """Attention of whole samples of ``length`` tokens, by ``document_starts``."""
    first_B1 = length * torch.arange(len(starts_BS), device=starts_BS.device)[:, None]
    cu_seqlens_N = F.pad((starts_BS + first_B1).flatten(), (0, 1), value=len(starts_BS) * length)
    return AttentionByLength(cu_seqlens_N.to(torch.int32))


def within_window(mask: Tensor | None, window: int, of_tokens: Tensor) -> Tensor:
    """Restrict a causal mask to a window: True for a token and the ``window`` - 1 before it.

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


def document_starts(positions_BL: Tensor, max_documents: int | None = None) -> Tensor:
    """Return the start of each document in its sample, padded with L for documents of no token.

    The tokens must be in host memory, because the number of documents must be known before a
    device receives them. That number is rounded up to a power of two, so that a compiler sees
    few shapes.

    Args:
        max_documents: Places of a sample, at least as many as it has documents; None: the fewest.

    Returns:
        (B, S), int32.
    """
    is_start_BL = positions_BL == 0
    # A document may continue from the sample before, and lengths must cover each token.
    is_start_BL[:, 0] = True
    if max_documents is None:
        max_documents = most_documents(positions_BL)
    samples, length = positions_BL.shape
    starts_BS = torch.full((samples, max_documents), length, dtype=torch.int32)
    rows, tokens = is_start_BL.nonzero(as_tuple=True)
    starts_BS[rows, is_start_BL.cumsum(dim=1)[rows, tokens] - 1] = tokens.to(torch.int32)
    return starts_BS


def most_documents(positions_BL: Tensor) -> int:
    """Documents of the sample that has most, rounded up to a power of two."""
    most = int((positions_BL[:, 1:] == 0).sum(dim=1).max()) + 1
    return 1 << (most - 1).bit_length()


def attention_forward(
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
    """Attend as transformers calls it; return (B, L, H, E)."""
    if attention is None:  # transformers' own forward pass, as after an export
        attention = SampleAttention(None, bool(module.is_causal))
    out_BHLE = attention(
        q_BHLE, k_BKLE, v_BKLE, scale=scaling, window=sliding_window, softcap=softcap
    )
    return out_BHLE.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)

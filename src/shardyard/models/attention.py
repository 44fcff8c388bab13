"""Causal attention, as a function that transformers calls by name.

Our own, for two reasons: transformers' mask code asks the device whether positions restart, which
stalls an accelerator at every forward pass; and a mask of documents must come from us anyway.

Shape suffixes: B = samples, H = heads, K = KV heads, L = tokens, E = head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "shardyard_causal"


def causal_attention(
    module: nn.Module,  # noqa: ARG001 - transformers passes it
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    mask_B1LL: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output as (B, L, H, E). Without a mask each token attends to all before it."""
    out_BHLE = F.scaled_dot_product_attention(
        q_BHLE,
        k_BKLE,
        v_BKLE,
        attn_mask=mask_B1LL,
        is_causal=mask_B1LL is None,
        scale=scaling,
        enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1],
    )
    return out_BHLE.transpose(1, 2).contiguous(), None


def document_mask(positions_BL: Tensor) -> Tensor:
    """(B, 1, L, L), True where a token may attend: earlier, and in the same document.

    A document begins wherever the position is 0. Works without asking the device anything.
    """
    document_BL = (positions_BL == 0).cumsum(dim=-1)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    length = positions_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=positions_BL.device).tril()
    return (same_BLL & causal_LL)[:, None]


AttentionInterface.register(NAME, causal_attention)

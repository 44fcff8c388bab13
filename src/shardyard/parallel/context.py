"""Context parallelism: each rank of a group computes a part of the tokens of every sample.

Only attention looks beyond them, so the ranks meet only there. The exchange has two
variants:

- ``keys_values``: each rank gathers the keys and values of all tokens and attends with all heads
  from its own. A sample is cut into 2 x cp chunks, and rank r has chunks r and 2 x cp - 1 - r:
  an early one, whose queries see little, and the late one that makes up for it. Causal
  attention is thus the same work on all ranks (Llama 3, arXiv:2407.21783, section 3.3.2).
- ``heads``: an all-to-all gives each rank all tokens of its share of the heads, another one gives
  the outputs back (DeepSpeed-Ulysses, arXiv:2309.14509). Heads are the same work for all
  tokens, so a rank has one contiguous run of tokens, in order.

Shape suffixes: B = samples, H = heads, K = KV heads, L = tokens of a sample, l = those of
this rank, c = tokens of a chunk, E = head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from shardyard.models.attention import (
    Attention,
    SampleAttention,
    attend,
    document_mask,
    earlier,
    sample_attention,
)
from shardyard.parallel.collectives import exchange, gather

Exchanged = Literal["keys_values", "heads"]

_HEADS, _TOKENS = 1, 2
"""Dimensions of (B, H, L, E)."""


def context_share(tokens_L: Tensor, *, exchanged: Exchanged, group: dist.ProcessGroup) -> Tensor:
    """Return those tokens of a sample that this rank computes, in its order."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if exchanged == "heads":
        return tokens_L.chunk(size)[rank]
    chunks = tokens_L.chunk(2 * size)
    return torch.cat([chunks[index] for index in _chunks_of(rank, size)])


def context_attention(
    length: int,
    *,
    exchanged: Exchanged,
    group: dist.ProcessGroup,
    is_causal: bool,
    attend_across: bool,
    regather_context_fn: Callable[[], Any] | None,
    window: int | None = None,
) -> Callable[[Tensor, Tensor | None], Attention]:
    """Return the attention for samples of ``length`` tokens that a group splits.

    Args:
        regather_context_fn: Contexts of a checkpoint that keeps attention. Keys and values of
            all tokens
            are then gathered again in the backward pass instead of kept in every block. None for
            blocks that are recomputed anyway.
        window: Window of the model's blocks, or of some of them.

    Returns:
        Function from the positions (B, L) of whole samples to their attention. A document begins
        wherever the position is 0, even if the starts of documents are not given.
    """
    if exchanged == "heads":
        of_whole = partial(
            sample_attention, is_causal=is_causal, attend_across=attend_across, window=window
        )
        return lambda positions_BL, _starts_BS: ExchangedHeads(of_whole(positions_BL), group)
    size = dist.get_world_size(group)
    width = length // (2 * size)
    starts = [index * width for index in _chunks_of(dist.get_rank(group), size)]
    ends = [start + width if is_causal else length for start in starts]
    if attend_across:
        # no matrix of what may attend, where the device has a kernel that needs none
        seen = tuple(
            ChunkMask(start, end, causal_lower_right(width, end) if is_causal else None)
            for start, end in zip(starts, ends, strict=True)
        )
        same_for_all = GatheredKeys(seen, group, regather_context_fn, is_causal=is_causal)
        return lambda _positions_BL, _starts_BS: same_for_all

    def of_documents(positions_BL: Tensor, _starts_BS: Tensor | None) -> Attention:
        seen = tuple(
            ChunkMask(
                start,
                end,
                document_mask(
                    positions_BL[:, :end], is_causal=is_causal, queries=slice(start, start + width)
                ),
            )
            for start, end in zip(starts, ends, strict=True)
        )
        return GatheredKeys(seen, group, regather_context_fn, is_causal=is_causal)

    return of_documents


@dataclass(frozen=True)
class ChunkMask:
    """Keys that the queries of one chunk attend to."""

    start: int
    """The chunk's first token."""
    end: int
    """They see no key from this token on."""
    mask: Any
    """Mask of (c, end): True where a query may attend, or torch's causal bias. None: everywhere."""

    def allowed(self, queries: int, window: int | None, device: torch.device) -> Any:
        """The mask within a window."""
        if window is None or window >= self.end:
            return self.mask
        near = earlier(self.end, device, window)[self.start : self.start + queries]
        return near if isinstance(self.mask, CausalBias) else self.mask & near


class GatheredKeys:
    """Attention from this rank's two chunks to the keys and values of all ranks.

    No dataclass: FSDP would look into it and cast torch's causal bias, which is then none any more.
    """

    def __init__(
        self,
        chunks: tuple[ChunkMask, ...],
        group: dist.ProcessGroup,
        regather_context_fn: Callable[[], Any] | None,
        *,
        is_causal: bool,
    ) -> None:
        self._chunks = chunks
        self._is_causal = is_causal
        self._group = group
        self._regather_context_fn = regather_context_fn

    def __call__(
        self,
        q_BHlE: Tensor,
        k_BKlE: Tensor,
        v_BKlE: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if self._regather_context_fn is None:
            return self._attend(q_BHlE, k_BKlE, v_BKlE, scale, window, softcap)
        # attention itself is kept: only what was gathered is let go and made again
        out_BHlE: Tensor = checkpoint(
            self._attend, q_BHlE, k_BKlE, v_BKlE, scale, window, softcap,
            use_reentrant=False, preserve_rng_state=False, context_fn=self._regather_context_fn,
        )  # fmt: skip
        return out_BHlE

    def _attend(
        self,
        q_BHlE: Tensor,
        k_BKlE: Tensor,
        v_BKlE: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        k_BKLE, v_BKLE = self._gather(k_BKlE, v_BKlE)
        outs_BHcE = []
        for q_BHcE, seen in zip(q_BHlE.chunk(2, _TOKENS), self._chunks, strict=True):
            k, v = k_BKLE[:, :, : seen.end], v_BKLE[:, :, : seen.end]
            mask = seen.allowed(q_BHcE.shape[_TOKENS], window, k.device)
            out_BHcE = attend(
                q_BHcE, k, v, mask=mask, is_causal=self._is_causal, scale=scale, softcap=softcap
            )
            outs_BHcE.append(out_BHcE)
        return torch.cat(outs_BHcE, _TOKENS)

    def _gather(self, k_BKlE: Tensor, v_BKlE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, in order; their gradients are summed over the ranks."""
        # chunks first: what is gathered along the first dimension need not be copied again
        halves = torch.unflatten(torch.stack([k_BKlE, v_BKlE]), 1 + _TOKENS, (2, -1))
        arrived = gather(halves.movedim(1 + _TOKENS, 0), 0, self._group).unbind()
        k_BKLE, v_BKLE = torch.cat([arrived[place] for place in self._chunk_order()], 1 + _TOKENS)
        return k_BKLE, v_BKLE

    def _chunk_order(self) -> list[int]:
        """Return the place of each chunk of a sample among those that arrive rank by rank."""
        size = dist.get_world_size(self._group)
        arriving = [index for rank in range(size) for index in _chunks_of(rank, size)]
        return [arriving.index(index) for index in range(2 * size)]


@dataclass(frozen=True)
class ExchangedHeads:
    """Attention in whole samples with this rank's share of the heads."""

    whole: SampleAttention
    group: dist.ProcessGroup

    def __call__(
        self,
        q_BHlE: Tensor,
        k_BKlE: Tensor,
        v_BKlE: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        size = dist.get_world_size(self.group)
        # fewer KV heads than ranks, or a remainder: each is sent to all ranks that need it
        times = size // math.gcd(size, k_BKlE.shape[_HEADS])
        if times > 1:
            k_BKlE, v_BKlE = (x.repeat_interleave(times, _HEADS) for x in (k_BKlE, v_BKlE))
        # one exchange for the three of them: to each rank its heads of q, then of k, then of v
        shares = [torch.unflatten(x, _HEADS, (size, -1)) for x in (q_BHlE, k_BKlE, v_BKlE)]
        heads = [share.shape[_HEADS + 1] for share in shares]
        sent = torch.cat(shares, _HEADS + 1).flatten(_HEADS, _HEADS + 1)
        q, k, v = torch.split(exchange(sent, _HEADS, _TOKENS, self.group), heads, _HEADS)
        out = self.whole(q, k, v, scale=scale, window=window, softcap=softcap)
        return exchange(out, _TOKENS, _HEADS, self.group)


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return a rank's chunks, of the 2 x size chunks of a sample."""
    return rank, 2 * size - 1 - rank

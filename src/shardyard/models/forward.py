"""Forward pass of a micro-batch through a model's modules, or those of one pipeline stage.

transformers' modules compute; Shardyard sets the order of calls. One code therefore serves
a whole model and a stage of it, and no code waits for the device. Facts about the samples
that the modules need come from outside.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes, D =
width, S = places for documents of a sample.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardyard.families.family import Family
from shardyard.models.attention import Attention
from shardyard.models.random import SampleKeys
from shardyard.models.submodules import blocks_of, part_of


class ForwardPass:
    """A model's forward method: token ids or a hidden state in, logits or a hidden state out."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        *,
        keys: SampleKeys,
        attention: Callable[[Tensor, Tensor | None], Attention],
        tokens_l: Tensor | None = None,
        around: Callable[..., AbstractContextManager[None]] | None = None,
        is_first: bool = True,
        logit_softcap: float | None = None,
        embedding_multiplier: float | None = None,
        logits_scaling: float | None = None,
        block_types: Sequence[str] = (),
    ) -> None:
        """Take a model whose parts are in place (a stage lacks some of them).

        Args:
            around: From a block, and whether it is first and last, to what is entered outside of
                all that wraps the block: recompute, compile, sharding.
            is_first: Whether it begins with tokens; a later stage may hold the table for its head.
            attention: From the positions of whole samples, and where their documents begin, to how
                their tokens attend.
            tokens_l: Indices in a sample of the tokens of this rank; None: all.
            logit_softcap: c of c x tanh(logit / c); None: logits are as they are.
            embedding_multiplier: Factor of each token's embedding; None: 1.
            logits_scaling: Divisor of the logits; None: 1.
            block_types: Type of each block of the whole model, for families whose angles differ.
        """
        self._scales_embedding = family.scales_embedding
        self._logit_softcap = logit_softcap
        self._embedding_multiplier = embedding_multiplier
        self._logits_scaling = logits_scaling
        self._embedding = part_of(model, family.embedding) if is_first else None
        self._positions = part_of(model, family.positions)
        self._token_types = part_of(model, family.token_types)
        self._embedding_norm = part_of(model, family.embedding_norm or family.embedding_end)
        self._rotary = part_of(model, family.rotary)
        blocks = blocks_of(model, family)
        self._blocks = list(blocks.values())
        numbers = [int(name.rpartition(".")[2]) for name in blocks]
        by_type = family.rotary_by_type
        self._types = [block_types[number] if by_type else None for number in numbers]
        self._norm = part_of(model, family.norm)
        self._head = part_of(model, family.head)
        self._pooler = part_of(model, family.pooler)
        self._pair_head = part_of(model, family.pair_head)
        self._pools = family.pools
        self._head_dropout = part_of(model, family.head_dropout)
        self._keys = keys
        self._attention = attention
        self._tokens_l = tokens_l
        self._around = around

    def set_sample_form(
        self, attention: Callable[[Tensor, Tensor | None], Attention],
        computed_l: Tensor | None, residual_l: Tensor | None,
    ) -> None:  # fmt: skip
        """Take samples of another length, or other documents in them, from now on.

        Args:
            computed_l: As ``tokens_l``, which this rank computes.
            residual_l: Of these, those whose residual stream it holds between matrices; None: all.
        """
        self._attention, self._tokens_l = attention, computed_l
        self._keys.computed_l, self._keys.tokens_l = computed_l, residual_l

    def __call__(
        self,
        x: Tensor,
        positions_BL: Tensor,
        samples_B: Tensor,
        segments_BL: Tensor | None = None,
        predicted_1N: Tensor | None = None,
        targets: Tensor | None = None,
        starts_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Any:
        """Compute logits or a sum of losses from ``Inputs``, or a hidden state for the next stage.

        Logits are (B, l, V), or (1, N, V) of tokens that are named, one of each sample for labels
        of samples. A model that judges pairs adds
        logits (B, 2) of the first token of each sample that this rank holds. Ignore these where
        that is not the sample's own first token.
        """
        self._keys.samples_B, self._keys.lengths_B = samples_B, lengths_B
        attention = self._attention(positions_BL, starts_BS)
        if self._embedding is not None:
            x = self._embed(x, positions_BL, segments_BL)
        given = self._angles(x, positions_BL)
        for block, block_type in zip(self._blocks, self._types, strict=True):
            with self._entered(block):
                x = block(x, attention_mask=attention, **given[block_type])
        if self._head is None:
            return x
        of_pairs_B2 = self._pair_logits(x)
        if predicted_1N is not None:
            # A masked model predicts few of its tokens: norm and head compute only those.
            x = x.flatten(0, 1).index_select(0, predicted_1N[0])[None]
        x = x if self._norm is None else self._norm(x)
        if self._logits_scaling is not None:
            # Of the head's input, which is narrower, and also where losses are made in the head.
            x = x / self._logits_scaling
        x = self._before_labels(x)
        if of_pairs_B2 is None:
            return self._logits(x) if targets is None else self._head(x, targets)
        if targets is None:
            return self._logits(x), of_pairs_B2
        return self._head(x, targets[:, : -len(of_pairs_B2)]), of_pairs_B2  # without the pairs' own

    def _angles(self, x: Tensor, positions_BL: Tensor) -> dict[str | None, dict[str, Any]]:
        """Return the arguments for the angles of each type of block; None: of all blocks."""
        if self._rotary is None:
            return {None: {}}
        positions_Bl = _at(positions_BL, self._tokens_l)
        return {
            each: {
                "position_embeddings": self._rotary(x, positions_Bl)
                if each is None
                else self._rotary(x, positions_Bl, each)
            }
            for each in dict.fromkeys(self._types)
        }

    def _pair_logits(self, x_BlD: Tensor) -> Tensor | None:
        if self._pooler is None or self._pair_head is None:
            return None
        of_pairs_B2: Tensor = self._pair_head(torch.tanh(self._pooler(x_BlD[:, 0])))
        return of_pairs_B2

    def _before_labels(self, x: Tensor) -> Tensor:
        """Return what a head over labels multiplies: pooled, and with a share of it dropped."""
        if self._pools:
            assert self._pooler is not None
            x = torch.tanh(self._pooler(x))  # (1, B, D)
        if self._head_dropout is None:
            return x
        # its masks go by sample, so each pooled sample is a row of one token
        x = x.transpose(0, 1) if self._pools else x
        x = self._head_dropout(x)
        return x.transpose(0, 1) if self._pools else x

    def _logits(self, x_BlD: Tensor) -> Tensor:
        assert self._head is not None
        logits_BlV: Tensor = self._head(x_BlD)
        cap = self._logit_softcap
        return logits_BlV if cap is None else cap * torch.tanh(logits_BlV / cap)

    def _entered(self, block: nn.Module) -> AbstractContextManager[None]:
        if self._around is None:
            return nullcontext()
        is_first, is_last = block is self._blocks[0], block is self._blocks[-1]
        return self._around(block, is_first=is_first, is_last=is_last)

    def _embed(self, tokens_Bl: Tensor, positions_BL: Tensor, segments_BL: Tensor | None) -> Tensor:
        assert self._embedding is not None
        x: Tensor = self._embedding(tokens_Bl)
        if self._scales_embedding:  # rounded as transformers does: 55.5 in bf16, and not 55.4256
            x = x * torch.full((), x.shape[-1] ** 0.5, dtype=x.dtype, device=x.device)
        if self._embedding_multiplier is not None:
            x = x * self._embedding_multiplier
        if self._token_types is not None:
            if segments_BL is None:
                segments = positions_BL.new_zeros(1, 1)
            else:
                segments = _at(segments_BL, self._keys.tokens_l)
            x = x + self._token_types(segments)
        if self._positions is not None:
            x = x + self._positions(_at(positions_BL, self._keys.tokens_l))
        return x if self._embedding_norm is None else self._embedding_norm(x)


def _at(positions_BL: Tensor, tokens: Tensor | None) -> Tensor:
    return positions_BL if tokens is None else positions_BL[:, tokens]


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

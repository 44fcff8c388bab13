"""Predict the next token: from a micro-batch to the sum of its token losses.

Shape suffixes: B = samples, L = tokens of a sample, l = those that this rank computes,
V = vocabulary, or this rank's part of it.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from shardyard.data.loader import MicroBatch
from shardyard.models.router_loss import RouterTotals
from shardyard.parallel.pipeline import Pipeline
from shardyard.parallel.vocab_loss import VocabLoss


class CausalLM:
    """Forward pass and loss of a causal language model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        token_losses: VocabLoss,
        router: RouterTotals | None = None,
        tokens_l: Tensor | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Args:
        model: With a pipeline, the modules of all stages of this rank.
        token_losses: Sum of the losses of logits (B, l, V) against targets (B, l).
        router: Where the model's routers count; None: it has none.
        tokens_l: Indices in a sample of the tokens of this rank; None: all.
        pipeline: The way through the stages of the model; None: the model is whole.
        """
        self.model = model
        self.pipeline = pipeline
        self.token_losses = token_losses
        self.router = router
        self.tokens_l = tokens_l

    @property
    def roots(self) -> Sequence[nn.Module]:
        """What is sharded as a whole: the stages of this rank, or the model."""
        return self.pipeline.modules if self.pipeline else [self.model]

    @property
    def held_twice(self) -> Collection[str]:
        """Names of parameters that both ends of the pipeline hold."""
        return self.pipeline.held_twice if self.pipeline else ()

    def inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of the model: token ids (B, l), and of whole samples positions and keys."""
        return self._mine(batch.tokens_BL), batch.positions_BL, batch.samples_B

    def targets(self, batch: MicroBatch) -> Tensor:
        """What the tokens of this rank predict (B, l)."""
        return self._mine(batch.targets_BL)

    def output(self, batch: MicroBatch) -> Tensor | None:
        """Logits (B, l, V) of a forward pass; None on ranks without the end of the model."""
        through = self.model if self.pipeline is None else self.pipeline.output
        logits_BlV: Tensor | None = through(*self.inputs(batch))
        return logits_BlV

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum of cross-entropies in nats over the predicted tokens of this rank, fp32.

        0 on ranks without the end of the model.
        """
        logits_BlV = self.output(batch)
        if logits_BlV is None:
            return torch.zeros((), device=batch.tokens_BL.device)
        return self.token_losses(logits_BlV, self.targets(batch))

    def _mine(self, x_BL: Tensor) -> Tensor:
        return x_BL if self.tokens_l is None else x_BL[:, self.tokens_l]

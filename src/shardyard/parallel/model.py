"""A model in its parallel form: what ``parallel/apply.py`` returns and tasks compute with."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardyard.data.loader import MicroBatch
from shardyard.models.forward import Inputs
from shardyard.models.moe import RouterWeight
from shardyard.parallel.loss import VocabLoss
from shardyard.parallel.pipeline import Pipeline
from shardyard.parallel.step_counters import Statistics


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model in its parallel form, and what is known of it outside."""

    model: nn.Module
    """With a pipeline, the modules of all stages of this rank."""
    token_losses: VocabLoss
    """Sum of the losses of logits (B, l, V) against targets (B, l)."""
    loss_in_model: bool = False
    """Whether the model returns that sum itself when it gets targets (``parallel/loss.py``)."""
    accepts_document_starts: bool = False
    """Whether it takes the starts of documents (``models/attention.py``)."""
    router_weight: RouterWeight | None = None
    """Weight of a mixture's router losses in each step. None if it has no routers."""
    statistics: Sequence[Statistics] = ()
    """Counts of its modules next to the loss."""
    tokens_l: Tensor | None = None
    """Indices in a sample of the tokens of this rank; None: all."""
    local_l: Tensor | None = None
    """Tokens whose residual stream is on this rank between matrices; None: all."""
    pipeline: Pipeline | None = None
    """The way through the stages of the model; None: it is whole."""
    call: Callable[[nn.Module, Inputs], Any] | None = None
    """Forward pass of a model whose forward method is not ours; None: it takes ``Inputs``."""
    before_batch: Callable[[MicroBatch], None] | None = None
    """Called before each micro-batch, in host memory; None: there is nothing to do."""

    @property
    def roots(self) -> Sequence[nn.Module]:
        """Modules that are sharded as a whole: the stages of this rank, or the model."""
        return self.pipeline.modules if self.pipeline else [self.model]

    @property
    def tied_across_stages(self) -> Collection[str]:
        """Names of parameters that both ends of the pipeline hold."""
        return self.pipeline.tied_across_stages if self.pipeline else ()

"""A module of the user's own, and the loss function of its owner."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.models.batch_norm import BY_MICRO_BATCH, BatchNorms
from shardyard.models.grad_scale import LossScale
from shardyard.parallel.fsdp import GradientSync, backward_all, reshard
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.loss_computation import Computation, LossSums

Loss = Callable[[Any, Any], tuple[Tensor, int | Tensor]]
"""(model, batch) -> sum of its losses, and how many they are."""


class CustomComputation(Computation[Any]):
    """Computes batches by a loss function."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        loss: Loss,
        *,
        loss_name: str,
        norms: BatchNorms | None = None,
        reads: Callable[[Any], tuple[Any, bool]] = lambda batch: (batch, True),
    ) -> None:
        """Take a module that is sharded.

        Args:
            loss_name: What messages call the loss function.
            norms: Its batch normalisations; None: it has none.
            reads: From a micro-batch to what the loss function is given of it, and whether it
                counts; one that does not is there so that ranks meet.
        """
        self.model = model
        self.roots = [model]
        self.loss_scale = LossScale()
        self._loss_function = loss
        self._loss_name = loss_name
        self._reads = reads
        self._norms = norms
        self.statistics = () if norms is None else (norms,)
        self.fixed_settings = {} if norms is None else {"optim.micro_batch": BY_MICRO_BATCH}
        self._tp = mesh.layout.tp
        self._is_counted = mesh.tensor_rank == 0
        self._sync = GradientSync(model, mesh)

    def backward(self, batches: Sequence[Any]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        counts: list[Tensor] = []
        losses = (self._loss(batch, counts) for batch in batches)
        total = backward_all(losses, self._sync, number=len(batches))
        self._sync.end_step()
        return LossSums(total, torch.stack(counts).sum())

    def forward(self, batches: Iterable[Any]) -> LossSums:
        """Run only forward passes."""
        counts: list[Tensor] = []
        losses = [self._loss(batch, counts).double() for batch in batches]
        reshard(self.roots)
        return LossSums(torch.stack(losses).sum(), torch.stack(counts).sum())

    def _loss(self, batch: Any, counts: list[Tensor]) -> Tensor:
        """This rank's part of a micro-batch's loss; ``counts`` gets that of its number."""
        read, has_weight = self._reads(batch)
        if self._norms is not None:
            self._norms.is_weightless, self._norms.counts = not has_weight, 1
        answer = self._loss_function(self.model, read)
        if not (isinstance(answer, tuple) and len(answer) == 2) or answer[0].dim():
            raise RequestError(
                f"{self._loss_name} must return two things: the sum of the losses of a batch (a "
                "tensor of one number, not their mean) and how many they are."
            )
        loss_sum, count = answer
        if not has_weight:
            loss_sum, count = 0.0 * loss_sum, 0
        if self._norms is not None:
            self._norms.counts = count
        own_count = count if self._is_counted else 0
        counts.append(torch.as_tensor(own_count, dtype=torch.float64, device=loss_sum.device))
        return self.loss_scale.on(loss_sum / self._tp)

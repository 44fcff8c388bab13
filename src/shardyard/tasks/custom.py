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
        loss: Loss | None,
        *,
        loss_name: str,
        outputs: Callable[[Any, Any], Any] | None = None,
        norms: BatchNorms | None = None,
        reads: Callable[[Any], tuple[Any, bool]] = lambda batch: (batch, True),
    ) -> None:
        """Take a module that is sharded.

        Args:
            loss: Of (model, batch), or of (outputs, batch) where ``outputs`` is given; None:
                ``objective`` has one.
            loss_name: What messages call the loss function.
            outputs: (model, batch) -> what a loss and metrics of the user's own get; None: it is
                not known.
            norms: Its batch normalisations; None: it has none.
            reads: From a micro-batch to what the loss function is given of it, and whether it
                counts; one that does not is there so that ranks meet.
        """
        self.model = model
        self.roots = [model]
        self.loss_scale = LossScale()
        self._loss_function = loss
        self._loss_name = loss_name
        self._outputs = outputs
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
        sums: dict[str, Tensor] = {}
        losses = [self._loss(batch, counts, sums).double() for batch in batches]
        reshard(self.roots)
        return LossSums(torch.stack(losses).sum(), torch.stack(counts).sum(), sums)

    def _loss(
        self, batch: Any, counts: list[Tensor], sums: dict[str, Tensor] | None = None
    ) -> Tensor:
        """This rank's part of a micro-batch's loss; ``counts`` gets that of its number.

        Args:
            sums: Totals of the user's own metrics, which this adds to; None: they are not counted.
        """
        read, has_weight = self._reads(batch)
        if self._norms is not None:
            self._norms.is_weightless, self._norms.counts = not has_weight, 1
        answer = self._answer(read, sums if has_weight else None)
        if sums is not None:
            device = next(self.model.parameters()).device
            sums.update({**self.objective.zeros(device), **sums})
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

    def _answer(self, read: Any, sums: dict[str, Tensor] | None) -> Any:
        """Return the answer of the loss function for a micro-batch; ``sums`` get its metrics."""
        own = self.objective
        if self._outputs is None:
            assert self._loss_function is not None
            return self._loss_function(self.model, read)
        outputs = self._outputs(self.model, read)
        if sums is not None:
            for name, found in own.metric_sums(outputs, read).items():
                sums[name] = sums[name] + found if name in sums else found
        if own.loss is not None:
            return own.loss_sum(outputs, read)
        assert self._loss_function is not None
        return self._loss_function(outputs, read)

"""Pipeline parallelism: ranks hold successive stages of the model and hand micro-batches on.

torch.distributed.pipelining carries out the schedules. Between stages passes a hidden state
(B, l, D) in the compute format, from a rank to the one with the same place on all other axes.

Each stage is sharded data-parallel like a whole model, and FSDP's own hooks gather and sum as they
do without a pipeline, so that the zero levels mean the same. torch's stages would take that over
for an FSDP module: they gather a stage as a whole and hold whole gradients until a step's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from shardyard.config.layout import rank_of_stage
from shardyard.config.schema.recipe import Parallel
from shardyard.data.loader import IGNORED
from shardyard.errors import RequestError
from shardyard.models.forward import Inputs
from shardyard.models.submodules import part_of
from shardyard.parallel.fsdp import GradientSync
from shardyard.parallel.mesh import Mesh
from shardyard.torch_private import torch_version

_OF_ONE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_STAGES: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Stages of each rank of the pp axis."""

    pp: int
    schedule: str
    virtual_stages: int

    @staticmethod
    def of(parallel: Parallel, pp: int) -> "StagePlan":
        """The plan of a recipe; without a pipeline one stage."""
        virtual_stages = parallel.virtual_stages if pp > 1 else 1
        return StagePlan(pp=pp, schedule=parallel.schedule, virtual_stages=virtual_stages)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pp * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return rank_of_stage(stage, pp=self.pp, schedule=self.schedule)

    def stages_of(self, rank: int) -> list[int]:
        """Stages of a rank, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def passes(self, micro_batches: int) -> int:
        """Micro-batches that the schedule can take: at least as many as given."""
        passes = max(micro_batches, self.pp)
        if self.schedule in ("interleaved", "zero-bubble"):  # whole rounds of equal length
            while passes % (passes // self.pp):
                passes += 1
        return passes


class Pipeline:
    """This rank's stages, and the ways of micro-batches through them."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        mesh: Mesh,
        plan: StagePlan,
        *,
        width: int,
        dtype: torch.dtype,
        tied: str | None = None,
    ) -> None:
        """Args:
        stages: Modules of this rank by number of the stage, sharded.
        width: Of a hidden state.
        dtype: Of a hidden state.
        tied: Name of the table of tokens where it is the head too, and both ends have a copy.

        Raises:
            RequestError: This torch has no such schedule here.
        """
        self._stages = stages
        self._plan = plan
        self._group = mesh.group("pp")
        if any(index + 1 in stages for index in stages):
            backend = dist.get_backend(self._group)
            check_self_sends(f"parallel.schedule={plan.schedule}", backend)
        self._tp = mesh.layout.tp
        self._syncs = {index: GradientSync(m, mesh) for index, m in stages.items()}
        self._width = width
        self._dtype = dtype
        self._is_first = 0 in stages
        self._is_last = plan.num_stages - 1 in stages
        end = stages.get(0 if self._is_first else plan.num_stages - 1)
        self._table = None if end is None else part_of(end, tied)
        self.tied_across_stages = set() if tied is None else {f"{tied}.weight"}
        """Names of parameters that both ends hold."""
        self._schedule: Any = None
        self._passes = 0

    @property
    def modules(self) -> list[nn.Module]:
        """This rank's stages."""
        return list(self._stages.values())

    def accumulate(
        self,
        inputs: Sequence[Inputs],
        targets: Sequence[Tensor],
        loss_sum: Callable[[Any, Tensor], Tensor],
        *,
        loss_in_model: bool = False,
    ) -> Tensor:
        """Forward and backward passes of all micro-batches of a step; adds up gradients.

        Args:
            loss_sum: Of what the last stage returns and targets.
            loss_in_model: Whether the last stage is given targets, too.

        Returns:
            Sum of the losses (fp64); 0 on ranks without the last stage.
        """
        passes = self._plan.passes(len(inputs))
        missing = passes - len(inputs)
        inputs = [*inputs, *[inputs[-1].without_weight()] * missing]
        targets = [*targets, *[torch.full_like(targets[-1], IGNORED)] * missing]
        if loss_in_model:
            inputs = [each._replace(targets=aim) for each, aim in zip(inputs, targets, strict=True)]
        if self._schedule is None:
            self._schedule = self._new_schedule(inputs[0].x, passes, loss_sum)
            self._passes = passes
        assert passes == self._passes, "a run's steps have equally many micro-batches"
        given = Inputs(*map(_joined, zip(*inputs, strict=True)))._asdict()
        tokens = given.pop("x")
        aims = torch.cat(list(targets))
        losses: list[Tensor] | None = [] if self._is_last else None
        # taken now: while it is gathered a module shows another parameter
        table = None if self._table is None else self._table.weight
        self._schedule.step(
            *([tokens] if self._is_first else []),
            target=aims if self._is_last else None,
            losses=losses,
            return_outputs=False,
            aims=aims,
            **{name: tensor for name, tensor in given.items() if tensor is not None},
        )
        if table is not None and table.requires_grad:
            self._sum_of_both_ends(table)
        if losses is None:
            return torch.zeros((), dtype=torch.float64, device=tokens.device)
        return torch.stack(losses).detach().double().sum()

    def output(self, tokens_Bl: Tensor, *others: Tensor | None) -> Tensor | None:
        """Run the forward pass of one micro-batch; return the output where the last stage is.

        Ranks continue with their next micro-batch at once, so that several are under way.

        Args:
            others: The other fields of ``Inputs``, after the tokens.
        """
        x = tokens_Bl
        for index, stage in self._stages.items():
            if index > 0 and index - 1 not in self._stages:
                x = torch.empty(self._hidden_shape(tokens_Bl), dtype=self._dtype, device=x.device)
                dist.recv(x, group=self._group, group_src=self._plan.rank_of(index - 1))
            x = stage(x, *others)
            if index + 1 < self._plan.num_stages and index + 1 not in self._stages:
                dist.send(x, group=self._group, group_dst=self._plan.rank_of(index + 1))
        return x if self._is_last else None

    def _sum_of_both_ends(self, table: Any) -> None:
        """Give both copies of a tied table the gradient of the table that they represent.

        As in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473) both are kept, and updated
        alike. Each rank has the same part of it as its partner at the other end.
        """
        mine = table.grad.to_local() if isinstance(table.grad, DTensor) else table.grad
        other = torch.empty_like(mine)
        partner = self._plan.rank_of(self._plan.num_stages - 1 if self._is_first else 0)
        sent = dist.P2POp(dist.isend, mine, group=self._group, group_peer=partner)
        received = dist.P2POp(dist.irecv, other, group=self._group, group_peer=partner)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        mine.add_(other)

    def _hidden_shape(self, tokens_Bl: Tensor) -> tuple[int, int, int]:
        samples, tokens = tokens_Bl.shape
        return samples, tokens // self._tp, self._width

    def _new_schedule(
        self, tokens_Bl: Tensor, passes: int, loss_sum: Callable[[Any, Tensor], Tensor]
    ) -> Any:
        # shapes are given, as torch would find them out by a forward and backward pass
        hidden_BlD = torch.empty(
            self._hidden_shape(tokens_Bl), dtype=self._dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        last = self._plan.num_stages - 1
        stages = [
            _Stage(
                _NotFsdp(module, loss_sum if index == last else None),
                index,
                self._plan.num_stages,
                tokens_Bl.device,
                sync=self._syncs[index],
                group=self._group,
                input_args=hidden_BlD if index else tokens_Bl.to("meta"),
                output_args=loss if index == last else hidden_BlD,
            )
            for index, module in self._stages.items()
        ]
        options: dict[str, Any] = {"loss_fn": _same_loss, "scale_grads": False}
        if self._plan.schedule in _OF_ONE_STAGE:
            return _OF_ONE_STAGE[self._plan.schedule](stages[0], passes, **options)
        return _OF_STAGES[self._plan.schedule](stages, passes, **options)


def _joined(parts: tuple[Any, ...]) -> Any:
    """One field of all micro-batches, which torch's schedule cuts again."""
    return None if parts[0] is None else torch.cat(parts)


def _same_loss(loss: Tensor, _aims: Tensor) -> Tensor:
    """Return the last stage's loss, which torch's schedule takes for an output."""
    return loss


class _NotFsdp(nn.Module):
    """Keeps torch's stage from seeing that a module is sharded, and from interfering.

    The last stage makes the loss, too: torch asks for the exact shape of what a stage returns
    (2.11 refuses another), and that of a sum of losses is the same for every head.
    """

    def __init__(self, stage: nn.Module, loss_sum: Callable[[Any, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.stage = stage
        self._loss_sum = loss_sum

    def forward(self, *args: Tensor, aims: Tensor, **kwargs: Tensor) -> Tensor:
        found = self.stage(*args, **kwargs)
        loss_or_hidden: Tensor = found if self._loss_sum is None else self._loss_sum(found, aims)
        return loss_or_hidden


class _Stage(PipelineStage):
    """torch's stage, which tells FSDP in time which backward pass is the last."""

    def __init__(self, *args: Any, sync: GradientSync, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync = sync

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """A whole backward pass, or the part of one that the stage before waits for."""
        self._sync.before_backward(is_last=last_backward)
        super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a backward pass: gradients of weights, which no hook of FSDP sees."""
        self._sync.before_backward(is_last=last_backward)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._sync.sum_gradients()


def check_self_sends(setting: str, backend: str) -> None:
    """Reject gloo where consecutive stages share a rank.

    Up to torch 2.11, torch first sends a message from each stage to the next, even on one rank.

    Raises:
        RequestError: gloo cannot send from a rank to itself.
    """
    if backend == "gloo" and torch_version() < (2, 12):
        raise RequestError(
            f"{setting} on CPUs needs torch 2.12 or newer, and this is {torch.__version__}: one "
            "rank has two stages that follow each other, and it would send to itself, which gloo "
            "cannot. Install a newer torch, or use another schedule."
        )

"""Expert parallelism: experts are dealt over ranks, and each visit travels to its expert and back.

The ranks come from those that split samples and parameters (dp_shard x cp), so they hold different
tokens. In a block they meet three times: they tell each other how many visits are coming, send
them, and send the outputs back; the backward pass sends gradients the same two ways. With tensor
parallelism each expert's inner width is split as well: the tokens of a group are gathered before
the block, and the partial sums are added up and split by token after it, as for a dense MLP.

Shape suffixes: N = visits, n = those that arrive here, D = width, R = ranks, E = all experts,
e = experts of a rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardyard.families.family import Family
from shardyard.models.moe import Experts, SparseMLP, inverse, take_rows
from shardyard.models.submodules import blocks_of
from shardyard.parallel.collectives import exchange_rows, gather, sum_and_split
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.tensor import TOKENS, compute_on_shares, share_of


def sparse_blocks(model: nn.Module, family: Family) -> dict[str, SparseMLP]:
    """The mixtures of experts of a model, by the full name of their block; none if it is dense."""
    if family.sparse is None:
        return {}
    found = {}
    for name, block in blocks_of(model, family).items():
        module = block.get_submodule(family.sparse)
        assert isinstance(module, SparseMLP)
        found[name] = module
    return found


def shard_experts(model: nn.Module, mesh: Mesh, family: Family) -> None:
    """Split the experts of a model over ep and tp, in place."""
    layout = mesh.layout
    for mlp in sparse_blocks(model, family).values():
        _split(mlp.experts, mesh)
        if layout.ep > 1:
            mlp.dispatch = Dispatch(mesh.group("ep"))
        if layout.tp > 1:
            _gather_and_sum(mlp, mesh.group("tp"))


def _split(experts: Experts, mesh: Mesh) -> None:
    layout = mesh.layout
    if layout.ep == layout.tp == 1:
        return
    for name, inner_dim in (("gate", 1), ("up", 1), ("down", 2)):
        placements = {"ep": Shard(0), "tp": Shard(inner_dim)}
        axes = [axis for axis in placements if getattr(layout, axis) > 1]
        over = mesh.experts if mesh.experts is not None else mesh.dense
        share = share_of(
            getattr(experts, name), over[tuple(axes)], [placements[axis] for axis in axes]
        )
        setattr(experts, name, share)
    compute_on_shares(experts, experts.forward)


def _gather_and_sum(mlp: SparseMLP, group: dist.ProcessGroup) -> None:
    """Let the block see all tokens; of the sum of what the ranks get, each keeps its share."""
    forward = mlp.forward

    def summed(x_BLD: Tensor) -> Tensor:
        return sum_and_split(forward(gather(x_BLD, TOKENS, group)), TOKENS, group)

    mlp.forward = summed  # type: ignore[method-assign]


@dataclass(frozen=True)
class Dispatch:
    """Sends visits to the ranks that hold their experts, and brings the outputs back."""

    group: dist.ProcessGroup

    def __call__(self, experts: Experts, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """The experts' outputs of this rank's visits.

        Args:
            experts: Those of this rank.
            x_ND: This rank's visits sorted by expert, of which rank 0 holds the first, ...
            counts_E: How many of them each of all experts has.
        """
        ranks = dist.get_world_size(self.group)
        coming_Re = torch.empty_like(counts_E).view(ranks, -1)
        dist.all_to_all_single(coming_Re, counts_E.view(ranks, -1), group=self.group)
        send, receive = self._rows(counts_E.view(ranks, -1), coming_Re, rows=len(x_ND))
        x_nD = exchange_rows(x_ND, send, receive, self.group)
        # they come rank by rank, and for each rank expert by expert
        expert_Re = torch.arange(coming_Re.shape[1], device=x_ND.device).expand_as(coming_Re)
        expert_n = expert_Re.flatten().repeat_interleave(coming_Re.flatten(), output_size=len(x_nD))
        order_n = torch.argsort(expert_n, stable=True)
        place_n = inverse(order_n)
        y_nD = experts(take_rows(x_nD, order_n, place_n), coming_Re.sum(dim=0))
        return exchange_rows(take_rows(y_nD, place_n, order_n), receive, send, self.group)

    def _rows(
        self, going_Re: Tensor, coming_Re: Tensor, *, rows: int
    ) -> tuple[list[int], list[int]]:
        """Rows for each rank, and from each. Waits for the device: a message needs its size."""
        if dist.get_backend(self.group) == "fake":  # a dry run has no numbers: an even load
            ranks = len(going_Re)
            even = [(rank + 1) * rows // ranks - rank * rows // ranks for rank in range(ranks)]
            return even, even
        send, receive = torch.stack([going_Re.sum(dim=1), coming_Re.sum(dim=1)]).tolist()
        return send, receive

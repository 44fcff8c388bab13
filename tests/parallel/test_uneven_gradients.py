"""Ranks that use different parameters, beside torch's DistributedDataParallel and a plain loop."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardyard
from shardyard.errors import TrainingError
from shardyard.parallel import rank_agreement
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

WIDTH, STEPS, MICRO_BATCHES = 8, 3, 2
LAYOUTS = {
    2: ("zero=1", "zero=2", "zero=3", "dp_replicate=2,dp_shard=1"),
    4: ("zero=3", "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=3"),
}
LONG_FORM: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2, "dp_shard": 1},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
)


class Block(nn.Module):
    """One of four experts, in a Python loop's way."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y: Tensor = x + torch.tanh(self.experts[expert](x))
        return y


class Net(nn.Module):
    """Experts, branches, a head that only some losses use, and a module that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.branches = nn.ModuleDict({"0": nn.Linear(WIDTH, 4), "1": nn.Linear(WIDTH, 4)})
        self.other = nn.Linear(WIDTH, 4)
        self.nobody = nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, *, expert: int, branch: int, skipped: int) -> tuple[Tensor, ...]:
        for place, block in enumerate(self.blocks):
            if place != skipped:
                x = block(x, expert)
        return self.branches[str(branch)](x), self.other(x)


Case = Callable[[int, int, int], dict[str, int]]
"""(rank, step, micro-batch) -> what the forward pass is told; ``other``: whether a loss uses it."""

CASES: dict[str, Case] = {
    "experts": lambda rank, step, micro: {"expert": (rank + step + micro) % 4},
    "branches": lambda rank, step, micro: {"branch": rank % 2 if step else micro},
    "unused outputs": lambda rank, step, _: {"other": int(rank == 0 and step != 1)},
    "skipped blocks": lambda rank, step, _: {"skipped": (rank + step) % 3},
    "blocks skipped by all": lambda _rank, step, _: {"skipped": step % 3},
}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """One that moves what has a gradient of zero, and leaves what has none."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def loss_sum(model: Any, batch: tuple[Tensor, Tensor, dict[str, int]]) -> tuple[Tensor, int]:
    x, y, told = batch
    told = {"expert": 0, "branch": 0, "skipped": -1, "other": 0, **told}
    uses_other = told.pop("other")
    first, other = model(x, **told)
    loss = F.cross_entropy(first, y, reduction="sum")
    return loss + (F.cross_entropy(other, y, reduction="sum") if uses_other else 0.0), len(y)


def batch_of(case: str, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor, dict[str, int]]:
    draw = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    x, y = torch.randn(4, WIDTH, generator=draw), torch.randint(0, 4, (4,), generator=draw)
    return x, y, CASES[case](rank, step, micro)


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = (
        (n, p.full_tensor() if isinstance(p, DTensor) else p) for n, p in model.named_parameters()
    )
    return {name: each.detach().clone() for name, each in found}


def trained(model: Any, optimizer: torch.optim.Optimizer, case: str, called: Any) -> Any:
    """Losses and weights of a loop as scripts have it."""
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            total, count = loss_sum(called, batch_of(case, dist.get_rank(), step, micro))
            (total / count / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
            losses.append(float(total.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def apart(found: Any, wanted: Any) -> float:
    losses: float = max(abs(a - b) / b for a, b in zip(found[0], wanted[0], strict=True))
    pairs = ((found[1][name], wanted[1][name]) for name in wanted[1])
    return max(losses, *(float((a - b).norm() / b.norm()) for a, b in pairs))


def of_wrapped(cases: tuple[str, ...], layouts: tuple[str, ...]) -> dict[tuple[str, str], float]:
    found = {}
    for case in cases:
        model = net()
        torchs = DistributedDataParallel(model, find_unused_parameters=True)
        wanted = trained(model, sgd(model), case, torchs)
        for words in layouts:
            if case == "skipped blocks" and "zero=3" in words:
                continue  # refused, below
            os.environ["SHARDYARD_PARALLEL"] = words
            model = net()
            _, optimizer = shardyard.wrap(model, sgd(model))
            found[case, words] = apart(trained(model, optimizer, case, model), wanted)
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, tuple(CASES)), (4, ("experts", "unused outputs"))]
)
def test_a_wrapped_script_trains_as_torchs_own(ranks: int, cases: tuple[str, ...]) -> None:
    for found in run_on_ranks(of_wrapped, ranks, cases, LAYOUTS[ranks]):
        assert len(found) == len(cases) * len(LAYOUTS[ranks]) - ("skipped blocks" in cases)
        assert {key: each for key, each in found.items() if each > 1e-6} == {}


def by_one_process(case: str, ranks: int) -> Any:
    """Losses and weights of a plain loop over the samples of all ranks."""
    model = net()
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        of_step = [
            loss_sum(model, batch_of(case, rank, step, micro))
            for rank in range(ranks)
            for micro in range(MICRO_BATCHES)
        ]
        loss = torch.stack([total for total, _ in of_step]).sum() / sum(n for _, n in of_step)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def of_the_long_form(layouts: tuple[dict[str, Any], ...]) -> dict[tuple[str, str], float]:
    found = {}
    for case in ("experts", "branches", "unused outputs", "skipped blocks"):
        wanted = by_one_process(case, dist.get_world_size())
        for layout in layouts:
            degrees = {key: each for key, each in layout.items() if key != "compute"}
            if case == "skipped blocks" and layout.get("zero") == 3:
                continue
            mesh = shardyard.build_mesh(**degrees)
            compute = layout.get("compute", "fp32")
            model = shardyard.parallelize(net(), mesh, blocks="blocks", compute=compute)
            optimizer, losses = sgd(model), []
            for step in range(STEPS):
                mine = [batch_of(case, dist.get_rank(), step, m) for m in range(MICRO_BATCHES)]
                losses.append(float(shardyard.accumulate(model, mine, loss_sum)))
                optimizer.step()
                optimizer.zero_grad()
            far = apart((losses, weights(model)), wanted)
            found[case, str(layout)] = far / (5e3 if compute == "bf16" else 1.0)
    return found


def test_the_long_form_trains_as_one_process() -> None:
    """As recipes with ``model.module`` do: replicas without sharding, and each ZeRO level."""
    bf16 = ({"zero": 1, "compute": "bf16"}, {"zero": 3, "compute": "bf16"})
    for found in run_on_ranks(of_the_long_form, 2, (*LONG_FORM, *bf16)):
        assert {key: each for key, each in found.items() if each > 1e-6} == {}


def refusals() -> dict[str, str]:
    """What is raised on this rank, by what ranks do apart."""
    os.environ["SHARDYARD_PARALLEL"] = "zero=3"
    rank, said = dist.get_rank(), {}

    def fails(name: str, act: Callable[[], Any]) -> None:
        with pytest.raises(TrainingError) as caught:
            act()
        said[name] = str(caught.value)

    model = net()
    _, optimizer = shardyard.wrap(model, sgd(model))
    fails("first step", lambda: trained(model, optimizer, "skipped blocks", model))

    model = net()
    _, optimizer = shardyard.wrap(model, sgd(model))
    model.register_forward_pre_hook(_count)
    fails("buffer", lambda: trained(model, optimizer, "experts", model))

    model = net()
    shardyard.wrap(model, sgd(model))
    fails(
        "evaluation",
        lambda: (
            _evaluated(model)
            if rank
            else model(torch.ones(2, WIDTH), expert=0, branch=0, skipped=-1)
        ),
    )
    return said


def _count(model: Any, *_args: Any) -> None:
    model.seen.add_(1 + dist.get_rank())


def _evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH), expert=0, branch=0, skipped=-1)


def test_what_ranks_may_not_do_apart_is_named_in_the_first_step() -> None:
    for said in run_on_ranks(refusals, 2, timeout_s=60):
        assert "rank 0 gathers blocks.1, rank 1 gathers blocks.0" in said["first step"]
        assert "blocks.1.experts.0.weight" in said["first step"]
        assert "Use SHARDYARD_PARALLEL=zero=2" in said["first step"]
        assert "The buffer seen of rank 0 is not that of rank 1" in said["buffer"]
        assert (
            "rank 0 gathers what is in no block, rank 1 begins a forward pass without"
            in said["evaluation"]
        )


def leaves_the_usual_order() -> str:
    rank_agreement.WAIT_S = 2.0
    os.environ["SHARDYARD_PARALLEL"] = "zero=3"
    model = net()
    _, optimizer = shardyard.wrap(model, sgd(model))
    told = {"expert": 0, "branch": 0}
    for _ in range(4):
        model(torch.ones(2, WIDTH), skipped=-1, **told)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 1:
        with suppress(RuntimeError):  # waits in torch's own gather, until rank 0 ends
            model(torch.ones(2, WIDTH), skipped=-1, **told)
        return ""
    with pytest.raises(TrainingError) as caught:
        model(torch.ones(2, WIDTH), skipped=1, **told)
    return str(caught.value)


def test_a_rank_that_leaves_the_usual_order_alone_fails_and_says_where() -> None:
    said = run_on_ranks(leaves_the_usual_order, 2, timeout_s=60)[0]
    assert "rank 0 gathers blocks.2, another rank gathers blocks.1" in said

"""Router losses of a step are those that transformers computes of its tokens, in every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import shardyard
from tests.distributed.ranks import run_on_ranks
from tests.distributed.whole import whole
from tests.library.runs import SEQ_LEN, VOCABULARY, build

EXPERTS, VISITS = 8, 2
BALANCE, Z = 0.3, 0.02
LENGTHS = (16, 7, 11, 1, 14)
"""Tokens of the step's samples, before their padding; five make no whole rounds of a pipeline."""
ONE: list[dict[str, Any]] = [{}, {"recompute": "full"}]
TWO: list[dict[str, Any]] = [
    {"dp_shard": 2},  # three micro-batches each, one of them without labels
    {"ep": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "zero-bubble"},
]
FOUR: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "gpipe", "dp_shard": 2},
    {"ep": 2, "tp": 2},
    {"cp": 2, "dp_shard": 2, "zero": 1},
]
_OPTIONS = ("schedule", "recompute")


def _samples(*, masked: bool) -> list[dict[str, Tensor]]:
    """The samples of a step, padded; of each only the second half is learnt."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(0, VOCABULARY, (1, SEQ_LEN), generator=draw)
        place = torch.arange(SEQ_LEN)[None]
        is_learnt = (place >= length // 2) & (place < length - (1 if masked else 0))
        sample = {"input_ids": tokens, "labels": torch.where(is_learnt, tokens, -100)}
        if masked:  # the last token is not learnt, so labels alone do not tell the length
            sample["attention_mask"] = (place < length).long()
        found.append(sample)
    return found


def _of_transformers(*, masked: bool) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of the routers: each sample without its padding."""
    model = build("mixtral-tiny").float()
    learnt, loss, added = 0, torch.zeros(()), torch.zeros(())
    for sample, length in zip(_samples(masked=masked), LENGTHS, strict=True):
        tokens, labels = (sample[key][:, :length] for key in ("input_ids", "labels"))
        out = model(input_ids=tokens, output_router_logits=True)
        losses = torch.nn.functional.cross_entropy(
            out.logits[0, :-1], labels[0, 1:], reduction="sum", ignore_index=-100
        )
        loss, learnt = loss + losses, learnt + int((labels[0, 1:] != -100).sum())
        for logits in out.router_logits:
            balance = load_balancing_loss_func((logits,), EXPERTS, VISITS) / VISITS
            z = (logits.logsumexp(dim=-1) ** 2).mean()
            added = added + (BALANCE * balance + Z * z) * length / sum(LENGTHS)
    torch.autograd.backward(loss / learnt + added)
    gradients = {
        name.split(".")[2]: param.grad
        for name, param in model.named_parameters()
        if name.endswith("mlp.gate.weight") and param.grad is not None
    }
    return (loss / learnt).item(), gradients


def _of_layouts(layouts: list[dict[str, Any]], masked: bool) -> list[tuple[float, dict[str, Any]]]:
    """Loss and gradients of this rank's routers in each layout, by the number of the block."""
    found = []
    for layout in layouts:
        options = {key: layout[key] for key in _OPTIONS if key in layout}
        mesh = shardyard.build_mesh(**{key: layout[key] for key in layout if key not in _OPTIONS})
        model = build("mixtral-tiny")
        shardyard.parallelize(
            model, mesh, seq_len=SEQ_LEN, router_aux_loss=BALANCE, router_z_loss=Z, **options
        )
        ranks = mesh.layout.data_ranks
        mine = _samples(masked=masked)[mesh.data_rank :: ranks]
        nothing = {key: torch.full_like(each, -100) for key, each in mine[0].items()}
        nothing["input_ids"] = mine[0]["input_ids"]  # what ranks without a sample compute
        if masked:
            nothing["attention_mask"] = torch.zeros_like(mine[0]["attention_mask"])
        mine += [nothing] * (-(-len(LENGTHS) // ranks) - len(mine))
        loss = shardyard.accumulate(model, mine)
        gradients = {
            name.split(".")[2]: whole(param.grad)
            for name, param in model.named_parameters()
            if name.endswith("mlp.router.weight") and param.grad is not None
        }
        found.append((float(loss), gradients))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "layouts", "masked"),
    [
        (1, ONE, True),
        (2, TWO, False),
        pytest.param(4, FOUR, False, marks=pytest.mark.slow),
        pytest.param(2, TWO, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_padding_masks_and_schedules_leave_router_losses_as_transformers_has_them(
    ranks: int, layouts: list[dict[str, Any]], masked: bool
) -> None:
    loss, wanted = _of_transformers(masked=masked)
    largest = max(float(each.abs().max()) for each in wanted.values())
    by_rank = run_on_ranks(_of_layouts, ranks, layouts, masked)
    for number, layout in enumerate(layouts):
        found: dict[str, Tensor] = {}
        for of_rank in by_rank:
            assert of_rank[number][0] == pytest.approx(loss, rel=1e-6), layout
            found |= of_rank[number][1]
        assert found.keys() == wanted.keys(), layout
        for block, gradient in wanted.items():
            assert float((found[block] - gradient).abs().max()) < 1e-5 * largest, (layout, block)

"""An update does not depend on where a parameter is cut."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shardyard.config.schema.recipe import Optim
from shardyard.train.optim import ShardOptimizer
from shardyard.train.optimizers.whole_vectors import VECTOR, WholeVectors

SHAPES = {"matrix": (37, 11), "other": (20, 5), "bias": (77,), "small": (3,)}
"""Of few rows that end at a vector's end."""


def _model(cut: Sequence[int]) -> nn.Module:
    """Parameters, cut into so many parts along their first dimension."""
    model = nn.Module()
    draw = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        whole = torch.randn(shape, generator=draw)
        for part, rows in enumerate(whole.tensor_split(list(cut))):
            model.register_parameter(f"{name}_{part}", nn.Parameter(rows.clone()))
    return model


def _trained(optim: Optim, cut: Sequence[int], *, cut_free: bool = True) -> dict[str, Tensor]:
    """Weights after five steps, joined again."""
    model = _model(cut)
    optimizer = ShardOptimizer(model, optim, wrap_update=WholeVectors if cut_free else None)
    draw = torch.Generator().manual_seed(1)
    for step in range(5):
        for name, shape in SHAPES.items():
            grad = torch.randn(shape, generator=draw)
            for part, rows in enumerate(grad.tensor_split(list(cut))):
                model.get_parameter(f"{name}_{part}").grad = rows.clone()
        skip = torch.tensor(float(step == 3))
        optimizer.step(lr=0.1, divisor=torch.tensor(1.7), skip=skip)
        assert all(param.grad is None for param in model.parameters())
    return {
        name: torch.cat([model.get_parameter(f"{name}_{part}") for part in range(len(cut) + 1)])
        for name in SHAPES
    }


@pytest.mark.parametrize(
    "optim",
    [
        Optim(lr=0.1, weight_decay=0.5),
        Optim(name="sgd", lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=True),
        Optim(name="sgd", lr=0.1, weight_decay=0),
    ],
    ids=["adamw", "sgd", "sgd without momentum"],
)
def test_cut_anywhere_weights_are_the_same_bits(optim: Optim) -> None:
    whole = _trained(optim, [])
    usual = _trained(optim, [], cut_free=False)
    for name, weight in whole.items():
        torch.testing.assert_close(weight, usual[name], rtol=1e-6, atol=1e-7)
    for cut in ([1], [2, 19], [7, 8, 9], [40]):  # the last leaves empty parts
        found = _trained(optim, cut)
        for name, weight in whole.items():
            assert torch.equal(found[name], weight), (name, cut)


def test_kernels_are_given_whole_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # not every processor rounds its last elements otherwise, so it is looked at what they are given
    lengths: list[int] = []
    step = torch.optim.AdamW.step

    def seen(self: torch.optim.AdamW) -> None:
        given = [param for group in self.param_groups for param in group["params"]]
        lengths.extend(param.numel() for param in given if param.grad is not None)
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", seen)
    _trained(Optim(lr=0.1, weight_decay=0.5), [2, 19])
    assert len(lengths) > 10 and all(length % VECTOR == 0 for length in lengths)

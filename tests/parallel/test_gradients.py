"""The norm of gradients against fp64, however many elements a tensor has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardyard.parallel.gradients import square_sum


def _param(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.empty_like(grad))
    param.grad = grad
    return param


def _random(*sizes: int, seed: int = 0) -> Tensor:
    return 1e-3 * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _exact(*grads: Tensor) -> float:
    """The norm, added up in fp64."""
    flat = torch.cat([grad.flatten().double() for grad in grads])
    return float(flat.square().sum().sqrt())


@pytest.mark.parametrize(
    "grad",
    [
        _random(2**20),
        _random(2**24 + 7),  # torch's own fp32 norm is 7e-4 off here
        _random(3, 2**19)[:, 5:-1],  # not contiguous, and no whole number of rows
        _random(2**20).bfloat16(),
        _random(2**20).double(),
        _random(100),
    ],
    ids=["1 M", "16 M", "a view", "bf16", "fp64", "100"],
)
def test_the_norm_of_large_tensors_is_that_of_fp64(grad: Tensor) -> None:
    assert float(square_sum({"w": _param(grad)}).sqrt()) == pytest.approx(_exact(grad), rel=1e-7)


def test_the_norm_of_parts_is_that_of_the_whole() -> None:
    grads = [_random(2**20 + 3), _random(2**18, seed=1), _random(50, seed=2), _random(0)]
    whole = square_sum({str(i): _param(grad) for i, grad in enumerate(grads)})
    for ranks in (2, 3, 4):
        shares = [[grad.tensor_split(ranks)[rank] for grad in grads] for rank in range(ranks)]
        parts = [square_sum({str(i): _param(g) for i, g in enumerate(share)}) for share in shares]
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-7)
    assert float(whole.sqrt()) == pytest.approx(_exact(*grads), rel=1e-7)


@pytest.mark.parametrize("grad", [None, torch.zeros(0)], ids=["frozen", "an empty share"])
def test_a_rank_without_gradients_adds_nothing(grad: Tensor | None) -> None:
    param = nn.Parameter(torch.zeros(3 if grad is None else 0))
    param.grad = grad
    found = square_sum({"w": param})
    assert (float(found), found.dtype) == (0.0, torch.float64)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that an operator makes."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_the_norm_of_a_large_tensor_makes_no_copy_of_it() -> None:
    param = _param(_random(2**22))
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        square_sum({"w": param})
    assert 0 < largest.nbytes <= param.nbytes / 256

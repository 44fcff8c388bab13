"""AdamW in one pass: beside torch's own, bit for bit still where it skips, and as a kernel."""

import ast
import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardyard.config.optimizers import OPTIMIZERS, OnePass
from shardyard.config.schema.recipe import Optim
from shardyard.train.optimizers import State
from shardyard.train.optimizers.fused import AdamW as Fused
from shardyard.train.optimizers.one_pass import OnePassAdamW, update_plainly

OPTIM = Optim.model_validate(
    {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "warmup_steps": 1, "decay_steps": 9}
)
ONE, NOTHING = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)


class _Trained:
    """A matrix, which decays, and a vector, which may."""

    def __init__(self, *, in_one_pass: bool, optim: Optim = OPTIM) -> None:
        torch.manual_seed(0)
        self.shards = {
            "matrix": nn.Parameter(torch.randn(7, 300)),
            "norm": nn.Parameter(torch.ones(5)),
        }
        self.copies = {"matrix": self.shards["matrix"].detach().bfloat16()}
        self.states: dict[str, State] = {
            name: {
                "exp_avg": torch.zeros_like(shard.data),
                "exp_avg_sq": torch.zeros_like(shard.data),
                "step": torch.zeros(()),
            }
            for name, shard in self.shards.items()
        }
        no_norms: Any = None
        self.update: OnePassAdamW | Fused = (
            OnePassAdamW(self.shards, optim, self.copies)
            if in_one_pass
            else Fused(self.shards, optim, no_norms)
        )

    def step(self, number: int, *, divisor: float = 3.0, skip: bool = False) -> None:
        torch.manual_seed(number)
        for shard in self.shards.values():
            shard.grad = torch.randn(shard.shape) * 10.0 ** (number % 5 - 3)
        if skip:
            self.shards["matrix"].grad[0, 0] = torch.inf  # type: ignore[index]
        self.update.begin(
            lr=0.01 / number, divisor=divisor * ONE, skip=ONE if skip else NOTHING, grads={}
        )
        self.update.update(list(self.shards), self.states)
        self.update.finish()

    def held(self) -> dict[str, Tensor]:
        states = {f"{k} of {n}": each for n, s in self.states.items() for k, each in s.items()}
        copies = {f"copy of {name}": copy for name, copy in self.copies.items()}
        weights = {name: shard.detach() for name, shard in self.shards.items()}
        return {name: each.clone() for name, each in {**weights, **copies, **states}.items()}


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_twenty_steps_are_those_of_torchs_own(*, decay_vectors: bool) -> None:
    optim = OPTIM.model_copy(update={"decay_vectors": decay_vectors})
    ours, torchs = (_Trained(in_one_pass=each, optim=optim) for each in (True, False))
    for number in range(1, 21):
        ours.step(number, skip=number == 4)
        torchs.step(number, skip=number == 4)
    found, expected = ours.held(), torchs.held()
    for name in expected.keys() - {"copy of matrix"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert found["copy of matrix"].equal(found["matrix"].bfloat16())
    assert found["step of matrix"] == 19
    assert all(shard.grad is None for shard in ours.shards.values())


def test_a_step_that_is_skipped_changes_no_bit() -> None:
    ours = _Trained(in_one_pass=True)
    for first in (True, False):  # also where no step has been counted yet
        before = ours.held()
        ours.step(2, skip=True)
        assert all(each.equal(before[name]) for name, each in ours.held().items())
        if first:
            ours.step(1)


def _given(copy_dtype: torch.dtype | None, skip: float) -> tuple[list[Any], Tensor]:
    torch.manual_seed(0)
    grad, weight, average = (torch.randn(1500) for _ in range(3))  # no multiple of a block
    copy = None if copy_dtype is None else weight.to(copy_dtype)
    scalars = torch.tensor([1e-3, 0.7, 2.5, skip, 0.999])
    return [grad, weight, average, torch.rand(1500), copy], scalars


# --- the kernel ----------------------------------------------------------------------------------


def _accesses() -> dict[str, list[str]]:
    """Pointer -> how the text of the kernel reads and writes it, element by element."""
    import shardyard.train.optimizers.adamw_kernel as kernel

    (function,) = [
        node
        for node in ast.parse(inspect.getsource(kernel)).body
        if isinstance(node, ast.FunctionDef) and node.name == "_adamw"
    ]
    found: dict[str, list[str]] = {}
    for node in ast.walk(function):
        call = ast.unparse(node) if isinstance(node, ast.Call) else ""
        if match := re.match(r"tl\.(load|store)\((\w+) \+ at\b", call):
            found.setdefault(match[2], []).append(match[1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_the_kernel_does_what_plain_torch_does(
    copy_dtype: torch.dtype | None, skip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted: with triton beside torch, and without a device. ``TRITON_INTERPRET`` counts when
    triton is imported, so this test wants a process of its own."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from shardyard.train.optimizers import adamw_kernel

    (plain, scalars), (given, _) = (_given(copy_dtype, skip) for _ in range(2))
    before, _ = _given(copy_dtype, skip)
    g, w, m, v, copy = plain
    update_plainly(g, w, m, v, copy, scalars, betas=(0.9, 0.95), eps=1e-8)
    g, w, m, v, copy = given
    adamw_kernel.update(g, w, m, v, copy, scalars, betas=(0.9, 0.95), eps=1e-8)
    for found, expected, first in zip(given, plain, before, strict=True):
        if found is None:
            continue
        # the interpreter cuts off what a device rounds to the nearest
        tolerance = 1e-6 if found.dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert skip == 0.0 or found.equal(first)


@pytest.mark.slow
def test_the_kernel_moves_as_many_bytes_as_the_row_says() -> None:
    pytest.importorskip("triton")
    from shardyard.train.optimizers.adamw_kernel import MOVED_BYTES

    accesses = _accesses()
    assert accesses.keys() == MOVED_BYTES.keys()
    for pointer, (reads, writes) in MOVED_BYTES.items():
        calls = accesses[pointer]
        assert (calls.count("load"), calls.count("store")) == (bool(reads), bool(writes)), pointer
    (held, _), row = _given(torch.bfloat16, 0.0), OPTIMIZERS["adamw"].one_pass
    sizes = dict(zip(MOVED_BYTES, (each.element_size() for each in held), strict=True))
    assert all({*both} <= {0, sizes[pointer]} for pointer, both in MOVED_BYTES.items())
    of_norm = sizes["grad"]
    averages = 8 * len(OPTIMIZERS["adamw"].state_tensors)
    assert isinstance(row, OnePass)
    moved = of_norm + sum(map(sum, MOVED_BYTES.values()))
    assert moved == row.moved_bytes + averages <= 36

"""The steps of a script, started again: exactly what an unbroken loop would have done."""

import logging
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardyard
from shardyard.checkpoint import writer
from shardyard.checkpoint.retention import step_name
from shardyard.errors import StorageError
from shardyard.library.generators import give_back_to_rank, once, states_of
from shardyard.library.termination import BeforeTermination
from tests.distributed.ranks import run_on_ranks

CPU = torch.device("cpu")


def _drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_generators_draw_again_what_they_would_have_drawn() -> None:
    states = states_of(CPU)
    wanted = _drawn()
    _drawn()
    give_back_to_rank(once([states, states]), CPU, rank=1)
    assert _drawn() == wanted


def test_a_rank_that_did_not_exist_draws_numbers_of_its_own() -> None:
    torch.manual_seed(1)
    first = states_of(CPU)
    torch.manual_seed(2)
    saved = once([first, states_of(CPU)])
    found = []
    for rank in range(4):
        give_back_to_rank(saved, CPU, rank=rank)
        found.append(tuple(_drawn()))
    assert len({drawn[0] for drawn in found}) == 4


class Net(nn.Module):
    """With dropout, and a module that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.nobody = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.dropout(torch.tanh(block(x)), 0.3)
        return x


def _stop_writing(step: int, until: threading.Event) -> threading.Event:
    """Let this rank stop in the middle of its file of a step, until an event.

    Returns:
        Set once it is there.
    """
    module: Any = writer
    begun = threading.Event()
    write = module.write_flushed

    def halves(path: Path, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for number, piece in enumerate(pieces):
            if number == 1 and path.parent.name == f"{step_name(step)}.tmp":
                begun.set()
                until.wait(60)
            yield piece

    module.write_flushed = lambda path, pieces: write(path, halves(path, pieces))
    return begun


def _trained(
    layout: str, folder: str, total: int, lr: float, killed_after: int | None, stopped: int = 0
) -> tuple[dict[str, Tensor], list[str]]:
    os.environ["SHARDYARD_PARALLEL"] = layout
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = shardyard.wrap(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    said: list[str] = []
    logger = logging.getLogger("shardyard")
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    begun = _stop_writing(stopped, threading.Event()) if rank == 1 else threading.Event()
    for step in shardyard.steps(total, folder, model, optimizer, schedule, every=2):
        x = torch.randn(4, 8) + sum(_drawn())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if killed_after == step + 1 and rank == 1 and begun.wait(60):
            os.kill(os.getpid(), signal.SIGKILL)
    weights = model.state_dict().items()
    return {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights}, said


_SLOW = pytest.mark.slow


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 2),
        ("zero=3", 2),
        pytest.param("zero=1", 2, marks=_SLOW),
        pytest.param("zero=2", 2, marks=_SLOW),
        pytest.param("dp_replicate=2,dp_shard=2", 4, marks=_SLOW),
    ],
)
def test_a_script_killed_during_a_write_ends_with_every_bit_of_an_unbroken_one(
    layout: str, ranks: int, tmp_path: Path
) -> None:
    unbroken, _ = run_on_ranks(_trained, ranks, layout, str(tmp_path / "a"), 5, 0.1, None)[0]
    folder = str(tmp_path / "b")
    with pytest.raises(RuntimeError, match=r"ended without an answer|rank 0 failed"):
        run_on_ranks(_trained, ranks, layout, folder, 5, 0.1, 5, 4)
    assert (tmp_path / "b" / "latest").read_text() == "step-00000002\n"
    assert [path.name for path in (tmp_path / "b" / "step-00000004.tmp").iterdir()], "begun"
    weights, _ = run_on_ranks(_trained, ranks, layout, folder, 5, 0.1, None)[0]
    assert {n: torch.equal(weights[n], each) for n, each in unbroken.items()} == dict.fromkeys(
        unbroken, True
    )
    _, said = run_on_ranks(_trained, ranks, layout, folder, 5, 0.2, None)[0]
    assert "step-00000005 holds step 5. No step is left to train of steps(5, ...)." in said[0]
    assert "in the checkpoint are used: lr=0.1 (your script: 0.2)." in said[0]
    _, said = run_on_ranks(_trained, 1, "", folder, 6, 0.1, None)[0]
    assert "was to end at step 5; this one ends at 6" in said[0]
    assert f"written by {ranks} ranks, these are 1. Weights, optimizer and step continue" in said[1]


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    return shardyard.wrap(model, torch.optim.AdamW(model.parameters()))


def _left(folder: Path, how: str) -> list[str]:
    """Names of checkpoints during the second step of a loop, and after it was left in that step."""
    event = threading.Event()
    _stop_writing(1, event)
    model, optimizer = _linear()
    found = []

    def names() -> str:
        return ",".join(sorted(path.name for path in folder.glob("step-*[0-9]")))

    with suppress(ZeroDivisionError):
        for step in shardyard.steps(3, folder, model, optimizer, every=1):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            if step == 1:
                found.append(names())
                threading.Timer(0.2, event.set).start()
                if how == "break":
                    break
                if how == "exception":
                    raise ZeroDivisionError
                if how == "SIGTERM":
                    os.kill(os.getpid(), signal.SIGTERM)
    return [*found, names()]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "last"), [("end", 3), ("break", 1), ("exception", 1), ("SIGTERM", 1)]
)
def test_a_checkpoint_is_written_beside_the_next_step_and_durable_when_the_loop_is_left(
    how: str, last: int, tmp_path: Path
) -> None:
    if how == "SIGTERM":
        with pytest.raises(RuntimeError, match="ended without an answer"):
            run_on_ranks(_left, 1, tmp_path, how)
    else:
        during, after = run_on_ranks(_left, 1, tmp_path, how)[0]
        assert during == ""
        assert after.endswith(step_name(last))
    assert (tmp_path / "latest").read_text() == f"{step_name(last)}\n"


def _fails(folder: Path) -> tuple[int, str, str]:
    model, optimizer = _linear()
    module: Any = writer
    # the thread that saves step 2 may look for leftovers as late as in step 3
    module.remove_leftovers = lambda _: None
    step = 0
    try:
        for step in shardyard.steps(9, folder, model, optimizer, every=2):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            if step == 2:
                shutil.rmtree(folder / "step-00000004.tmp", ignore_errors=True)
                (folder / "step-00000004.tmp").write_text("in the way")
    except StorageError as error:
        return step, str(error), (folder / "latest").read_text()
    raise AssertionError


@pytest.mark.heavy
def test_a_write_that_fails_is_reported_before_the_next_save_on_every_rank(tmp_path: Path) -> None:
    for step, message, latest in run_on_ranks(_fails, 2, tmp_path):
        assert 4 <= step <= 5
        assert "step-00000004 cannot be saved: rank 0 got 'File exists'" in message
        assert "The checkpoint of step 2 is intact" in message
        assert latest == "step-00000002\n"


def test_a_handler_of_sigterm_that_the_script_has_stays() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with BeforeTermination(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with BeforeTermination(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

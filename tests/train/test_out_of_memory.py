"""Memory that runs out: in a real run whose address space is limited, and what is said of it."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.errors import OutOfMemoryError
from shardyard.io.files import write_json
from shardyard.planner.phases import plan
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.train.errors import is_out_of_memory
from shardyard.train.step import Stepper
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import MACHINE, Corpus, make_run, train_here

_MORE_BYTES = 768 * 2**20
"""Address space of threads and their allocators, and room for a small step."""


def _run(folder: Path, corpus: Corpus, *, micro_batch: int) -> RunDir:
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 6},
        "data": {"seq_len": 128},
        "optim": {"global_batch": micro_batch, "micro_batch": micro_batch},
    }
    run_dir = make_run(folder, corpus, sections)
    predicted = plan(
        read_resolved(run_dir.resolved(0)), world_size=1, devices_per_node=1, machine=MACHINE
    )
    write_json(run_dir.plan(0), predicted.to_json())
    return run_dir


def _in_little_memory(run_dir: RunDir, more_bytes: int) -> tuple[str, str]:
    """Train with so much address space beyond what the process has: kind and words of its end."""
    held = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, resource.RLIM_INFINITY))
    return _end_of(run_dir)


def _end_of(run_dir: RunDir) -> tuple[str, str]:
    try:
        return train_here(run_dir), ""
    except Exception as error:  # noqa: BLE001  told to the test
        return type(error).__name__, str(error)


def _thrown_in_step(run_dir: RunDir, step: int) -> tuple[str, str]:
    """The same with an allocator of a device that has nothing left in one step."""
    taken, accumulate = 0, Stepper.accumulate

    def fails(self: Stepper, batches: Any) -> Any:
        nonlocal taken
        taken += 1
        part = accumulate(self, batches)
        if taken == step:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nIn detail: much.")
        return part

    Stepper.accumulate = fails  # type: ignore[method-assign]
    return _end_of(run_dir)


@pytest.mark.heavy
def test_a_run_in_too_little_memory_says_what_holds_it_and_what_to_change(
    corpus: Corpus, tmp_path: Path
) -> None:
    run_dir = _run(tmp_path / "run", corpus, micro_batch=1024)
    ((kind, text),) = run_on_ranks(_in_little_memory, 1, run_dir, _MORE_BYTES)
    assert kind == OutOfMemoryError.__name__, text
    assert re.match(r"rank 0 ran out of memory on cpu in step [12] \(.*can't allocate memory", text)
    assert re.search(r"It held [\d.]+ [MG]iB: parameters [\d.]+ KiB, gradients ", text)
    assert re.search(r"optimizer state [\d.]+ MiB, activations, Python and all else ", text)
    assert re.search(r"; [\d.]+ ([KM]i)?B are free\. Planned were [\d.]+ GiB at the loss", text)
    savings = json.loads(run_dir.plan(0).read_text())["memory_savings"]
    assert "optim.micro_batch=512" in [each["setting"] for each in savings]
    assert f"`shardyard resume {run_dir.handle} {savings[0]['setting']}`" in text


@pytest.mark.heavy
def test_a_smaller_micro_batch_fits(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "run", corpus, micro_batch=8)
    ((kind, text),) = run_on_ranks(_in_little_memory, 1, run_dir, _MORE_BYTES)
    assert kind == "finished", text


@pytest.mark.heavy
@pytest.mark.parametrize(("step", "kind"), [(1, "OutOfMemoryError"), (4, "RuntimeError")])
def test_only_what_repeats_is_final(corpus: Corpus, tmp_path: Path, step: int, kind: str) -> None:
    """A worker is not started again after an error of ours (``elastic/worker.py``)."""
    run_dir = _run(tmp_path / "run", corpus, micro_batch=2)
    ((found, text),) = run_on_ranks(_thrown_in_step, 1, run_dir, step)
    assert found == kind
    assert f"ran out of memory on cpu in step {step} (Tried to allocate 20.00 GiB.)" in text
    assert "\n" not in text  # the agent tells the last line of an error that is not final
    assert re.search(r"gradients [\d.]+ [KM]iB", text)


@pytest.mark.heavy
def test_without_a_plan_it_says_what_always_helps(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "run", corpus, micro_batch=2)
    run_dir.plan(0).write_text(
        '{"flops_per_token": {"full": 1, "causal": 1}, "peak_flops_per_s": 1}'
    )
    ((_, text),) = run_on_ranks(_thrown_in_step, 1, run_dir, 1)
    assert "Its memory was not planned. Use a smaller optim.micro_batch" in text


def test_other_errors_stay_what_they_are() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("NCCL error: Cuda failure 'out of memory'"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))

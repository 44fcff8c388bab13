"""One process of one contender: build, train against the clock, write what was found.

    python -m benchmarks.gpu.contend JOB.json      (RANK, WORLD_SIZE, ... as torchrun sets them)

Being out of memory is an answer; any other failure ends the process with its traceback.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.compilation import load_compiled, save_compiled
from benchmarks.gpu.job import Job
from benchmarks.gpu.pace import Pace
from shardyard.parallel.device import process_group_backend, select_device

Train = Callable[[Job, torch.device, Pace], list[float]]
"""Builds a model, calls ``pace.start()``, steps until ``pace.is_done``; returns the losses."""

_TRAIN = {
    "shardyard": "benchmarks.gpu.ours:train",
    "bare": "benchmarks.gpu.bare:train",
    "trainer": "benchmarks.gpu.hf_trainer:train",
}


def main() -> None:
    """Answer the job in the file named on the command line; never returns."""
    started = time.monotonic()
    job = Job.read(Path(sys.argv[1]))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = select_device(job.device, local_rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if job.cell.contender != "trainer":  # the Trainer makes its own
        dist.init_process_group(
            process_group_backend(job.device),
            device_id=None if device.type == "cpu" else device,
        )
    job.answer_file(rank).write_text(json.dumps(answer_of(job, device, started)))
    sys.stdout.flush()
    # past destructors: those of the process group may wait for a rank that has left
    os._exit(0)


def answer_of(job: Job, device: torch.device, started: float) -> dict[str, Any]:
    """What came of a job in this process, whose process group there is.

    Args:
        started: When it began, by the monotonic clock.
    """
    try:
        return _measure(job, device, started)
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "message": str(error).split(". ")[0]}


def _measure(job: Job, device: torch.device, started: float) -> dict[str, Any]:
    module, _, function = _TRAIN[job.cell.contender].partition(":")
    train: Train = getattr(import_module(module), function)
    compiled = None if job.compiled is None else Path(job.compiled)
    if compiled is not None:
        load_compiled(compiled)
    pace = Pace(device, steps=job.steps, warm_up=job.warm_up, stop_at=job.stop_at)
    losses = train(job, device, pace)
    if compiled is not None:
        save_compiled(compiled, job.cell)
    return {
        "status": "ok",
        "step_times_s": pace.step_times_s(),
        "wall_s": pace.wall_s,
        "process_s": time.monotonic() - started,
        "peak": pace.peak,
        "losses": losses,
        "attention": pace.attention,
        **({"saving": pace.saving} if pace.saving else {}),
        **pace.profile,
    }


if __name__ == "__main__":
    main()

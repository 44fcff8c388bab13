"""Our contender: the product's own loop, as ``shardyard train`` steps it."""

import os
from pathlib import Path

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.kernels import kernel_profile
from benchmarks.gpu.pace import Pace
from benchmarks.gpu.saving import copy_rate, saving
from benchmarks.gpu.variants import COPIES
from shardyard.parallel.attention_kernel import attention_kernel
from shardyard.rundir.jsonl import EventWriter, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up


def train(job: Job, device: torch.device, pace: Pace) -> list[float]:
    """Train the job; the losses are those of the metric lines written so far."""
    run_dir = RunDir(Path(job.run_dir))
    rank = int(os.environ["RANK"])
    events = EventWriter(run_dir.events, attempt=0, generation=0) if rank == 0 else None
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=events)
    may_copy = True if job.cell.variant in COPIES else None
    training = set_up(run_dir, 0, hooks, local_rank=device.index or 0, may_copy=may_copy)
    recipe, shape = training.resolved.recipe, training.resolved.shape
    assert shape is not None, "a language model"
    pace.attention = attention_kernel(recipe, shape, tp=training.mesh.layout.tp, device=device)
    loop = Loop(training)
    pace.start()
    while not pace.is_done:
        loop.step()
        pace.mark()
    if job.profile:
        pace.profile = kernel_profile(loop.step, device)
    training.close()
    if rank:
        return []
    lines = read_steps(run_dir.metrics)
    told = [*read_lines(run_dir.events)]
    if any(event["kind"] == "checkpoint_durable" for event in told):
        pace.saving = saving(lines[job.warm_up :], told, copy_rate(device))
    return [line["loss"] for line in lines]

"""The end of a whole run: a sample of what was learnt, and the last facts for the report."""

import time

from shardyard.io.files import write_text
from shardyard.parallel.device import peak_memory_bytes, reserved_memory_bytes
from shardyard.rundir.jsonl import read_counted
from shardyard.train.training import Training


def finish(training: Training, *, is_target_met: bool) -> None:
    """Generate a sample if one was asked for, and report run_finished. All ranks call it."""
    started = time.monotonic()
    with training.judged():
        sample = training.task.sample(training.resolved, training.mesh, training.device)
    peaks = training.gather(peak_memory_bytes(training.device))
    reserved = training.gather(reserved_memory_bytes(training.device))
    if training.rank != 0:
        return
    if sample is not None:
        write_text(training.run_dir.sample, sample)
    lines = read_counted(training.run_dir.metrics)
    training.report(
        "run_finished",
        step=training.progress.step,
        tokens=training.progress.tokens,
        loss=lines.steps[-1]["loss"] if lines.steps else None,
        eval=lines.evaluations[-1]["eval"] if lines.evaluations else None,
        sample=sample,
        temperature=None if sample is None else training.resolved.recipe.task.temperature,
        is_target_met=is_target_met,
        peak_bytes_by_rank=peaks,
        reserved_bytes_by_rank=reserved,
        seconds=time.monotonic() - started,
    )

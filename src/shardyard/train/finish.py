"""The end of a whole run: a sample of text, and the last facts for the report."""

import time
from pathlib import Path

from tokenizers import Tokenizer

from shardyard.parallel.device import peak_memory_bytes, reserved_memory_bytes
from shardyard.rundir.layout import write_text
from shardyard.rundir.lines import read_evaluations, read_steps
from shardyard.train.generate import generate
from shardyard.train.setup import Training


def finish(training: Training) -> None:
    """Generate a sample if one was asked for, and report run_finished. All ranks call it."""
    started = time.monotonic()
    sample = _sample(training)
    peaks = training.gather(peak_memory_bytes(training.device))
    reserved = training.gather(reserved_memory_bytes(training.device))
    if training.rank != 0:
        return
    if sample is not None:
        write_text(training.run_dir.sample, sample)
    steps = read_steps(training.run_dir.metrics)
    evaluations = read_evaluations(training.run_dir.metrics)
    training.report(
        "run_finished",
        step=training.progress.step,
        tokens=training.progress.tokens,
        loss=steps[-1]["loss"] if steps else None,
        eval=evaluations[-1]["eval"] if evaluations else None,
        sample=sample,
        peak_bytes_by_rank=peaks,
        reserved_bytes_by_rank=reserved,
        seconds=time.monotonic() - started,
    )


def _sample(training: Training) -> str | None:
    recipe, data = training.resolved.recipe, training.resolved.data
    if not recipe.task.generate_tokens:
        return None
    assert isinstance(recipe.data.seq_len, int)
    tokenizer = Tokenizer.from_file(str(Path(data.dir) / "tokenizer.json"))
    prompt = tokenizer.encode(recipe.task.prompt).ids or [0]
    continuation = generate(
        training.task,
        prompt,
        num_tokens=recipe.task.generate_tokens,
        seq_len=recipe.data.seq_len,
        vocab_size=training.resolved.shape.vocab_size,
        seed=recipe.run.seed,
        mesh=training.mesh,
        device=training.device,
    )
    return str(tokenizer.decode([*prompt, *continuation]))

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


def _prompt_ids(tokenizer: Tokenizer, text: str, bos_token: str | None) -> list[int]:
    """A prompt as documents begin in training, and without what a tokenizer puts behind a text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    return (ids if bos_id is None else [bos_id, *ids]) or [0]


def _sample(training: Training) -> str | None:
    recipe, data = training.resolved.recipe, training.resolved.data
    if not recipe.task.generate_tokens:
        return None
    assert isinstance(recipe.data.seq_len, int)
    tokenizer = Tokenizer.from_file(str(Path(data.dir) / "tokenizer.json"))
    prompt = _prompt_ids(tokenizer, recipe.task.prompt, data.bos_token)
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

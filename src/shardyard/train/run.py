"""One process's part of a run, from its set-up to its end."""

import gc
import os
import time

from shardyard.io.files import write_json, write_text
from shardyard.parallel.device import peak_memory_bytes, reserved_memory_bytes
from shardyard.rundir.jsonl import read_counted
from shardyard.rundir.layout import RunDir
from shardyard.train.errors import is_out_of_memory, out_of_memory
from shardyard.train.generated_texts import generate_texts, write_texts
from shardyard.train.hooks import Hooks, WorkerPhase
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.profile import Profiles
from shardyard.train.setup import ProcessContext, init_process_context, set_up_phase
from shardyard.train.training import Training
from shardyard.train.uploads import finish_uploads

# The end of a whole run generates a sample, and writes the last facts for the report.


def finish(training: Training, loop: Loop) -> None:
    """Generate text if some was asked for, and report run_finished. All ranks call it."""
    started = time.monotonic()
    of_step, texts = loop.texts
    if of_step != training.progress.step:
        texts = generate_texts(training)
        write_texts(training, texts, seconds=None)
    sample = texts[0].whole if texts else None
    with training.evaluation_weights():
        if sample is None:
            sample = training.task.sample(training.resolved, training.mesh, training.device)
        predictions = training.task.predictions(training.resolved)
    # Collectives, so before the ranks that have nothing to write leave.
    peaks = training.gather(peak_memory_bytes(training.device))
    reserved = training.gather(reserved_memory_bytes(training.device))
    if training.rank != 0:
        return
    if sample is not None:
        write_text(training.run_dir.sample, sample)
    if predictions:
        write_json(training.run_dir.predictions, predictions)
    lines = read_counted(training.run_dir.metrics)
    task = training.resolved.recipe.task
    training.report(
        "run_finished",
        step=training.progress.step,
        tokens=training.progress.tokens,
        loss=lines.steps[-1]["loss"] if lines.steps else None,
        eval=lines.evaluations[-1]["eval"] if lines.evaluations else None,
        sample=sample,
        temperature=None if sample is None else task.temperature,
        top_k=None if sample is None else task.top_k,
        is_target_met=loop.target_met,
        is_out_of_patience=loop.is_out_of_patience,
        peak_bytes_by_rank=peaks,
        reserved_bytes_by_rank=reserved,
        seconds=time.monotonic() - started,
    )


def train(run_dir: RunDir, attempt: int, hooks: Hooks) -> str:
    """Train this process's part of a run to its end, or until it is drained.

    torch.distributed must be initialised. Returns ``finished`` or ``drained``. The last step is
    durable then; after a drain whose state was not finite, the newest checkpoint before it.
    """
    place = init_process_context(run_dir, attempt, local_rank=int(os.environ["LOCAL_RANK"]))
    try:
        return _train_phases(run_dir, attempt, hooks, place)
    finally:
        if place.uploads is not None:
            place.uploads.close()


def _train_phases(run_dir: RunDir, attempt: int, hooks: Hooks, place: ProcessContext) -> str:
    began_t, training, loop = None, None, None
    while True:
        try:
            hooks.heartbeat.enter(WorkerPhase.SET_UP)
            training = set_up_phase(run_dir, attempt, hooks, place, since_t=began_t)
            is_last = training.is_last
            loop = Loop(training, Profiles(training))
            outcome = loop.run()
            began_t = loop.step_ended_at
            hooks.heartbeat.enter(WorkerPhase.FINISH)
            if is_last or outcome != FINISHED:
                finish_uploads(training, is_finished=outcome == FINISHED)
            if outcome == FINISHED and is_last:
                finish(training, loop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(
                error, run_dir, attempt, device=place.device, training=training,
                steps_done=0 if loop is None else loop.steps_done,
            ) from error  # fmt: skip
        finally:
            if training is not None:
                training.close()
        training = loop = None
        gc.collect()  # the model must be gone before the next phase's is made, or the group ends
        if is_last or outcome != FINISHED:
            return outcome

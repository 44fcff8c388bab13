"""Text that the model writes during training, to see what the loss does not say.

Nothing of it changes the training: weights are only read, and tokens are drawn by a generator of
their own (``tasks/causal_lm.py``).
"""

from collections.abc import Sequence

from shardyard.tasks.base import GeneratedText
from shardyard.train.hooks import WorkerPhase
from shardyard.train.training import Training


def generation_due(step: int, *, every: int | str, is_evaluated: bool) -> bool:
    """Whether text is generated after a step.

    Args:
        every: ``task.generate_every``.
        is_evaluated: Whether the run is validated after the step, too.
    """
    if isinstance(every, int):
        return step % every == 0
    return every == "validation" and is_evaluated


def generate_texts(training: Training) -> list[GeneratedText]:
    """Continue each prompt of the recipe. All ranks call it together.

    Empty: the recipe asks for no text, or the task has none.
    """
    task = training.resolved.recipe.task
    if not task.generate_tokens:
        return []
    texts = []
    with training.evaluation_weights():
        for prompt in task.prompts or (task.prompt,):
            # each prompt for itself: a hang is told from many long texts
            with training.hooks.heartbeat.during(WorkerPhase.EVALUATE):
                found = training.task.generate_text(
                    prompt, training.resolved, training.mesh, training.device
                )
            texts += [] if found is None else [found]
    return texts


def write_texts(
    training: Training, texts: Sequence[GeneratedText], *, seconds: float | None
) -> None:
    """Write texts of the step just done into the run's folder, and report them.

    Args:
        seconds: Pause of the training for them; None: it is over.
    """
    if not texts:
        return
    found = [{"prompt": each.prompt, "text": each.text} for each in texts]
    pause = {} if seconds is None else {"seconds": seconds}
    training.report("generated", step=training.progress.step, **pause, texts=found)
    training.write_texts(training.progress.step, found)

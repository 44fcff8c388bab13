"""How a run ends whose numbers are not finite: what a step cannot mend, and what to do now."""

import math

from shardyard.checkpoint.save import Abandoned
from shardyard.errors import TrainingError
from shardyard.train.step import StepResult


def too_many_skipped(step: int, result: StepResult, *, newest: int) -> TrainingError:
    """The loss or the gradients of too many steps in a row were not finite.

    Args:
        newest: Step of the newest durable checkpoint; 0: there is none.
    """
    first = "precision.compute=fp32 if it was not"
    if result.loss_scale is not None and math.isfinite(result.loss):
        first = "precision.loss_scale=dynamic or a smaller one"
    return TrainingError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; "
        f"{result.skipped_in_row} steps in a row were skipped because they were not finite. "
        f"Restarting would repeat them. Resume with {first}, or start "
        f"a new run with a lower optim.lr or optim.grad_clip. {_newest(newest)}"
    )


def scale_too_small(step: int, scale: float, *, newest: int) -> TrainingError:
    """Gradients overflow with the least scale that helps anybody.

    Args:
        newest: Step of the newest durable checkpoint; 0: there is none.
    """
    return TrainingError(
        f"step {step}: gradients overflow fp16 with a loss scale of {scale:g}, after the steps "
        "before have halved it as far as makes sense: not the scale makes them so large. Resume "
        "with precision.compute=fp32, or bf16 where the device has it, or start a new run with a "
        f"lower optim.lr. {_newest(newest)}"
    )


def not_saved(save: Abandoned, *, newest: int) -> TrainingError:
    """The state itself is not finite; no later save of this process could succeed.

    Args:
        newest: Step of the newest durable checkpoint; 0: there is none.
    """
    return TrainingError(
        f"step {save.step} was not saved, as the state is not finite: {save.reason}. No step can "
        f"mend that. {_newest(newest)} Resume the run: after the fault of a device it goes on; if "
        "the same comes again, resume with precision.compute=fp32, or start a new run with a lower "
        "optim.lr or optim.grad_clip."
    )


def _newest(step: int) -> str:
    """What a resume would go on from."""
    if not step:
        return "There is no checkpoint yet."
    return f"The newest checkpoint is from step {step} and finite."

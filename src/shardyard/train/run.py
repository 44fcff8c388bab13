"""One process's part of a run, from its set-up to its end."""

import gc
import os

from shardyard.rundir.layout import RunDir
from shardyard.train.finish import finish
from shardyard.train.hooks import Hooks, Phase
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.out_of_memory import is_out_of_memory, out_of_memory
from shardyard.train.profile import Profiles
from shardyard.train.setup import set_up_phase, take_place


def train(run_dir: RunDir, attempt: int, hooks: Hooks) -> str:
    """Train this process's part of a run to its end, or until it is drained.

    torch.distributed must be initialised. Returns ``finished`` or ``drained``. The last step is
    durable then; after a drain whose state was not finite, the newest checkpoint before it.
    """
    place = take_place(run_dir, attempt, local_rank=int(os.environ["LOCAL_RANK"]))
    began_t, training, loop = None, None, None
    while True:
        try:
            hooks.notes.enter(Phase.SET_UP)
            training = set_up_phase(run_dir, attempt, hooks, place, since_t=began_t)
            is_last = training.is_last
            loop = Loop(training, Profiles(training))
            outcome = loop.run()
            began_t = loop.step_ended_at
            hooks.notes.enter(Phase.FINISH)
            if outcome == FINISHED and is_last:
                finish(training, is_target_met=loop.target_met)
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

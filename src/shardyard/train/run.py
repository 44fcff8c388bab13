"""One process's part of a run, from its set-up to its end."""

import gc
import os

from shardyard.rundir.layout import RunDir
from shardyard.train.finish import finish
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.setup import set_up_phase, take_place


def train(run_dir: RunDir, attempt: int, hooks: Hooks) -> str:
    """Train this process's part of a run to its end, or until it is drained.

    torch.distributed must be initialised. Returns ``finished`` or ``drained``. The last step is
    durable then; after a drain whose state was not finite, the newest checkpoint before it.
    """
    place = take_place(run_dir, attempt, local_rank=int(os.environ["LOCAL_RANK"]))
    began_t = None
    while True:
        training = set_up_phase(run_dir, attempt, hooks, place, since_t=began_t)
        is_last = training.is_last
        try:
            loop = Loop(training)
            outcome = loop.run()
            began_t = loop.step_ended_at
            if outcome == FINISHED and is_last:
                finish(training)
        finally:
            training.close()
        del training, loop
        gc.collect()  # the model must be gone before the next phase's is made, or the group ends
        if is_last or outcome != FINISHED:
            return outcome

"""One process's part of a run, from its set-up to its end."""

import gc
import os

from shardyard.rundir.layout import RunDir
from shardyard.train.finish import finish
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.setup import set_up


def train(run_dir: RunDir, attempt: int, hooks: Hooks) -> str:
    """Train this process's part of a run to its end, or until it is drained.

    torch.distributed must be initialised. Returns ``finished`` or ``drained``. The last step is
    durable then; after a drain whose state was not finite, the newest checkpoint before it.
    """
    training = set_up(run_dir, attempt, hooks, local_rank=int(os.environ["LOCAL_RANK"]))
    try:
        outcome = Loop(training).run()
        if outcome == FINISHED:
            finish(training)
    finally:
        training.close()
    del training
    gc.collect()  # the model must be gone before the process group is
    return outcome

"""Priority of threads that write checkpoints while training wants the same cores."""

import os
import sys
import threading

_NICE = 10
"""Priority of threads that write, on the scale of nice(1): 0 is that of the training, 19 least."""


def yield_to_training() -> None:
    """In a thread that writes: where cores are scarce training goes first."""
    if sys.platform == "linux":  # on other systems the call would slow down the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

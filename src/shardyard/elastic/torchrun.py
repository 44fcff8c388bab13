"""`python -m shardyard.elastic.torchrun`: torchrun, which ends without a traceback if asked to."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as stopped:  # its workers have ended; torchrun would show its own stack
        sys.exit(128 + stopped.sigval)

"""`python -m shardyard.node`: what every scheduler starts once on each node (``program.py``)."""

import sys

from shardyard.node.program import command
from shardyard.terminal import run

if __name__ == "__main__":
    sys.exit(run(command))

"""`python -m shardyard.node`: what every scheduler starts once on each node (``program.py``)."""

import sys

from shardyard.io.terminal import run
from shardyard.node.main import command

if __name__ == "__main__":
    sys.exit(run(command))

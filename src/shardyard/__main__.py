"""`python -m shardyard`: the same as `shardyard`."""

import sys

from shardyard.cli import main

sys.exit(main())

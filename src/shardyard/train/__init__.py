"""Training: set-up, steps and the loop."""

import shardyard.remarks  # noqa: F401 - before libraries are imported

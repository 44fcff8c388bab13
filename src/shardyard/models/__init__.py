"""Models: made, filled, and changed for training."""

import shardyard.remarks  # noqa: F401 - before libraries are imported

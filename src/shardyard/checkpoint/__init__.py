"""Checkpoints and snapshots: written, checked, loaded, exported."""

import shardyard.remarks  # noqa: F401 - before libraries are imported

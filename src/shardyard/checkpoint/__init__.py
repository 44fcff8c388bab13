"""Checkpoints and snapshots: written, checked, loaded, exported."""

from shardyard.log import quiet_libraries

quiet_libraries()  # before libraries are imported

"""Parallelism: how ranks share a model and its data."""

from shardyard.log import quiet_libraries

quiet_libraries()  # before libraries are imported

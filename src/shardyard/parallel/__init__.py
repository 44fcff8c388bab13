"""Parallelism: how ranks share a model and its data."""

import shardyard.remarks  # noqa: F401 - before libraries are imported

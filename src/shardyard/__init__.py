"""Shardyard: train models on many accelerators from one recipe."""

__version__ = "0.1.0"

"""Checkpoints of other tools, read without the tools and without torch, and written as a folder."""

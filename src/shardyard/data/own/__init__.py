"""Datasets of the user's own (``data.module``): their items as arrays, on disk, and in batches."""

"""Settings of torch's allocator in training processes, made before any imports torch."""

from collections.abc import MutableMapping

from shardyard.config.schema.recipe import Recipe

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the name of torch before 2.9, which is still read."""


def enable_expandable_segments(recipe: Recipe, environ: MutableMapping[str, str]) -> None:
    """Have torch take a CUDA device's memory in segments that grow: what was freed in other sizes
    is not lost to the next request. What somebody said of the allocator stays as it is."""
    if recipe.cluster.device == "cuda" and not any(name in environ for name in _NAMES):
        environ[_NAMES[0]] = "expandable_segments:True"

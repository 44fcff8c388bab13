"""Shardyard: train models on many accelerators, from one recipe or in a loop of your own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.library import (
        Loaded,
        Mesh,
        accumulate,
        build_mesh,
        clip_gradients,
        evaluate,
        fill_weights,
        load_checkpoint,
        parallelize,
        save_checkpoint,
    )

__version__ = "0.1.0"

__all__ = [
    "Loaded",
    "Mesh",
    "accumulate",
    "build_mesh",
    "clip_gradients",
    "evaluate",
    "fill_weights",
    "load_checkpoint",
    "parallelize",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    # looked up at first use: the command line imports this package and answers without torch
    if name not in __all__:
        raise AttributeError(f"module 'shardyard' has no attribute {name!r}")
    return getattr(import_module("shardyard.library"), name)

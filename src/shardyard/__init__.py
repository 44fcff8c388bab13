"""Shardyard: train models on many accelerators, from one recipe or in a loop of your own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.control.analysis import ComparedRuns, Scaling, compare, study
    from shardyard.control.api import Job, Result, Run, launch, runs
    from shardyard.control.evaluate import evaluate_model
    from shardyard.control.plan import Prediction
    from shardyard.control.plan import predict as plan
    from shardyard.control.request import resolve_recipe as resolve
    from shardyard.library import (
        Loaded,
        Mesh,
        ScriptRun,
        accumulate,
        build_mesh,
        clip_gradients,
        evaluate,
        export,
        fill_weights,
        forward_backward,
        load_checkpoint,
        parallelize,
        run,
        save_checkpoint,
        steps,
        wrap,
    )

__version__ = "0.1.0"

__all__ = [
    "ComparedRuns",
    "Job",
    "Loaded",
    "Mesh",
    "Prediction",
    "Result",
    "Run",
    "Scaling",
    "ScriptRun",
    "accumulate",
    "build_mesh",
    "clip_gradients",
    "compare",
    "evaluate",
    "evaluate_model",
    "export",
    "fill_weights",
    "forward_backward",
    "launch",
    "load_checkpoint",
    "parallelize",
    "plan",
    "resolve",
    "run",
    "runs",
    "save_checkpoint",
    "steps",
    "study",
    "wrap",
]

_CONTROL = {
    "ComparedRuns": "analysis:ComparedRuns",
    "Job": "api:Job",
    "Prediction": "plan:Prediction",
    "Result": "api:Result",
    "Run": "api:Run",
    "Scaling": "analysis:Scaling",
    "compare": "analysis:compare",
    "evaluate_model": "evaluate:evaluate_model",
    "launch": "api:launch",
    "plan": "plan:predict",
    "resolve": "request:resolve_recipe",
    "runs": "api:runs",
    "study": "analysis:study",
}
"""Name -> module:name in shardyard/control; all others are of shardyard/library, with torch."""


def __getattr__(name: str) -> Any:
    # looked up at first use: the command line imports this package and answers without torch
    if name not in __all__:
        raise AttributeError(f"module 'shardyard' has no attribute {name!r}")
    if name not in _CONTROL:
        return getattr(import_module("shardyard.library"), name)
    module, _, there = _CONTROL[name].partition(":")
    return getattr(import_module(f"shardyard.control.{module}"), there)


def __dir__() -> list[str]:
    """Return the public names, which completion shows before their first use."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])

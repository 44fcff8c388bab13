"""Shardyard in somebody's own loop: what ``import shardyard`` offers, see docs/library.md."""

from shardyard.library.checkpoint import Loaded, load_checkpoint, save_checkpoint
from shardyard.library.mesh import build_mesh
from shardyard.library.model import fill_weights, parallelize
from shardyard.library.pretrained import export
from shardyard.library.resumable_steps import steps
from shardyard.library.script_run import ScriptRun, run
from shardyard.library.step import accumulate, clip_gradients, evaluate, forward_backward
from shardyard.library.wrapping import wrap
from shardyard.parallel.mesh import Mesh

__all__ = [
    "Loaded",
    "Mesh",
    "ScriptRun",
    "accumulate",
    "build_mesh",
    "clip_gradients",
    "evaluate",
    "export",
    "fill_weights",
    "forward_backward",
    "load_checkpoint",
    "parallelize",
    "run",
    "save_checkpoint",
    "steps",
    "wrap",
]

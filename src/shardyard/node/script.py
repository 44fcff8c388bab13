"""A node of `shardyard launch -- SCRIPT`: starts the script's processes with torchrun.

Node 0 forwards the events and metrics that the script writes by ``shardyard.run`` to its output, as
of a training. A request to stop is passed on once; the script's checkpoints are durable then.
"""

import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import EXIT_DRAINED
from shardyard.launchers.local_job import end_with_parent
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.log import info
from shardyard.node.log_markers import marked_on_stdout
from shardyard.own_processes import python_program
from shardyard.rundir.layout import RunDir
from shardyard.rundir.script import RUN_DIR_VARIABLE, ScriptCommand

_TORCHRUN = "shardyard.elastic.torchrun"
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it, new workers may wait for dead ones after a restart."""


def script_node(
    script: ScriptCommand,
    recipe: Recipe,
    run: RunDir,
    assignment: NodeAssignment,
    *,
    nonce: str,
    folder: Path | None,
) -> int:
    """Run this node's processes of a script; the exit code.

    Args:
        folder: Of launch.code, where the script is then; None: it is where the node was started.
    """
    is_first = assignment.node_rank == 0
    with marked_on_stdout(run, nonce=nonce) if is_first else nullcontext():
        return _Torchrun(torchrun_words(script, recipe, assignment), run, folder).wait()


def torchrun_words(script: ScriptCommand, recipe: Recipe, assignment: NodeAssignment) -> list[str]:
    """Return the command that starts this node's processes; pure."""
    options = {
        "nnodes": assignment.nodes,
        "nproc-per-node": script.processes,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{assignment.host}:{assignment.port}",
        "rdzv-id": assignment.session,
        "max-restarts": restarts_of(recipe),
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [*python_program(_TORCHRUN), *words, *script.words]


def restarts_of(recipe: Recipe) -> int:
    """Return how often torchrun starts a script again that failed: an error may come each time."""
    is_set = "max_restarts" in recipe.elastic.model_fields_set
    return recipe.elastic.max_restarts if is_set else 0


class _Torchrun:
    """The processes of this node; a request to stop is passed on to them once."""

    def __init__(self, words: list[str], run: RunDir, folder: Path | None) -> None:
        self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self._process = subprocess.Popen(
            words,
            env={_NO_SHARED_STORE: "1", **os.environ, RUN_DIR_VARIABLE: str(run.path)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that it gets a request once, and from here
            preexec_fn=end_with_parent,
        )
        if self._is_stopping:  # while it started
            self._process.terminate()

    def wait(self) -> int:
        """Return the exit code for the scheduler, once all have ended."""
        assert self._process is not None
        code = self._process.wait()
        if self._is_stopping:
            return EXIT_DRAINED
        if code != 0:
            info(f"the script's processes ended with exit code {code}")
        return 0 if code == 0 else 1

    def _pass_on(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            if self._process is not None:
                self._process.terminate()

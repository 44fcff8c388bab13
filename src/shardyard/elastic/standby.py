"""Parked processes: a node's next workers, ready before those that run are lost.

Each has imported what a worker needs, has made its device's context and taken a tiny step; then it
waits. As a loss ends all workers of a node, there are as many as the node has workers. They take
ranks and generation from the agent, and others are parked behind them.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, start_processes

from shardyard import torch_private
from shardyard.config.layout import Layout
from shardyard.config.resolved import Resolved
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Memory, Model, Optim, Precision, Recipe
from shardyard.elastic.drain import name_process
from shardyard.elastic.worker import die_with_agent, take_device
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import fill_weights
from shardyard.parallel.mesh import Mesh
from shardyard.rundir.attempt_files import read_resolved
from shardyard.tasks.lookup import task_class
from shardyard.train.setup import build_optimizer, build_sharded
from shardyard.train.step import Stepper

_METHOD = "forkserver"
READY_NAME = "parked"
"""Name in `ps` and `top` of a process that is ready, until it is a worker."""
_WORKER_NAME = "python"
_GONE_S = 10
"""For killed processes to be gone."""


class StandbyPool:
    """The parked processes of one node, seen by its agent."""

    def __init__(self, resolved: Path, *, processes: int, logs: LogsSpecs) -> None:
        """Args:
        resolved: File of the settings that they get ready for.
        processes: Workers of the node.
        """
        self._resolved = resolved
        self._processes = processes
        self._logs = logs
        self._standby: PContext | None = None
        self._pipes: list[Connection] = []

    @property
    def is_empty(self) -> bool:
        """Whether none were started since the last were employed."""
        return self._standby is None

    def spawn(self) -> None:
        """Start as many processes as the node has workers; returns before they are ready."""
        pipe = multiprocessing.get_context(_METHOD).Pipe
        pipes = dict(enumerate(pipe() for _ in range(self._processes)))
        size = {"LOCAL_WORLD_SIZE": str(self._processes)}
        self._standby = start_processes(
            "parked",
            run_standby_worker,
            args={rank: (str(self._resolved), theirs) for rank, (_, theirs) in pipes.items()},
            envs={rank: {**size, "LOCAL_RANK": str(rank)} for rank in pipes},
            logs_specs=self._logs,
            start_method=_METHOD,
        )
        self._pipes = [ours for ours, _ in pipes.values()]
        for _, theirs in pipes.values():
            theirs.close()

    def start(self, **asked: Any) -> PContext:
        """Give the parked processes their orders, if all are ready; else start others as usual.

        Args:
            asked: As torch's ``start_processes``, all by name.
        """
        parked, self._standby = self._standby, None
        if parked is None:
            return start_processes(**asked)
        if parked.wait(0) is not None or not all(order.poll() for order in self._pipes):
            # one has ended, or with it the fork server; or one still compiles, for who knows how
            # long, and would take the time of the cores from those that are needed now
            parked.close(signal.SIGKILL, _GONE_S)
            return start_processes(**asked)
        for rank, order in enumerate(self._pipes):
            order.send((asked["envs"][rank], asked["entrypoint"], asked["args"][rank]))
            order.close()
        return parked


def run_standby_worker(resolved: str, pipe: Connection) -> str:
    """Entry point of a parked process: get ready, and become the worker that the agent names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker; SIGTERM is held back until it is
    die_with_agent()
    settings = read_resolved(Path(resolved))
    try:
        with _silence():
            _get_ready(settings)
    except Exception as error:  # noqa: BLE001  a worker that is not warm is slow, and no more
        print(f"a parked process could not warm up: {error!r}", file=sys.stderr)
    name_process(READY_NAME)
    pipe.send(READY_NAME)
    environment, entrypoint, arguments = pipe.recv()
    name_process(_WORKER_NAME)
    os.environ.update(environment)
    outcome: str = entrypoint(*arguments)
    return outcome


def _get_ready(settings: Resolved) -> None:

    warm_up(settings, take_device(settings.recipe))


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the output of libraries about a tiny model, which is of no use to users."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


# What is slow the first time in a process, done before it is needed: steps of a small model.
#
# They go the way of a real step (sharding, optimizer, the compiler where the recipe has one), so
# that nobody has to know what that imports, starts and looks up. The group that they are taken in
# has one rank that exists and sends nothing.
#
# Where the recipe compiles, the model is one block of the run's own, if that is small. The compiler
# keeps what it made of a block's code in this process and compares sizes, formats and settings
# only, so the run's blocks, which are other objects, need not be compiled again.

_RANK = 65_536
"""Higher than any run's. Torch remembers operators by the ranks of their mesh and the names of its
axes, and would find this group, which is gone by then, for a run's."""

_MOST_PARAMETERS = 2**24
"""Most parameters of a block of the run's own.

With gradients and AdamW's averages they take 256 MiB, for a moment.
"""
_VOCAB = 64
"""Blocks do not know the vocabulary."""


def warm_up(of: Resolved, device: torch.device) -> None:
    """Take steps as this run does, but small; only a warm process is left of them.

    Random numbers that come later are those that would have come without it.
    """
    dist.init_process_group(
        "fake", store=torch_private.fake_store(), rank=_RANK, world_size=_RANK + 1
    )
    try:
        with torch.random.fork_rng(devices=[]):
            recipe, shape = _own_block(of, device) or _tiny(of.recipe)
            _take_steps(recipe, shape, device, shards=of.recipe.parallel.dp_shard != 1)
    finally:
        gc.collect()  # the model must be gone before the process group is
        dist.destroy_process_group()


def _own_block(of: Resolved, device: torch.device) -> tuple[Recipe, ModelShape] | None:
    """Return one block of the run's model; None: it is not compiled, or is split over processes.

    On a device there is no room for it next to the process that trains.
    """
    recipe, degrees = of.recipe, of.recipe.parallel
    is_split = any(each != 1 for each in (degrees.tp, degrees.cp, degrees.pp, degrees.ep))
    if of.shape is None or not recipe.model.compile or device.type != "cpu" or is_split:
        return None
    if of.shape.block_parameters > _MOST_PARAMETERS or recipe.memory.offload != "none":
        return None
    return recipe, replace(of.shape, num_hidden_layers=1, vocab_size=_VOCAB)


def _tiny(of: Recipe) -> tuple[Recipe, ModelShape]:
    compute = of.precision.compute if of.precision.compute in ("fp32", "bf16") else "fp32"
    recipe = Recipe(
        model=Model(preset="llama-tiny", dropout=0.0, compile=of.model.compile),
        data=Data(seq_len=16),
        optim=Optim(lr=1e-3, weight_decay=0.1, global_batch=2, micro_batch=1),
        precision=Precision(compute=compute, output=compute),
        memory=Memory(loss_chunk="none"),
    )
    return recipe, replace(PRESETS["llama-tiny"].shape, vocab_size=_VOCAB)


def _take_steps(recipe: Recipe, shape: ModelShape, device: torch.device, *, shards: bool) -> None:
    # Of two shards the one rank has one, and sends nothing: as in the run, not as replicas go.
    layout = Layout(dp_replicate=1, dp_shard=2 if shards else 1, zero=3)
    ranks = torch.tensor([_RANK]).view(1, 1, 1, 1)
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    dense = DeviceMesh(device.type, ranks, mesh_dim_names=axes)
    mesh = Mesh(layout=layout, dense=dense, experts=None, context=None)
    computation = build_sharded(recipe, shape, mesh, device=device)
    optimizer = build_optimizer(recipe, computation, mesh, device=device)
    fill_weights(computation.model, folder=None, seed=0)
    stepper = Stepper(computation, optimizer, mesh, device=device, grad_clip=1.0)
    batch = task_class(recipe.task.name).empty_batch(recipe)
    stepper.run([batch, batch], lr=1e-3, drain=False).read()

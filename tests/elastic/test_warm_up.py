"""A process that has warmed up need not compile the run's blocks."""

import gc
import os
from functools import partialmethod
from pathlib import Path

import pytest

from shardyard.elastic.rendezvous.c10d import serve_store, worker_store
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_forked
from tests.distributed.runs import make_run, prepare_corpus


def _graphs_of_a_first_step(
    rank: int, world_size: int, port: int, run_dir: RunDir, *, warms: bool
) -> int:
    """How many are compiled for it; they are run operator by operator, as a C++ compiler takes
    minutes on two cores."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters

    from shardyard.elastic.warm_up import warm_up
    from shardyard.train.hooks import Hooks
    from shardyard.train.loop import Loop
    from shardyard.train.setup import set_up

    eager = partialmethod(nn.Module.compile, backend="aot_eager")
    nn.Module.compile = eager  # type: ignore[method-assign,assignment]
    if warms:
        warm_up(read_resolved(run_dir.resolved(0)), torch.device("cpu"))
        assert counters["stats"]["unique_graphs"] > 0
        counters.clear()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    store = worker_store("127.0.0.1", port, 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, 0, hooks, local_rank=rank)
    Loop(training).step()
    graphs = int(counters["stats"]["unique_graphs"])
    training.close()
    del training
    gc.collect()
    dist.destroy_process_group()
    return graphs


def _warm(rank: int, world_size: int, port: int, run_dir: RunDir) -> int:
    return _graphs_of_a_first_step(rank, world_size, port, run_dir, warms=True)


def _cold(rank: int, world_size: int, port: int, run_dir: RunDir) -> int:
    return _graphs_of_a_first_step(rank, world_size, port, run_dir, warms=False)


@pytest.mark.system
def test_a_warm_process_compiles_nothing_for_its_first_step(tmp_path: Path) -> None:
    sections = {
        "model": {"compile": True},
        "parallel": {"strategy": "FULL_SHARD"},
        "cluster": {"devices": 2},
    }
    run_dir = make_run(tmp_path / "run", prepare_corpus(tmp_path), sections)
    for function, compiles in ((_warm, False), (_cold, True)):
        store = serve_store("127.0.0.1", 0)
        graphs = run_forked(function, 2, store.port, run_dir, timeout_s=1200)
        assert [each > 0 for each in graphs] == [compiles] * 2

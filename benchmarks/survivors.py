"""Do survivors that keep their process bring the next step sooner? A prototype, beside the product.

After a loss the product ends all workers of a node and has parked processes take over
(`elastic/standby.py`). Here one process that is no agent does either, in turn, in the same run: it
kills a worker, and then `replaced` ends the survivor too and orders two parked processes to work,
while `kept` orders one, and the survivor closes its training, destroys its process groups, joins
new ones and calls the ordinary set-up again. Both go on from the snapshot in memory, which the
parent owns. No private name of torch is used.

    OMP_NUM_THREADS=1 python -m benchmarks.survivors [--kills 20]

Each with `model.compile` and without. Seconds are from the kill to the next finished step; the
parent hears of the death from the kernel and never polls, which is alike for both.
Writes one JSON file.
"""

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_result
from shardyard.config.formulas import slot_labels
from shardyard.elastic.rendezvous.c10d import serve_store, worker_store
from shardyard.elastic.shared_memory import AgentMemory, attach
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from tests.distributed.runs import make_run, prepare_corpus

RANKS = 2
WAYS = ("replaced", "kept")
_HOST = "127.0.0.1"
_STEPS_BETWEEN = 6
_PATIENCE_S = 900.0
_PRELOAD = (
    "shardyard.train.run",
    "shardyard.elastic.warm_up",
    "shardyard.elastic.preload_compiler",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each way, with and without")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    kills = {}
    for name, compiles in (("eager", False), ("compiled", True)):
        kills[name] = measure(args.kills, compiles=compiles)
    medians = {name: summarize(rows) for name, rows in kills.items()}
    write_result("survivors", {"medians": medians, "kills": kills}, args.out)
    for name, told in medians.items():
        print(name, told)
    return 0


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians in seconds, and by how much `kept` is shorter, of kills beside each other."""
    by_way = {way: [row["seconds"] for row in rows if row["way"] == way] for way in WAYS}
    pairs = zip(by_way["replaced"], by_way["kept"], strict=True)
    return {
        **{way: round(median(seconds), 4) for way, seconds in by_way.items()},
        "shorter_by": round(1 - median(kept / replaced for replaced, kept in pairs), 4),
    }


def measure(kills: int, *, compiles: bool) -> list[dict[str, Any]]:
    """So many kills of each way, in turn; ranks alternate from pair to pair."""
    multiprocessing.set_forkserver_preload(list(_PRELOAD))
    with tempfile.TemporaryDirectory(prefix="survivors-") as scratch:
        folder = Path(scratch)
        (folder / "corpus").mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        run = make_run(
            folder / "run", prepare_corpus(folder / "corpus"),
            {
                "run": {"steps": 1_000_000},
                "model": {"compile": compiles},
                "data": {"seq_len": 64},
                "optim": {"global_batch": 8, "micro_batch": 4},
                "checkpoint": {"every": 1_000_000},
                "parallel": {"strategy": "FULL_SHARD"},
                "elastic": {"snapshot_every": 2},
                "cluster": {"devices": RANKS},
            },
        )  # fmt: skip
        with _group(run) as group:
            return [
                {"way": way, "rank": rank, "seconds": round(group.kill(rank, way), 4)}
                for number in range(kills)
                for rank in (number % RANKS,)
                for way in WAYS
            ]


@contextmanager
def _group(run: RunDir) -> Iterator["_Group"]:
    memory = [AgentMemory.create(label) for rank in range(RANKS) for label in slot_labels(rank)]
    assert all(memory), "snapshots need Linux"
    group = _Group(run)
    try:
        yield group
    finally:
        group.end()


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    orders: Connection


class _Group:
    """The workers of one run and those that are parked behind them, seen by their parent."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._store = serve_store(_HOST, 0)
        self._generation = 0
        self._parked = [self._park(rank) for rank in range(RANKS)]
        self._workers = list[_Worker]()
        self._employ(range(RANKS))
        self._parked = [self._park(rank) for rank in range(RANKS)]

    def kill(self, rank: int, way: str) -> float:
        """Seconds from the end of a rank to the next step; the group steps and is warm before."""
        self._wait(lambda: len(self._steps()) >= _STEPS_BETWEEN)
        self._wait(lambda: all(worker.orders.poll() for worker in self._parked))
        lost, killed_t = self._workers[rank], time.time()
        lost.process.kill()
        lost.process.join()
        survivors = [each for each in self._workers if each is not lost]
        if way == "replaced":
            for each in survivors:
                each.process.kill()
                each.process.join()
        self._generation += 1
        if way == "replaced":
            self._employ(range(RANKS))
        else:
            for each in survivors:
                each.orders.send(self._generation)
            self._employ([rank])
        self._wait(lambda: bool(self._first_steps()))
        seconds = float(self._first_steps()[0]["t"]) - killed_t
        self._wait(lambda: len(self._steps()) >= 2)
        for number, worker in enumerate(self._parked):
            if worker in self._workers:
                self._parked[number] = self._park(number)
        return seconds

    def end(self) -> None:
        for worker in {*self._parked, *self._workers}:
            worker.process.kill()
            worker.process.join()

    def _employ(self, ranks: Any) -> None:
        for rank in ranks:
            worker = self._parked[rank]
            assert worker.orders.recv() == "ready"
            worker.orders.send(self._generation)
            self._workers[rank : rank + 1] = [worker]

    def _park(self, rank: int) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (str(self._run.path), rank, self._store.port, theirs)
        process = context.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _steps(self) -> list[dict[str, Any]]:
        lines = read_lines(self._run.metrics)
        return [line for line in lines if line.get("generation") == self._generation]

    def _first_steps(self) -> list[dict[str, Any]]:
        return [
            event
            for event in read_lines(self._run.events)
            if event["kind"] == "first_step" and event["generation"] == self._generation
        ]

    def _wait(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            dead = [worker for worker in self._workers if not worker.process.is_alive()]
            if dead or time.monotonic() > until_s:
                raise SystemExit(f"waited in vain; ended: {dead}")
            time.sleep(0.02)


def _work(run_dir: str, rank: int, port: int, orders: Connection) -> None:
    """A process: get ready, then be a rank of one generation after the other."""
    import torch.distributed as dist

    from shardyard.elastic.warm_up import warm_up
    from shardyard.elastic.worker import take_device
    from shardyard.own_processes import signal_at_parent_death
    from shardyard.train.hooks import Hooks
    from shardyard.train.run import train

    signal_at_parent_death(signal.SIGKILL)
    run = RunDir(Path(run_dir))
    resolved = read_resolved(run.resolved(0))
    recipe = resolved.recipe
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    warm_up(resolved, take_device(recipe))
    orders.send("ready")
    while True:
        generation = int(orders.recv())
        dist.init_process_group(
            "gloo", store=worker_store(_HOST, port, generation), rank=rank, world_size=RANKS,
            timeout=timedelta(seconds=recipe.elastic.collective_timeout_s),
        )  # fmt: skip
        events = EventWriter(run.events, attempt=0, generation=generation) if rank == 0 else None
        hooks = Hooks(
            generation=generation, drain_requested=lambda: False, events=events, memory=attach
        )
        try:
            train(run, 0, hooks)
        except RuntimeError as error:  # the other rank is gone, and its collective broke
            print(f"rank {rank} outlives generation {generation}: {error}", file=sys.stderr)
        gc.collect()  # the model must be gone before its groups are
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

"""What the neighbour's copy of snapshots costs steps, on a link of 10 Gbit/s.

Two hosts are network namespaces of this machine, joined by a link that is limited; on each an agent
and a worker, which computes and sums gradients with the other one over the same link. Windows of
steps without a snapshot, with one, and with one that is copied to the neighbour take turns:

    OMP_NUM_THREADS=1 python -m benchmarks.snapshot_neighbour        (as root, Linux)

Both hosts share the cores of this machine, which real ones do not: it tells more than it costs.
"""

import argparse
import ctypes
import json
import math
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.record import write_result
from benchmarks.snapshot_cost import TENSORS, _passes, _work
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.config.formulas import SENT, best_every, snapshot_labels
from shardyard.config.schema.recipe import Cluster, Elastic, Recipe
from shardyard.elastic.agent_messages import AgentMessages
from shardyard.elastic.peer_snapshots import PeerReplication, RingPosition
from shardyard.elastic.rendezvous.c10d import connect_store, serve_store
from shardyard.elastic.seal import Seal
from shardyard.elastic.shared_memory import AgentMemory, attach
from shardyard.network_interface import loopback_interface

SHARE = 0.05
"""Of the throughput that the copies may cost."""
MTBF_S = 86_400.0
"""Between failures: what `auto` expects where no plan says it."""
RECIPE = Recipe(
    cluster=Cluster(devices=2, nodes=2), elastic=Elastic(snapshot_every=1, snapshot_neighbour=True)
)
"""Two ranks a node: the snapshots of the first are copied, those of the second are not."""
KINDS = ("none", "own", "neighbour")
GRADIENT_SHARE = 3
"""Of a state with both of AdamW's averages."""
_WARM_UP = 3
_LOST_S = 120.0
"""A host that has not come to a sum of gradients by then has failed."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one size; seconds are medians of the slower host."""

    mib: float
    rounds: int
    window_steps: int
    step_s: float
    """With the sum of gradients."""
    blocked_s: float
    """That training stands still for a copied snapshot."""
    counts_after_s: float
    """From the copy in memory until the neighbour has it."""
    own_s: float
    """That a snapshot costs all steps of its window."""
    neighbour_s: float
    """The same with its copy."""
    every: int
    """Steps between snapshots that `auto` chooses."""
    own_share: float
    neighbour_share: float
    """Of the throughput, at that interval."""
    least_every: int
    """Steps at which the copy alone costs no more than ``SHARE``."""


class Told(NamedTuple):
    """How a worker measures."""

    host: int
    mib: float
    rounds: int
    step_s: float
    address: str
    port: int
    interface: str
    out: Path


def measure(mib: float, *, rounds: int, step_s: float, gbit: float | None) -> Cost:
    """Both hosts, from their start to their end.

    Args:
        gbit: Of the link between them; None: both are on the loopback interface.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = "127.0.0.1" if gbit is None else "10.77.7.1"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        hosts = []
        for host in range(2):
            interface = loopback_interface() if gbit is None else f"neighbour{host}"
            out = Path(folder) / f"{host}.json"
            told = Told(host, mib, rounds, step_s, address, port, interface, out)
            hosts.append(_start(told, apart=gbit is not None))
        if gbit is not None:
            _join([pid for pid, _ in hosts], gbit)
        for _, go in hosts:
            os.write(go, b"!")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in hosts]
        assert codes == [0, 0], f"a host ended with {codes}"
        told_costs = [json.loads((Path(folder) / f"{host}.json").read_text()) for host in range(2)]
    return max((Cost(**each) for each in told_costs), key=lambda cost: cost.neighbour_s)


def _start(told: Told, *, apart: bool) -> tuple[int, int]:
    """A host: its process, and where it is told to go on."""
    (ready, is_ready), (waits, go) = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(is_ready)
        os.close(waits)
        assert os.read(ready, 1) == b"!", "the namespace cannot be made"
        return pid, go
    try:
        if apart:
            _unshare_network()
        os.write(is_ready, b"!")
        os.read(waits, 1)
        _be_host(told)
    except BaseException:  # noqa: BLE001  the outermost line of a process
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _unshare_network() -> None:
    new_network = 0x40000000  # CLONE_NEWNET of sched.h
    if ctypes.CDLL(None, use_errno=True).unshare(new_network):
        raise OSError(ctypes.get_errno(), "a network namespace of its own needs root")


def _join(pids: Sequence[int], gbit: float) -> None:
    """A link between the namespaces of two processes; it goes with them."""
    ends = ("neighbour0", "neighbour1")
    _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, (pid, end) in enumerate(zip(pids, ends, strict=True)):
        _run("ip", "link", "set", end, "netns", str(pid))
        inside = ("nsenter", "--net", "--target", str(pid))
        _run(*inside, "ip", "address", "add", f"10.77.7.{number + 1}/24", "dev", end)
        for each in ("lo", end):
            _run(*inside, "ip", "link", "set", each, "up")
        # the bucket holds what the rate lets through between two ticks of the kernel's clock
        limit = ("rate", f"{gbit}gbit", "burst", "8mb", "latency", "50ms")
        _run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limit)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _be_host(told: Told) -> None:
    """The agent of a host; its worker is a process of its own."""
    owned = {label: AgentMemory.create(label) for label in snapshot_labels(RECIPE)}
    worker = os.fork()
    if not worker:
        _be_worker(told)
        os._exit(0)
    store = serve_store(told.address, told.port) if told.host == 0 else _connected(told)
    neighbour = PeerReplication.of(owned, RECIPE)
    assert neighbour is not None, "snapshots need Linux"
    place = RingPosition(0, told.host, 2, (told.address, told.port), Seal(b"of this benchmark"))
    neighbour.begin(place, AgentMessages(store, group_rank=told.host, num_nodes=2), _fail)
    store.set(f"begun-{told.host}", "")
    _, status = os.waitpid(worker, 0)
    store.set(f"over-{told.host}", "")
    store.wait(["over-0", "over-1"])
    neighbour.close()
    os._exit(os.waitstatus_to_exitcode(status))


def _fail(reason: str) -> None:
    print(f"snapshots are not copied: {reason}", file=sys.stderr)
    os._exit(1)


def _connected(told: Told) -> dist.TCPStore:  # type: ignore[name-defined]  # built in C++
    return connect_store(told.address, told.port)


def _own_only(label: str, size_bytes: int | None = None, /) -> mmap.mmap | None:
    """The agent's memory, as it is where nothing is copied."""
    return None if label == SENT else attach(label, size_bytes)


class _Worker:
    """What trains on a host."""

    def __init__(self, told: Told) -> None:
        self._tensors = {
            f"model.{number}": torch.rand(max(1, round(told.mib * 2**20 / 4 / TENSORS)))
            for number in range(TENSORS)
        }
        self._gradients = torch.rand(max(1, round(told.mib * 2**20 / 4 / GRADIENT_SHARE)))
        self.costs = Interval(1)
        own, copied = (
            Snapshots(
                self._tensors, memory, local_rank=local, rank=2 * told.host + local, world_size=4,
                generation=local, names=TENSORS, restored=None, interval=interval,
            )
            for local, memory, interval in ((1, _own_only, Interval(1)), (0, attach, self.costs))
        )  # fmt: skip
        self._snapshots = {"own": own, "neighbour": copied}
        self._number = 0
        self._passes = 1
        sums_s = statistics.median(self._step() for _ in range(5))
        self._passes = _passes(max(1e-3, told.step_s - sums_s))
        self.step_s = statistics.median(self._step() for _ in range(10))

    def _step(self) -> float:
        started = time.perf_counter()
        _work(self._passes)
        dist.all_reduce(self._gradients)
        return time.perf_counter() - started

    def window(self, kind: str, steps: int) -> float:
        """Seconds of so many steps, after a snapshot of this kind."""
        dist.barrier()
        started = time.perf_counter()
        if kind != "none":
            self._number += 1
            self._snapshots[kind].take(self._number, self._tensors, {})
        for _ in range(steps):
            self._step()
        return time.perf_counter() - started

    def close(self) -> None:
        for each in self._snapshots.values():
            each.close()


def _be_worker(told: Told) -> None:
    store = _connected(told)
    store.wait(["begun-0", "begun-1"])
    os.environ["GLOO_SOCKET_IFNAME"] = told.interface
    within = timedelta(seconds=_LOST_S)
    dist.init_process_group("gloo", store=store, rank=told.host, world_size=2, timeout=within)
    worker = _Worker(told)
    for _ in range(_WARM_UP):  # each slot's pages are taken once
        for kind in KINDS:
            worker.window(kind, steps=4)
    # the same number on both hosts
    step_s, counts_after_s = _slowest(worker.step_s), _slowest(max(worker.costs.counts_s))
    window_steps = 1 + math.ceil(counts_after_s / step_s)
    rounds = [
        {kind: worker.window(kind, window_steps) for kind in _turned(number)}
        for number in range(told.rounds)
    ]
    worker.close()
    cost = _cost(told, worker, rounds, window_steps)
    told.out.write_text(json.dumps(asdict(cost)))
    dist.destroy_process_group()


def _turned(number: int) -> list[str]:
    """The kinds, another one first each time."""
    first = number % len(KINDS)
    return [*KINDS[first:], *KINDS[:first]]


def _slowest(seconds: float) -> float:
    """Of both hosts."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _cost(told: Told, worker: _Worker, rounds: list[dict[str, float]], window_steps: int) -> Cost:
    own_s, neighbour_s = (
        max(0.0, statistics.median(each[kind] - each["none"] for each in rounds))
        for kind in ("own", "neighbour")
    )
    copy_s = max(0.0, statistics.median(each["neighbour"] - each["own"] for each in rounds))
    step_s = _slowest(worker.step_s)
    blocked_s = _slowest(statistics.median(worker.costs.blocked_s))
    counts_after_s = _slowest(statistics.median(worker.costs.counts_s))
    every = best_every(step_s=step_s, blocked_s=blocked_s, counts_s=counts_after_s, mtbf_s=MTBF_S)
    return Cost(
        mib=told.mib,
        rounds=told.rounds,
        window_steps=window_steps,
        step_s=step_s,
        blocked_s=blocked_s,
        counts_after_s=counts_after_s,
        own_s=own_s,
        neighbour_s=neighbour_s,
        every=every,
        own_share=own_s / (every * step_s),
        neighbour_share=neighbour_s / (every * step_s),
        least_every=max(1, math.ceil(copy_s / (SHARE * step_s))),
    )


def _words(cost: Cost) -> str:
    blocked, counts, own, neighbours = (
        f"{seconds * 1e3:.1f} ms"
        for seconds in (cost.blocked_s, cost.counts_after_s, cost.own_s, cost.neighbour_s)
    )
    return (
        f"{cost.mib:g} MiB, steps of {cost.step_s * 1e3:.0f} ms: a snapshot blocks {blocked} and "
        f"counts after {counts}; it costs the steps {own}, with its copy {neighbours}. "
        f"auto chooses every {cost.every} steps: {cost.neighbour_share:.2%} of throughput with "
        f"copies, {cost.own_share:.2%} without. The copy alone costs at most {SHARE:.0%} from "
        f"elastic.snapshot_every={cost.least_every} on"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--gbit", type=float, default=10.0, help="0: on loopback, without root")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    costs = [
        measure(mib, rounds=args.rounds, step_s=args.step_ms / 1e3, gbit=args.gbit or None)
        for mib in args.mib
    ]
    for cost in costs:
        print(_words(cost))
    link = {"gbit": args.gbit or None}
    write_result(
        "snapshot-neighbour", {**link, "costs": [asdict(cost) for cost in costs]}, args.out
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

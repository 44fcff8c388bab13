"""One collective at one size on this rank: what it sends, what must come out, and the call.

Values are small whole numbers with a period of 13, so that fp32 sums of them are exact, and the
values of every rank are known to all.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # built in C++

from shardyard.elastic.rendezvous.c10d import connect_store, serve_store
from shardyard.errors import ShardyardError
from shardyard.hardware.network_counters import sent_bytes, sent_since
from shardyard.io.files import parse_json
from shardyard.io.polling import wait_for
from shardyard.network_interface import (
    OWN_STORE,
    address_towards,
    check,
    is_loopback,
    worker_variables,
)
from shardyard.own_processes import signal_at_parent_death
from shardyard.parallel.collectives import all_gather_into, reduce_scatter_into
from shardyard.parallel.device import (
    available_device,
    process_group_backend,
    select_device,
    synchronize,
)
from shardyard.rundir.network import ELEMENT_BYTES, Collective, NetworkBench, answer_line, rounds

_PERIOD = 13


class CollectiveCase:
    """Buffers of one row of the table."""

    def __init__(
        self,
        collective: Collective,
        size_bytes: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Args:
        size_bytes: Of the largest buffer of a rank; cut to what all ranks can share.
        """
        self._collective = collective
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        whole = size_bytes // ELEMENT_BYTES
        self._part = whole // self._ranks
        """Elements that one rank gives or gets, where they are split."""
        self._whole = whole if collective == "all_reduce" else self._part * self._ranks
        self._device = device
        self._source = torch.empty(self._num_inputs, device=device)
        self._target = torch.empty(self._num_outputs, device=device)

    @property
    def size_bytes(self) -> int:
        """Bytes as nccl-tests print them: the larger of sent and received. 0: too small."""
        return self._whole * ELEMENT_BYTES

    @property
    def count(self) -> int:
        """Elements passed to the call, as nccl-tests print them."""
        return self._whole if self._collective == "all_reduce" else self._part

    @property
    def checks_in_place(self) -> bool:
        """nccl-tests time an all-to-all in place, which no library promises to be right."""
        return self._collective != "alltoall"

    def fill(self) -> None:
        """Put the known values where either call reads them."""
        self._source.copy_(self._values(self._rank, self._num_inputs))
        self._target.zero_()
        if self._collective == "all_gather":
            self._own_part(self._target).copy_(self._source)
        elif self._num_outputs == self._num_inputs:
            self._target.copy_(self._source)

    def run(self, *, in_place: bool) -> Tensor:
        """Call it; returns what came out.

        torch has no all-reduce from one buffer into another, so out of place is a copy before it.
        """
        source, target, group = self._source, self._target, self._group
        match self._collective:
            case "all_reduce":
                if not in_place:
                    target.copy_(source)
                dist.all_reduce(target, group=group)
            case "all_gather":
                source = self._own_part(target) if in_place else source
                all_gather_into(target, source, group)
            case "reduce_scatter":
                target = self._own_part(source) if in_place else target
                reduce_scatter_into(target, source, group)
            case "alltoall":
                source = target if in_place else source
                dist.all_to_all_single(target, source, group=group)
            case _:
                assert_never(self._collective)
        return target

    def count_mismatches(self, *, in_place: bool) -> int:
        """Call it once with known values; how many results of this rank are wrong."""
        self.fill()
        found = self.run(in_place=in_place)
        return int((found != self._expected()).sum())

    @property
    def _num_inputs(self) -> int:
        return self._part if self._collective == "all_gather" else self._whole

    @property
    def _num_outputs(self) -> int:
        return self._part if self._collective == "reduce_scatter" else self._whole

    def _own_part(self, whole: Tensor) -> Tensor:
        return whole[self._rank * self._part : (self._rank + 1) * self._part]

    def _expected(self) -> Tensor:
        ranks = range(self._ranks)
        match self._collective:
            case "all_reduce" | "reduce_scatter":
                total = sum((_pattern(rank) for rank in ranks), torch.zeros(_PERIOD))
                whole = _repeated(total, self._whole, self._device)
                return whole if self._collective == "all_reduce" else self._own_part(whole)
            case "all_gather":
                return torch.cat([self._values(rank, self._part) for rank in ranks])
            case "alltoall":
                return torch.cat([self._own_part(self._values(r, self._whole)) for r in ranks])
            case _:
                assert_never(self._collective)

    def _values(self, rank: int, count: int) -> Tensor:
        return _repeated(_pattern(rank), count, self._device)


def _pattern(rank: int) -> Tensor:
    """Element i of a rank's values is (i + 7 rank) mod 13."""
    return (torch.arange(_PERIOD, dtype=torch.float32) + 7 * rank) % _PERIOD


def _repeated(pattern: Tensor, count: int, device: torch.device) -> Tensor:
    return pattern.to(device).repeat(count // _PERIOD + 1)[:count]


# `python -m shardyard.elastic.bench_worker` is one rank of `shardyard bench network`.
#
# It reads its place from torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...). Rank 0 prints
# the measurements, one a line (rundir/network.py); the other ranks print only errors.

COUNTERS_AGE_S = 0.05
"""The kernel refreshes hardware counters at most so often (ib_core: every 10 ms)."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This process among the others."""

    rank: int
    local_rank: int
    node: int
    nodes: int
    device: torch.device
    store: TCPStore

    @property
    def leads_node(self) -> bool:
        return self.local_rank == 0


def main(arguments: list[str]) -> int:
    """Run a measurement: BENCH, kind of device, name of this node, seconds of patience."""
    bench, kind, name, timeout_s = NetworkBench.from_text(arguments[0]), *arguments[1:]
    signal_at_parent_death(signal.SIGKILL)
    doing = "the meeting of all ranks"
    try:
        with _joined(bench, kind, float(timeout_s)) as ranks:
            _introduce(ranks, name)
            doing = "measuring"
            if bench.is_pairs:
                measure_pairs(bench, ranks)
            else:
                measure_tables(bench, ranks)
            dist.barrier()
    except ShardyardError as error:
        return _fail(str(error), error.exit_code)
    except RuntimeError as error:  # of torch: a peer ended, or nothing came within the timeout
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _fail(
            f"rank {os.environ['RANK']} on {name} broke off during {doing}: {first}. A rank or its "
            "node ended, or the network between them does not carry what it should. Look at what "
            "the other nodes say (`shardyard logs RUN --all`).",
            1,
        )
    return 0


def _fail(words: str, exit_code: int) -> int:
    if os.environ["RANK"] == "0":
        print(answer_line("failed", error=words, exit_code=exit_code), flush=True)
    else:
        print(f"error: {words}", file=sys.stderr, flush=True)
    # not through the interpreter's end: destructors of process groups wait for other ranks
    os._exit(exit_code)


@contextmanager
def _joined(bench: NetworkBench, kind: str, timeout_s: float) -> Iterator[RankContext]:
    """The process group of all ranks, while the block runs."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    check(os.environ)
    os.environ.update(OWN_STORE)
    store = serve_store(host, port) if rank == 0 else connect_store(host, port, within=timeout)
    store.set_timeout(timeout)
    mine = address_towards(store.host, store.port)
    os.environ.update(
        worker_variables(
            mine, _non_loopback_addresses(store, mine, world_size, timeout_s), os.environ
        )
    )
    kind = available_device() if kind == "auto" else kind
    device = select_device(kind, local_rank)
    dist.init_process_group(
        process_group_backend(kind),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    yield RankContext(
        rank=rank,
        local_rank=local_rank,
        node=rank // bench.processes,
        nodes=world_size // bench.processes,
        device=device,
        store=store,
    )
    leave(store, world_size, serves=rank == 0, within_s=timeout_s)
    dist.destroy_process_group()


def leave(store: TCPStore, world_size: int, *, serves: bool, within_s: float) -> None:
    """Leave the store; the rank that serves it goes last, and waits for no rank that is lost.

    The store has no password, so its port is open no longer than the measurement takes.
    """
    store.add("left", 1)
    if serves:
        have_all_left = lambda: store.add("left", 0) >= world_size  # noqa: E731
        wait_for(have_all_left, within_s=within_s, every_s=0.01)


def _non_loopback_addresses(
    store: TCPStore, own_address: str, world_size: int, timeout_s: float
) -> list[str]:
    """An address of a node that is no loopback one, if a node has any; all ranks call it."""
    if not is_loopback(own_address):
        store.set("elsewhere", own_address)
    store.add("addressed", 1)
    are_all_there = lambda: store.add("addressed", 0) >= world_size  # noqa: E731
    wait_for(are_all_there, within_s=timeout_s, every_s=0.01)
    return [store.get("elsewhere").decode()] if store.check(["elsewhere"]) else []


def _introduce(ranks: RankContext, name: str) -> None:
    """Rank 0 says who is there: host, process and device of each rank."""
    mine = {"node": name, "pid": os.getpid(), "device": ranks.local_rank}
    mine["kind"] = _device_name(ranks.device)
    ranks.store.set(f"rank/{ranks.rank}", json.dumps(mine))
    if ranks.rank == 0:
        every = range(dist.get_world_size())
        them = [parse_json(ranks.store.get(f"rank/{rank}")) for rank in every]
        print(answer_line("ranks", ranks=them), flush=True)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


# --- tables -------------------------------------------------------------------------------------


def measure_tables(bench: NetworkBench, ranks: RankContext) -> None:
    """A table of each collective, and what interfaces sent meanwhile."""
    for number, collective in enumerate(bench.collectives):
        if ranks.rank == 0:
            print(answer_line("begins", collective=collective), flush=True)
        before = _counted(ranks)
        calls = {}
        for size in bench.sizes():
            case = CollectiveCase(collective, size, device=ranks.device)
            if case.count == 0:
                continue  # fewer elements than ranks
            row = measure_row(case, bench, ranks.device)
            # out of place and in place, each with its warm-up, its iterations and its check
            calls[case.size_bytes] = (
                2 * (bench.warmup + bench.iterations) + 1 + case.checks_in_place
            )
            if ranks.rank == 0:
                named = {"collective": collective, "size_bytes": case.size_bytes}
                print(answer_line("row", **named, count=case.count, **row), flush=True)
        _report_traffic(ranks, before, number, collective, calls)


def measure_row(
    case: CollectiveCase, bench: NetworkBench, device: torch.device
) -> dict[str, float | int | None]:
    """Seconds of a call, mean over ranks, and wrong values of all ranks; the same on every rank."""
    case.fill()
    out_s = time_of(case, bench, device, in_place=False)
    # Filled again: out of place has overwritten the buffer that is the input in place.
    case.fill()
    in_s = time_of(case, bench, device, in_place=True)
    wrong_out = case.count_mismatches(in_place=False)
    wrong_in = case.count_mismatches(in_place=True) if case.checks_in_place else 0
    total = torch.tensor([out_s, in_s, wrong_out, wrong_in], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    out_s, in_s, wrong_out_all, wrong_in_all = total.tolist()
    world_size = dist.get_world_size()
    return {
        "out_s": out_s / world_size,
        "out_wrong": int(wrong_out_all),
        "in_s": in_s / world_size,
        "in_wrong": int(wrong_in_all) if case.checks_in_place else None,
    }


def time_of(
    case: CollectiveCase, bench: NetworkBench, device: torch.device, *, in_place: bool
) -> float:
    """Seconds of one call on this rank: of many one after the other, as nccl-tests do."""
    for _ in range(bench.warmup):
        case.run(in_place=in_place)
    synchronize(device)
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(bench.iterations):
        case.run(in_place=in_place)
    synchronize(device)
    return (time.perf_counter() - began_s) / bench.iterations


def _counted(ranks: RankContext) -> dict[str, int]:
    """Return the bytes that interfaces have sent, at a moment without transfers."""
    synchronize(ranks.device)
    dist.barrier()
    synchronize(ranks.device)
    if not ranks.leads_node:
        return {}
    # Now no rank sends, and the barrier's own messages are out too; only the counters lag behind.
    time.sleep(COUNTERS_AGE_S)
    return sent_bytes()


def _report_traffic(
    ranks: RankContext, before: dict[str, int], number: int, collective: str, calls: dict[int, int]
) -> None:
    now = _counted(ranks)
    if ranks.leads_node:
        ranks.store.set(f"sent/{number}/{ranks.node}", json.dumps(sent_since(before, now)))
    if ranks.rank == 0:
        sent = [parse_json(ranks.store.get(f"sent/{number}/{node}")) for node in range(ranks.nodes)]
        print(answer_line("traffic", collective=collective, sent=sent, calls=calls), flush=True)


# --- pairs --------------------------------------------------------------------------------------


def measure_pairs(bench: NetworkBench, ranks: RankContext) -> None:
    """All-reduces of each pair of nodes, the pairs of a round at the same time."""
    before = _counted(ranks)
    for number, pairs in enumerate(rounds(ranks.nodes)):
        # Each rank makes all groups, in one order: new_group is a collective of the whole world.
        groups = [dist.new_group(_members(bench, pair)) for pair in pairs]
        mine = [index for index, pair in enumerate(pairs) if ranks.node in pair]
        dist.barrier()
        for index in mine:  # one at most
            group = groups[index]
            seconds = _pair_seconds(bench, ranks, group)
            if ranks.leads_node and ranks.node == min(pairs[index]):
                ranks.store.set(f"pair/{number}/{index}", json.dumps(seconds))
        dist.barrier()
        if ranks.rank == 0:
            for index, (a, b) in enumerate(pairs):
                seconds = parse_json(ranks.store.get(f"pair/{number}/{index}"))
                print(answer_line("pair", a=a, b=b, seconds=seconds), flush=True)
        for index in mine:
            dist.destroy_process_group(groups[index])
    _report_traffic(ranks, before, 0, "all_reduce", {})


def _members(bench: NetworkBench, pair: tuple[int, int]) -> list[int]:
    return [node * bench.processes + local for node in pair for local in range(bench.processes)]


def _pair_seconds(bench: NetworkBench, ranks: RankContext, group: dist.ProcessGroup) -> float:
    """Return the median seconds of a call; a disturbed one has no effect on it."""
    case = CollectiveCase("all_reduce", bench.end_bytes, device=ranks.device, group=group)
    case.fill()
    for _ in range(bench.warmup):
        case.run(in_place=True)
    times_s = []
    for _ in range(bench.iterations):
        synchronize(ranks.device)
        dist.barrier(group)
        began_s = time.perf_counter()
        case.run(in_place=True)
        synchronize(ranks.device)
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A node of `shardyard bench network`: starts one process a device, and tells what rank 0 measured.

Node 0 prints the tables as they come, which a log of the job then holds, and each answer as a
marked line for the command that follows it. The network that was used becomes an event of the run's
folder, as of a training.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardyard.bench import nccl_table
from shardyard.bench.nccl_table import CollectiveTiming
from shardyard.config.schema.recipe import Recipe
from shardyard.control_groups import usable_cores
from shardyard.errors import RequestError, ShardyardError
from shardyard.hardware.network_counters import busiest
from shardyard.io.polling import poll_in_background, wait_for
from shardyard.launchers.log_markers import mark
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.log import info
from shardyard.node.log_markers import marked_on_stdout
from shardyard.node.network_check import (
    ask_for_network,
    interfaces_in,
    network_in,
    write_network_event,
)
from shardyard.own_processes import python_program
from shardyard.rundir.layout import RunDir
from shardyard.rundir.network import (
    NetworkBench,
    ObservedNetwork,
    Transport,
    answer_in,
    answer_line,
)

_MODULE = "shardyard.elastic.bench_worker"
_POLL_S = 0.2
_GRACE_S = 10.0
"""For the other ranks of a node to end by themselves after one has broken off."""


def bench_node(
    bench: NetworkBench, recipe: Recipe, run: RunDir, assignment: NodeAssignment, nonce: str
) -> int:
    """Measure this node's share; the exit code."""
    told = _BenchOutput(bench, run, assignment, nonce)
    if bench.is_pairs and assignment.nodes == 1:
        return told.reject_pairs(requested_nodes=recipe.cluster.nodes)
    with _Ranks(bench, recipe, assignment) as ranks:
        if assignment.node_rank > 0:
            return ranks.finish()
        with marked_on_stdout(run, nonce=nonce):
            with poll_in_background(ranks.poll, every_s=_POLL_S, name="ranks"):
                for line in ranks.output():
                    told.take(line)
            return told.end(ranks.finish())


class _Ranks:
    """The processes of this node; none is left behind the block."""

    def __init__(self, bench: NetworkBench, recipe: Recipe, assignment: NodeAssignment) -> None:
        name = assignment.own_host or socket.gethostname()
        words = [bench.to_text(), recipe.cluster.device, name]
        words.append(str(recipe.elastic.collective_timeout_s))
        self._broke_s: float | None = None
        self._processes = [
            _start(
                words,
                _environment(bench, assignment, local),
                is_read=assignment.node_rank + local == 0,
            )
            for local in range(bench.processes)
        ]

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for process in self._processes:
            process.wait()

    def output(self) -> Iterator[str]:
        """Lines of rank 0 until its end."""
        out = self._processes[0].stdout
        assert out is not None
        for line in out:
            yield line.rstrip("\n")

    def poll(self) -> bool:
        """Whether all have ended; where one broke off, the others do so soon, or are killed."""
        codes = [process.poll() for process in self._processes]
        if self._broke_s is None and any(codes):
            self._broke_s = time.monotonic()
        if self._broke_s is not None and time.monotonic() - self._broke_s > _GRACE_S:
            self._kill()
        return None not in codes

    def finish(self) -> int:
        """Wait for all; the exit code that says how they ended."""
        wait_for(self.poll, every_s=_POLL_S)
        codes = [process.wait() for process in self._processes]
        failed = [code for code in codes if code > 0]
        return failed[0] if failed else int(any(codes))

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _start(words: list[str], env: dict[str, str], *, is_read: bool) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        python_program(_MODULE, *words),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_read else None,
        stderr=subprocess.STDOUT if is_read else None,
        text=True,
        errors="replace",
    )


def _environment(
    bench: NetworkBench, assignment: NodeAssignment, local_rank: int
) -> dict[str, str]:
    rank = assignment.node_rank * bench.processes + local_rank
    cores = usable_cores()
    env = {"OMP_NUM_THREADS": str(max(1, cores // bench.processes)), **os.environ}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(assignment.nodes * bench.processes),
        "LOCAL_WORLD_SIZE": str(bench.processes),
        "MASTER_ADDR": assignment.host,
        "MASTER_PORT": str(assignment.port),
    }
    if rank == 0:
        ask_for_network(env)
    return env


class _BenchOutput:
    """Results that rank 0 has reported, printed as tables and as log events."""

    def __init__(
        self, bench: NetworkBench, run: RunDir, assignment: NodeAssignment, nonce: str
    ) -> None:
        self._bench, self._run, self._assignment, self._nonce = bench, run, assignment, nonce
        self._ranks: list[dict[str, Any]] = []
        self._rows: list[CollectiveTiming] = []
        self._pairs: dict[nccl_table.Pair, float] = {}
        self._transport: Transport | None = None
        self._interfaces = ""
        self._is_network_reported = False
        self._has_failed = False

    def take(self, line: str) -> None:
        """One line of rank 0."""
        answer = answer_in(line)
        if answer is None:
            self._interfaces = interfaces_in(line) or self._interfaces
            self._transport = self._transport or network_in(line)
            info(line)
            return
        kind = answer.pop("is")
        match kind:
            case "ranks":
                self._ranks = answer["ranks"]
                self._mark("ranks", ranks=len(self._ranks), nodes=self._nodes)
            case "begins":
                self._rows = []
                collective = nccl_table.collective_named(answer["collective"])
                _print(*nccl_table.preamble(collective, self._bench, self._ranks))
            case "row":
                self._rows.append(measured_of(answer))
                self._mark("row", **answer)
                _print(nccl_table.row(self._rows[-1], len(self._ranks)))
            case "pair":
                pair = (int(answer["a"]), int(answer["b"]))
                self._pairs[pair] = self._pair_busbw_gbs(float(answer["seconds"]))
                self._mark("pair", a=pair[0], b=pair[1], busbw_gbs=self._pairs[pair])
            case "traffic":
                self._take_traffic(answer)
            case "failed":
                self._has_failed = True
                self._mark("failed", **answer)
                info(f"error: {answer['error']}")
            case _:
                raise ShardyardError(
                    f"rank 0 says {kind!r}, which its node does not know. This is a bug of "
                    "shardyard: please report it."
                )

    def reject_pairs(self, *, requested_nodes: int) -> int:
        """Say that there is no pair of nodes here; the exit code."""
        words = (
            f"--pairs: the job came up on one node, although cluster.nodes={requested_nodes} were "
            "asked for, so no pair of nodes can be measured. Look at what the scheduler gave it "
            "(`shardyard status RUN`), and give the launcher all its nodes."
        )
        self.take(answer_line("failed", error=words, exit_code=RequestError.exit_code))
        return RequestError.exit_code

    def end(self, code: int) -> int:
        """The last words; the exit code."""
        if code and not self._has_failed:
            words = (
                f"the processes of node 0 ended with {code} and no message. Their last lines are "
                "above; a process that was killed most often had too little memory: lower --end."
            )
            self._mark("failed", error=words, exit_code=code)
            info(f"error: {words}")
        elif not code:
            self._mark("done")
        return code

    @property
    def _nodes(self) -> list[str]:
        return [each["node"] for each in self._ranks[:: self._bench.processes]]

    def _pair_busbw_gbs(self, seconds: float) -> float:
        factor = nccl_table.bus_factor("all_reduce", 2 * self._bench.processes)
        return factor * self._bench.end_bytes / seconds / 1e9

    def _take_traffic(self, answer: dict[str, Any]) -> None:
        """The end of a table, or of all pairs."""
        if self._bench.is_pairs:
            _print(*nccl_table.lines(self._pairs, self._nodes, self._bench.end_bytes))
        else:
            _print(*nccl_table.ending(self._rows, len(self._ranks)))
        if self._assignment.nodes == 1:
            return
        if not self._bench.is_pairs:
            must = nccl_table.required_send_bytes(
                nccl_table.collective_named(answer["collective"]),
                {int(size): calls for size, calls in answer["calls"].items()},
                ranks=len(self._ranks),
                nodes=self._assignment.nodes,
            )
            # nodes on one machine have all counted the same interfaces
            counted = answer["sent"][:1] if self._assignment.is_one_machine else answer["sent"]
            carried = nccl_table.bytes_by_interface(counted)
            self._mark("traffic", collective=answer["collective"], must=must, carried=carried)
            _print(*nccl_table.traffic_check_lines(carried, must))
        if not self._is_network_reported:
            self._report_network(answer["sent"][0])

    def _report_network(self, sent: dict[str, int]) -> None:
        """Write down what was used, as in a training; said once, after the first table."""
        if self._ranks[0]["kind"] == "CPU":
            interface = busiest(sent, is_one_machine=self._assignment.is_one_machine) or ""
            network = ObservedNetwork(
                transport="sockets", said_by="gloo", attempt=0, interfaces=interface
            )
        elif self._transport is not None:
            network = ObservedNetwork(
                transport=self._transport, said_by="NCCL", attempt=0, interfaces=self._interfaces
            )
        else:
            return
        self._is_network_reported = True
        write_network_event(self._run, network)
        self._mark("network", **asdict(network))
        _print(f"# network between nodes: {network.words}, as {network.said_by} says")

    def _mark(self, kind: str, **content: Any) -> None:
        print(mark("answer", {"bench": kind, **content}, nonce=self._nonce), flush=True)


def measured_of(answer: dict[str, Any]) -> CollectiveTiming:
    """A row as rank 0 tells it."""
    return CollectiveTiming(
        **{**answer, "collective": nccl_table.collective_named(answer["collective"])}
    )


def _print(*lines: str) -> None:
    print("\n".join(lines), flush=True)

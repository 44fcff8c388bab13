"""Over what the nodes of a run really talked to each other: the newest event of kind `network`."""

import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from shardyard.errors import RequestError
from shardyard.io.files import parse_json
from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir

Transport = Literal["efa", "infiniband", "sockets"]

WORDS: dict[Transport, str] = {
    "efa": "EFA", "infiniband": "InfiniBand or RoCE", "sockets": "TCP sockets"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ObservedNetwork:
    """Network transport of a run, and the source of that information."""

    transport: Transport
    said_by: str
    """NCCL, whose log named it; or gloo, which has no other."""
    attempt: int
    interfaces: str = ""
    """Interfaces by name or number; for gloo the one that sent most; empty: not reported."""

    @property
    def words(self) -> str:
        """Name of the transport for a person."""
        return WORDS[self.transport] + (f" ({self.interfaces})" if self.interfaces else "")


def network_of(event: Mapping[str, Any]) -> ObservedNetwork | None:
    """Read an event of kind `network`; None: it names no known transport."""
    transport = event.get("transport")
    for known in get_args(Transport):
        if transport == known:
            attempt = event.get("attempt")
            return ObservedNetwork(
                transport=known,
                said_by=str(event.get("said_by")),
                attempt=attempt if isinstance(attempt, int) else 0,
                interfaces=str(event.get("interfaces") or ""),
            )
    return None


def read_network(run_dir: RunDir) -> ObservedNetwork | None:
    """Return the newest; None: the run has one node, or no event has named its network yet."""
    for event in read_lines_backwards(run_dir.events, with_any=('"network"',)):
        if event.get("kind") == "network" and (found := network_of(event)) is not None:
            return found
    return None


# What `shardyard bench network` asks of a job's nodes, and what rank 0 answers, line by line.
#
# Read by both halves: the control half renders it and makes tables of the answers, the training
# half measures.

BENCH_VARIABLE = "SHARDYARD_BENCH"
"""Variable that makes a job's nodes measure the network, and how; they then do not train."""

ANSWER_MARK = "@collectives "
"""Begins a line of rank 0 that holds an answer: an object whose ``is`` says which."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""Collectives that have a program in nccl-tests, by the program's name."""

ELEMENT_BYTES = 4  # fp32, which nccl-tests call float


@dataclass(frozen=True, kw_only=True)
class NetworkBench:
    """Settings of a network benchmark."""

    collectives: tuple[Collective, ...]
    """Collectives in order; with ``is_pairs`` only all-reduces are measured."""
    begin_bytes: int
    end_bytes: int
    """Largest size: sizes double from ``begin_bytes`` up to it; pairs are measured only at it."""
    warmup: int
    """Calls before the clock starts, of each row."""
    iterations: int
    is_pairs: bool
    processes: int
    """Number of processes on each node."""

    def to_text(self) -> str:
        """Return the text that its nodes are given."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "NetworkBench":
        """Read ``to_text``.

        Raises:
            RequestError: Another version wrote it.
        """
        try:
            content = parse_json(text)
            bench = NetworkBench(**{**content, "collectives": tuple(content["collectives"])})
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{BENCH_VARIABLE}={text[:100]!r} is not a benchmark of this version of Shardyard "
                f"({error}). The command line writes it; if both are not of one version, let the "
                "nodes' image or Python have that of the command line."
            ) from error
        return bench

    def sizes(self) -> Iterator[int]:
        """Bytes of each row."""
        size = self.begin_bytes
        while size <= self.end_bytes:
            yield size
            size *= 2


def take_bench(environ: MutableMapping[str, str]) -> NetworkBench | None:
    """Take this node's benchmark out of `environ`; None: it trains.

    Other processes then do not see it.
    """
    text = environ.pop(BENCH_VARIABLE, "")
    return NetworkBench.from_text(text) if text else None


def answer_line(what: str, **content: Any) -> str:
    """A line of rank 0's output."""
    return ANSWER_MARK + json.dumps({"is": what, **content})


def answer_in(line: str) -> dict[str, Any] | None:
    """Return the answer in a line of rank 0's output; None: it is other output."""
    _, found, text = line.partition(ANSWER_MARK)
    if not found:
        return None
    try:
        content = parse_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "is" in content else None


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """A tournament: each round has disjoint pairs, and each pair of nodes meets in one round.

    The circle method: node 0 stays, the others go round; of an odd number one rests each round.
    """
    order: list[int | None] = [*range(nodes), *([None] * (nodes % 2))]
    found = []
    for _ in range(len(order) - 1):
        half = len(order) // 2
        facing = zip(order[:half], reversed(order[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        order = [order[0], order[-1], *order[1:-1]]
    return found

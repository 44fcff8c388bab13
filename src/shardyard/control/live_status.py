"""Current status of a run, rank by rank: the data of `shardyard top`.

Only the ends of the run's files are read: a look costs the same after a day as after a
minute. It takes no time of the training. A value that was never written is None, never 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

from shardyard.config.tasks import unit_of
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.jsonl import LOSSES, latest_evaluation, latest_steps, read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import RunState, Spending, read_spending, read_state
from shardyard.rundir.telemetry import TelemetrySample, latest_sample, nodes_with_telemetry

Line = dict[str, Any]

RECENT_STEPS = 20
"""Whose median is what a step takes now."""

_BEGINS = ("attempt_started", "rendezvous")
"""Events after which the known ranks are replaced."""
_TOLD_ONCE = ("model_ready", "first_step")
_MARKS = (*LOSSES, "straggler", "node_left_out", "device_problem")
_TELLING = (*_BEGINS, *_TOLD_ONCE, *_MARKS, "resized")


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One process."""

    rank: int
    node: str
    local_rank: int
    pid: int | None
    step: int | None = None
    """Last step that it has done, by its node's telemetry."""
    step_s: float | None = None
    """Seconds of that step."""
    waits: float | None = None
    """Share of it in which it did not compute: in collectives, or for data."""
    memory_bytes: int | None
    """Bytes in use now, by telemetry; without it, the peak that the start reported."""
    utilisation: float | None = None
    """Share of the time in which its device ran any kernel."""
    power_w: float | None = None
    mark: str
    """Problem of the process; empty: none is known."""


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node, with its ranks."""

    node: str
    ranks: tuple[RankRow, ...]
    mark: str
    """Problem of the node itself."""

    @property
    def marks(self) -> str:
        """Problems of the node and of its ranks."""
        own = [self.mark] if self.mark else []
        return "; ".join([*own, *(f"rank {r.rank}: {r.mark}" for r in self.ranks if r.mark)])


@dataclass(frozen=True, kw_only=True)
class Board:
    """All of it."""

    state: RunState
    unit: str
    """Unit that is counted: token, or image."""
    last_step: int | None
    """At which the run ends."""
    world_size: int | None
    step_s: float | None
    """Median of the newest steps."""
    data_wait: float | None
    """Share of it that waits for data."""
    tokens_per_s: float | None
    mfu: float | None
    eval_loss: float | None
    """Loss of the newest evaluation."""
    spent: Spending | None
    nodes: tuple[NodeRow, ...]

    @property
    def is_over(self) -> bool:
        """Whether no process trains it."""
        return self.state.state not in ("running", "draining", "new")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_board(run: RunDir, *, is_training_remotely: bool = False) -> Board:
    """Look once.

    Args:
        is_training_remotely: Known from its scheduler, where the lease is out of reach.
    """
    events = _of_this_start(run)
    steps = list(islice(latest_steps(run.metrics), RECENT_STEPS))
    newest = steps[0] if steps else {}
    resolved = latest_resolved(run).resolved
    by_kind = {event["kind"]: event for event in events}
    ready, started = by_kind.get("model_ready", {}), by_kind.get("rendezvous", {})
    step_s = _median(steps, "step_time_s")
    wait_s = _median(steps, "data_wait_s")
    planned = None if resolved is None else resolved.steps
    state = read_state(run, is_training_remotely=is_training_remotely)
    return Board(
        state=state,
        unit="token" if resolved is None else unit_of(resolved.recipe.task.name),
        last_step=ready.get("last_step") or planned,
        world_size=started.get("world_size") or newest.get("world_size"),
        step_s=step_s,
        data_wait=wait_s / step_s if wait_s is not None and step_s else None,
        tokens_per_s=_median(steps, "tokens_per_s"),
        mfu=_median(steps, "mfu"),
        eval_loss=_latest_eval_loss(run),
        spent=read_spending(run),
        nodes=tuple(_nodes(events, state, _samples(run, started.get("attempt", 0)))),
    )


def _of_this_start(run: RunDir) -> list[Line]:
    """Events about ranks, from their newest rendezvous on."""
    events: list[Line] = []
    for event in read_lines_backwards(run.events, with_any=[f'"{kind}"' for kind in _TELLING]):
        if event.get("kind") in _TELLING:
            events.append(event)
        if event.get("kind") in _BEGINS and event.get("workers"):
            break
    return events[::-1]


def _latest_eval_loss(run: RunDir) -> float | None:
    newest = latest_evaluation(run.metrics)
    loss = None if newest is None else newest["eval"].get("loss")
    return loss if isinstance(loss, int | float) else None


def _samples(run: RunDir, attempt: int) -> dict[str, TelemetrySample]:
    """The newest line of telemetry of each node of an attempt, by its name."""
    files = nodes_with_telemetry(run).values()
    newest = [sample for path in files if (sample := latest_sample(path)) is not None]
    return {each.head.node: each for each in newest if each.head.attempt == attempt}


def _nodes(
    events: Sequence[Line], state: RunState, samples: Mapping[str, TelemetrySample]
) -> list[NodeRow]:
    """Return the nodes of the last rendezvous, in the order of their ranks, and excluded nodes."""
    workers = [worker for event in events for worker in event.get("workers") or ()]
    met = {worker["rank"]: worker for worker in workers if type(worker.get("rank")) is int}
    memory, marks = _memory(events), _rank_marks(events)
    by_node: dict[str, list[RankRow]] = {}
    for rank in sorted(met):
        node = str(met[rank].get("node"))
        ranks = by_node.setdefault(node, [])
        row = RankRow(
            rank=rank,
            node=node,
            local_rank=len(ranks),
            pid=met[rank].get("pid"),
            memory_bytes=memory.get(rank),
            mark=marks.get(rank, ""),
        )
        sample = samples.get(node)
        ranks.append(row if sample is None else _measured(row, sample))
    lost = {str(e.get("node")): str(e.get("cause")) for e in events if e["kind"] == "node_lost"}
    rows = [
        NodeRow(node=node, ranks=tuple(ranks), mark=f"lost: {lost[node]}" if node in lost else "")
        for node, ranks in by_node.items()
    ]
    out = {each.node: each.cause for each in state.left_out if each.node not in by_node}
    return [*rows, *(NodeRow(node=n, ranks=(), mark=f"left out: {c}") for n, c in out.items())]


def _measured(row: RankRow, sample: TelemetrySample) -> RankRow:
    """Return a rank with the last values of its node's telemetry."""

    def of(numbers: Mapping[str, Sequence[float | None]], name: str) -> float | None:
        values = numbers.get(name, ())
        return values[row.local_rank] if row.local_rank < len(values) else None

    step, used = of(sample.ranks, "step"), of(sample.devices, "memory_used_bytes")
    step_s, compute_s = of(sample.ranks, "step_s"), of(sample.ranks, "compute_s")
    waits = 1 - compute_s / step_s if step_s and compute_s is not None else None
    return replace(
        row,
        step=None if step is None else int(step),
        step_s=step_s,
        waits=None if waits is None else max(0.0, waits),
        memory_bytes=row.memory_bytes if used is None else int(used),
        utilisation=of(sample.devices, "utilisation"),
        power_w=of(sample.devices, "power_w"),
    )


def _memory(events: Sequence[Line]) -> dict[int, int]:
    """Bytes of each rank at its fullest, as `model_ready` tells them."""
    ready = next((e for e in reversed(events) if e["kind"] == "model_ready"), {})
    rows = [row for row in ready.get("memory_by_rank") or () if isinstance(row, dict)]
    return {
        row["rank"]: row["peak_bytes"] for row in rows if row.get("peak_bytes") and "rank" in row
    }


def _rank_marks(events: Sequence[Line]) -> dict[int, str]:
    """Return the last problem of each rank; a straggler that has recovered has no mark."""
    marks: dict[int, str] = {}
    for event in events:
        rank, kind = event.get("rank"), event["kind"]
        if type(rank) is not int:
            continue
        if kind == "straggler":
            marks[rank] = "" if event.get("is_over") else _slow(event)
        elif kind == "device_problem":
            marks[rank] = f"odd: {event.get('cause')}"
        elif kind in LOSSES:
            word = "hung" if kind == "worker_hung" else "lost"
            marks[rank] = f"{word}: {event.get('reason') or event.get('cause')}"
    return marks


def _slow(event: Line) -> str:
    if event.get("what") == "stopped":
        return f"stopped now and then, {event.get('stopped_share', 0.0):.0%} of the time"
    factor = event.get("factor") or math.nan
    does = "waits for samples," if event.get("what") == "data" else "computes"
    return f"{does} {factor:.2g} times as long"


def _median(lines: Sequence[Line], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return median(values) if values else None

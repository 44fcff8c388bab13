"""Slowdowns of a whole run that are no hang: slow ranks and links, late samples, stops."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from shardyard.elastic.agent_messages import AgentMessages
from shardyard.elastic.hang_watch import HangWatch
from shardyard.elastic.heartbeat import StepRecord, read_steps
from shardyard.elastic.pauses import PauseWatch
from shardyard.elastic.shared_memory import AgentMemory
from shardyard.telemetry.health.ranks import BLOCK_STEPS, RankBlock, Slowness, StragglerDetector

# The ranks of a run are judged by their heartbeats while it runs. Each agent cuts its own ranks'
# steps into blocks and publishes the newest every few seconds. The agent that writes events gathers
# the blocks of all nodes and has each one judged once (`telemetry/health/ranks.py`).

_LOOK_EVERY_S = 2.0
_TOLD_S = 6.0
"""Seconds for which a block is published.

It covers a few looks, so that all nodes publish the same blocks at some moment.
"""
_MOST_TOLD = 16
"""Most blocks of a rank at once; of quick steps every second, fourth, ... is published."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Slowness of a rank or a link, and its nodes."""

    slowness: Slowness
    nodes: tuple[str, ...]
    """One, or those of the ranks that a link joins."""

    @property
    def kind(self) -> str:
        """Return the kind of the event."""
        return "slow_link" if self.slowness.what == "link" else "straggler"

    @property
    def is_slow_rank(self) -> bool:
        """Whether a rank computes longer from now on: of samples and links its node is not the
        cause."""
        return self.slowness.what == "compute" and not self.slowness.is_over

    def event(self) -> dict[str, object]:
        """Its fields."""
        slow = self.slowness
        fields: dict[str, object] = {
            "step": slow.step,
            "factor": round(slow.factor, 4),
            "is_over": slow.is_over,
            "is_since_start": slow.is_since_start,
        }
        if slow.what == "link":
            times = {"exchange_s": round(slow.duration_s, 4), "peers_s": round(slow.peers_s, 4)}
            return {"ranks": list(slow.ranks), "nodes": list(self.nodes)} | fields | times
        times = {"compute_s": round(slow.duration_s, 4), "peers_s": round(slow.peers_s, 4)}
        told = {"rank": slow.ranks[0], "node": self.nodes[0], "what": slow.what}
        return told | fields | times | {"is_held_up": slow.is_intermittent}


class StragglerWatch:
    """One node's part of it, in one generation."""

    def __init__(
        self,
        messages: AgentMessages,
        *,
        node: str,
        ranks: Sequence[int],
        world_size: int,
        ranks_of_stage: int,
    ) -> None:
        """Args:
        ranks: Those of this node, by local rank.
        ranks_of_stage: So many ranks, in order, compute the same part of the model.
        """
        self._messages = messages
        self._node = node
        self._ranks = ranks
        self._world_size = world_size
        self._detector = StragglerDetector(ranks_of_stage)
        self._last_evaluated = -1
        """The newest block that was."""
        self.latest_steps = [0] * len(ranks)
        """Step of each rank that was seen last, by local rank."""
        self._steps: list[list[StepRecord]] = [[] for _ in ranks]
        """Steps of each rank in the block that is not over."""
        self._blocks: dict[int, tuple[float, list[RankBlock]]] = {}
        """Number -> when it was over, and what this node's ranks took."""
        self._polled_s = time.monotonic()

    def poll(self, steps: Sequence[Sequence[StepRecord]], *, is_evaluator: bool) -> list[Straggler]:
        """Take in the step times of this node's ranks; now and then, publish or judge them.

        Args:
            steps: Steps of each rank after ``latest_steps``, in order.
            is_evaluator: Whether this node's agent compares those of all nodes.

        Returns:
            Stragglers to report.
        """
        for local_rank, noted in enumerate(steps):
            for step in noted:
                self._take(local_rank, step)
        if time.monotonic() - self._polled_s < _LOOK_EVERY_S:
            return []
        self._polled_s = time.monotonic()
        mine = self._recent_blocks()
        if not is_evaluator:
            self._messages.publish("blocks", [asdict(block) for block in mine])
            return []
        theirs = [RankBlock(**each) for each in self._messages.from_others("blocks")]
        return list(self._evaluate([*mine, *theirs]))

    def _take(self, local_rank: int, step: StepRecord) -> None:
        self.latest_steps[local_rank] = step.step
        begun = self._steps[local_rank]
        if begun and _block(begun[0]) != _block(step):
            if len(begun) == BLOCK_STEPS:  # a start cuts a block, and a late probe may miss steps
                block = block_of(begun, rank=self._ranks[local_rank], node=self._node)
                self._blocks.setdefault(block.block, (time.monotonic(), []))[1].append(block)
            begun.clear()
        begun.append(step)

    def _recent_blocks(self) -> list[RankBlock]:
        """The newest blocks that are whole, thinned where they are many."""
        old_s = time.monotonic() - _TOLD_S
        newest = max(self._blocks, default=0)
        self._blocks = {
            number: (at_s, blocks)
            for number, (at_s, blocks) in self._blocks.items()
            # Blocks of long steps are further apart than 6 s, so the newest two always stay.
            if at_s >= old_s or number >= newest - 1
        }
        whole = {n: b for n, (_, b) in self._blocks.items() if len(b) == len(self._ranks)}
        stride = 1
        while sum(number % stride == 0 for number in whole) > _MOST_TOLD:
            # Powers of two: nodes that thin their blocks differently still publish common ones.
            stride *= 2
        return [block for n in sorted(whole) if n % stride == 0 for block in whole[n]]

    def _evaluate(self, blocks: Sequence[RankBlock]) -> Iterator[Straggler]:
        """Judge the blocks that all ranks have published and no earlier look has judged."""
        by_number: dict[int, dict[int, RankBlock]] = {}
        for block in blocks:
            by_number.setdefault(block.block, {})[block.rank] = block
        for number, by_rank in sorted(by_number.items()):
            if number <= self._last_evaluated or len(by_rank) < self._world_size:
                continue
            self._last_evaluated = number
            for slowness in self._detector.evaluate(list(by_rank.values())):
                nodes = tuple(dict.fromkeys(by_rank[rank].node for rank in slowness.ranks))
                yield Straggler(slowness=slowness, nodes=nodes)


def block_of(steps: Sequence[StepRecord], *, rank: int, node: str) -> RankBlock:
    """Return a rank's times in each step of one block."""
    names = set(steps[0].exchange_ns).intersection(*(step.exchange_ns for step in steps))
    return RankBlock(
        rank=rank,
        node=node,
        block=_block(steps[0]),
        compute_s=[_seconds(step.compute_ns) for step in steps],
        data_s=[_seconds(step.data_ns) for step in steps],
        exchange_s={
            name: [_seconds(step.exchange_ns[name]) for step in steps] for name in sorted(names)
        },
    )


def _seconds(duration_ns: int) -> float:
    return float(f"{duration_ns / 1e9:.4g}")  # all nodes tell these to one


def _block(step: StepRecord) -> int:
    return (step.step - 1) // BLOCK_STEPS


@dataclass(frozen=True, kw_only=True)
class SlowdownEvent:
    """Something that is new."""

    kind: str
    """Kind of the event."""
    fields: dict[str, object]
    rank: int
    """The one it is of, or the first of a link's."""
    factor: float
    """Times as long as its step takes."""
    is_slow_rank: bool
    """Whether the run would be quicker without this rank from now on."""


class SlowdownWatch:
    """One node's part in finding them, in one generation."""

    def __init__(
        self, messages: AgentMessages, *, node: str, ranks: Sequence[int], world_size: int,
        stages: int | None, heartbeats: AgentMemory | None, hang_watch: HangWatch | None,
    ) -> None:  # fmt: skip
        """Args:
        ranks: Ranks of this node, by local rank.
        stages: Stages of the pipeline, or 1; None: heartbeats do not tell ranks apart on these
            devices.
        hang_watch: Sees which processes are stopped; None: stops are not watched.
        """
        self._heartbeats, self._ranks = heartbeats, ranks
        self._stops = None if hang_watch is None else PauseWatch(
            hang_watch.pauses, messages, node=node, ranks=ranks, step_of=hang_watch.step_of
        )  # fmt: skip
        self._stragglers = None if stages is None else StragglerWatch(
            messages, node=node, ranks=ranks, world_size=world_size,
            ranks_of_stage=max(1, world_size // stages),
        )  # fmt: skip

    def poll(self, *, writes: bool) -> Iterator[SlowdownEvent]:
        """Tell the node that writes events, or find what is to be written.

        Args:
            writes: Whether this node's agent writes events.
        """
        if self._stops is not None:
            for turn in self._stops.poll(writes=writes):
                yield SlowdownEvent(
                    kind="straggler", fields=turn.event(), rank=turn.rank, factor=turn.factor,
                    is_slow_rank=not turn.is_over,
                )  # fmt: skip
        if self._stragglers is None:
            return
        steps = read_steps(self._heartbeats, len(self._ranks), after=self._stragglers.latest_steps)
        for found in self._stragglers.poll(steps, is_evaluator=writes):
            yield SlowdownEvent(
                kind=found.kind, fields=found.event(), rank=found.slowness.ranks[0],
                factor=found.slowness.factor, is_slow_rank=found.is_slow_rank,
            )  # fmt: skip

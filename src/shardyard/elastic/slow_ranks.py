"""What holds up all ranks of a run and is no hang: slow ranks and links, late samples, stops."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardyard.elastic.agent_memory import AgentMemory
from shardyard.elastic.hang_watch import HangWatch
from shardyard.elastic.notes import read_steps
from shardyard.elastic.notices import Notices
from shardyard.elastic.pauses import StopWatch
from shardyard.elastic.straggler import StragglerWatch


@dataclass(frozen=True, kw_only=True)
class Told:
    """Something that is new."""

    kind: str
    """Of the event."""
    fields: dict[str, object]
    rank: int
    """The one it is of, or the first of a link's."""
    factor: float
    """Times as long as its step takes."""
    is_slow_rank: bool
    """Whether the run would be quicker without this rank from now on."""


class SlowRanks:
    """One node's part in finding them, in one generation."""

    def __init__(
        self, notices: Notices, *, node: str, ranks: Sequence[int], world_size: int,
        stages: int | None, notes: AgentMemory | None, looks: HangWatch | None,
    ) -> None:  # fmt: skip
        """Args:
        ranks: Those of this node, by local rank.
        stages: Of a pipeline, or 1; None: on these devices notes do not tell ranks apart.
        looks: Sees which processes are stopped; None: nothing looks.
        """
        self._notes, self._ranks = notes, ranks
        self._stops = None if looks is None else StopWatch(
            looks.stops, notices, node=node, ranks=ranks, step_of=looks.step_of
        )  # fmt: skip
        self._stragglers = None if stages is None else StragglerWatch(
            notices, node=node, ranks=ranks, world_size=world_size,
            ranks_of_stage=max(1, world_size // stages),
        )  # fmt: skip

    def look(self, *, writes: bool) -> Iterator[Told]:
        """Tell the node that writes events, or find what is to be written.

        Args:
            writes: Whether this node's agent writes events.
        """
        if self._stops is not None:
            for turn in self._stops.look(writes=writes):
                yield Told(
                    kind="straggler", fields=turn.event(), rank=turn.rank, factor=turn.factor,
                    is_slow_rank=not turn.is_over,
                )  # fmt: skip
        if self._stragglers is None:
            return
        steps = read_steps(self._notes, len(self._ranks), after=self._stragglers.newest)
        for found in self._stragglers.look(steps, judges=writes):
            yield Told(
                kind=found.kind, fields=found.event(), rank=found.slowness.ranks[0],
                factor=found.slowness.factor, is_slow_rank=found.is_slow_rank,
            )  # fmt: skip

"""Detection of ranks that compute longer or wait longer for samples, or have a slower link.

A step is as long as its slowest rank makes it, so the ranks' steps are equally long and
cannot distinguish them. What each rank did of the step by itself can. Steps are compared
one by one, and of a block of eight the median counts: three steps that take ten times as
long make no slow rank.

- compute: what is left of a step without its waits. Evaluations and saves are no part of a step.
- data: the wait for samples, against the rank's own compute.
- link: how long a collective takes once the last rank of its group has come, which is the shortest
  time that any of them spends in it. Groups are compared with others of their form. A group without
  a like (all ranks in one) is not judged: its times do not show which of its links is slow.

A rank that is held up now and then (stopped, throttled, paged out) has steps as quick as
its peers' in between. It is detected by the mean of many steps, and by a larger factor.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardyard.telemetry.health.outliers import (
    Floats,
    Ints,
    OutlierDetector,
    OutlierTransition,
    medians_of_others,
)

BLOCK_STEPS = 8
"""Steps that are looked at together."""
LEAST_S = 0.005
"""A step that is longer by less is not worth a word: rank 0 writes the lines of all, for one."""
LEVEL = 1.25
"""Factor of its peers' compute, above which a rank is reported that was so from its start."""
LINK_LEVEL = 1.5
"""The same of a link."""
_DATA_LOOKS = 4
"""Blocks in a row, as a storage stalls for some steps now and then."""
BLOCKS_OF_MEANS = 7
"""Over which a mean is taken: enough that bursts of a loaded machine come and go."""
_MEANS = 5
"""Means in a row before a rank is reported as slow by them, or as well again."""
_HELD_UP = 2.0
"""Factor of its peers' mean, above which a rank is reported by its own."""
_WELL = 1.25
"""Below this it is as fast as its peers again."""

What = Literal["compute", "data", "link"]


@dataclass(frozen=True, kw_only=True)
class RankBlock:
    """Seconds recorded by one rank for each step of one block."""

    rank: int
    node: str
    block: int
    """Its number: of steps 8 b + 1 to 8 b + 8."""
    compute_s: Sequence[float]
    data_s: Sequence[float]
    exchange_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Time in collectives by group: ``first-last-count`` of its ranks."""

    @property
    def last_step(self) -> int:
        return (self.block + 1) * BLOCK_STEPS


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """A rank or a link is slow, or is so no more."""

    what: What
    ranks: tuple[int, ...]
    """One, or those that a link joins."""
    step: int
    factor: float
    """Times as long as usual; usual is what its peers take, and how it stood to them before."""
    duration_s: float
    peers_s: float
    is_over: bool
    is_since_start: bool
    """It was so in all steps that were seen."""
    is_intermittent: bool
    """Now and then, so that the mean of its steps is long and most of them are not."""


class StragglerDetector:
    """Judge of all ranks of one generation.

    Args:
        ranks_of_stage: Number of ranks, in order, that compute the same part of the model.
    """

    def __init__(self, ranks_of_stage: int) -> None:
        self._ranks_of_stage = ranks_of_stage
        self._ranks: tuple[int, ...] = ()
        self._tracks: dict[What, OutlierDetector] = {}
        self._links: dict[str, OutlierDetector] = {}
        """Form of the groups -> those of it."""
        self._means = _MeanDetector((), np.zeros(0, dtype=np.int64))

    def evaluate(self, blocks: Sequence[RankBlock]) -> list[Slowness]:
        """Judge one block of steps.

        Args:
            blocks: The same block of each rank.
        """
        blocks = sorted(blocks, key=lambda block: block.rank)
        ranks = tuple(block.rank for block in blocks)
        if ranks != self._ranks:
            self._begin(ranks)
        compute_s = np.array([block.compute_s for block in blocks]).T  # by step and rank
        waited_s = compute_s + np.array([block.data_s for block in blocks]).T
        step = blocks[0].last_step if blocks else 0
        found = self._compared("compute", compute_s, step)
        found += self._compared("data", waited_s, step, of_s=compute_s)
        found += self._intermittent(compute_s.mean(axis=0), step)
        return found + self._compare_links(blocks, step)

    def _begin(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        stages = np.array([rank // self._ranks_of_stage for rank in ranks], dtype=np.int64)
        self._tracks = {
            "compute": OutlierDetector(stages, level=LEVEL, least_s=LEAST_S),
            "data": OutlierDetector(stages, level=LEVEL, least_s=LEAST_S, min_blocks=_DATA_LOOKS),
        }
        self._links, self._means = {}, _MeanDetector(ranks, stages)

    def _compared(
        self, what: What, seconds: Floats, step: int, *, of_s: Floats | None = None
    ) -> list[Slowness]:
        """Turns of ranks.

        Args:
            of_s: What ``seconds`` are compared relative to: a rank's own compute.
        """
        compared_s = seconds
        if of_s is not None:
            compared_s = seconds / np.maximum(of_s, 1e-9) * np.median(of_s)
        middle_s = np.median(seconds, axis=0)
        found = []
        for turn in self._tracks[what].update(compared_s):
            rank = self._ranks[turn.unit]
            if rank not in self._means.named:
                took_s = float(middle_s[turn.unit])
                found.append(self._slowness(what, (rank,), turn, duration_s=took_s, step=step))
        return found

    def _compare_links(self, blocks: Sequence[RankBlock], step: int) -> list[Slowness]:
        found = []
        for form, transfers_s in _transfers(blocks).items():
            names = sorted(transfers_s)
            key = f"{form} {names}"
            if key not in self._links:
                groups = np.zeros(len(names), dtype=np.int64)
                self._links[key] = OutlierDetector(
                    groups, level=LINK_LEVEL, least_s=LEAST_S, is_bursty=False
                )
            steps_s = np.array([transfers_s[name] for name in names]).T
            middle_s = np.median(steps_s, axis=0)
            for turn in self._links[key].update(steps_s):
                ranks, took_s = ranks_of(names[turn.unit]), float(middle_s[turn.unit])
                found.append(self._slowness("link", ranks, turn, duration_s=took_s, step=step))
        return found

    def _intermittent(self, means_s: Floats, step: int) -> list[Slowness]:
        slow = set(self._tracks["compute"].named.tolist())
        return [
            Slowness(
                what="compute", ranks=(self._ranks[unit],), step=step, factor=mean_s / peers_s,
                duration_s=mean_s, peers_s=peers_s, is_over=is_over, is_since_start=False,
                is_intermittent=True,
            )
            for unit, mean_s, peers_s, is_over in self._means.update(means_s, but=slow)
        ]  # fmt: skip

    def _slowness(
        self,
        what: What,
        ranks: tuple[int, ...],
        turn: OutlierTransition,
        *,
        duration_s: float,
        step: int,
    ) -> Slowness:
        factor = float(np.exp(turn.deviation))
        return Slowness(
            what=what,
            ranks=ranks,
            step=step,
            factor=factor,
            duration_s=duration_s,
            peers_s=duration_s / factor,
            is_over=turn.is_over,
            is_since_start=turn.is_since_start,
            is_intermittent=False,
        )


class _MeanDetector:
    """Ranks whose mean is long while most of their steps are not.

    Args:
        ranks: In the order of all lists.
        stages: Of each rank, the number of those that it is compared with.
    """

    def __init__(self, ranks: tuple[int, ...], stages: Ints) -> None:
        self.named: set[int] = set()
        self._ranks = ranks
        self._members = [np.flatnonzero(stages == stage) for stage in np.unique(stages)]
        self._sums_s = np.zeros(len(ranks))
        self._blocks = 0
        self._rows: dict[int, int] = {}
        """Rank -> means in a row that contradict its current report."""

    def update(self, seconds: Floats, *, but: set[int]) -> list[tuple[int, float, float, bool]]:
        """Return the place of a rank, its mean, that of its peers, and whether it is over.

        Args:
            seconds: Mean of each rank in a block.
            but: Places of ranks that are reported for another reason.
        """
        self._sums_s = self._sums_s + seconds
        self._blocks += 1
        if self._blocks < BLOCKS_OF_MEANS:
            return []
        means_s, self._blocks = self._sums_s / BLOCKS_OF_MEANS, 0
        self._sums_s = np.zeros_like(means_s)
        peers_s = np.copy(means_s)
        for members in self._members:
            if len(members) > 1:
                peers_s[members] = medians_of_others(means_s[members])
        found = []
        for unit, rank in enumerate(self._ranks):
            mean_s, other_s = float(means_s[unit]), float(peers_s[unit])
            if unit in but:
                self._rows.pop(rank, None)
            elif self._turns(rank, mean_s, other_s):
                found.append((unit, mean_s, other_s, rank not in self.named))
        return found

    def _turns(self, rank: int, mean_s: float, peers_s: float) -> bool:
        if rank in self.named:
            speaks = mean_s < _WELL * peers_s
        else:
            speaks = mean_s >= _HELD_UP * peers_s and mean_s - peers_s >= LEAST_S
        row = self._rows.get(rank, 0) + 1 if speaks else 0
        self._rows[rank] = row % _MEANS
        if row == _MEANS:
            self.named ^= {rank}
        return row == _MEANS


def group_name(ranks: Sequence[int]) -> str | None:
    """Return the name of a group with evenly spaced ranks; None: they are not."""
    if len(ranks) < 2:
        return None
    step = ranks[1] - ranks[0]
    is_even = step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step))
    return f"{ranks[0]}-{ranks[-1]}-{len(ranks)}" if is_even else None


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a group."""
    first, last, count = map(int, name.split("-"))
    return tuple(range(first, last + 1, (last - first) // (count - 1)))


def _transfers(blocks: Iterable[RankBlock]) -> dict[str, dict[str, Floats]]:
    """Return form of the groups -> group -> seconds of its last rank in its collectives, by step.

    Forms with only one group, and groups with missing members, are left out.
    """
    members: dict[str, list[Sequence[float]]] = {}
    for block in blocks:
        for name, seconds in block.exchange_s.items():
            members.setdefault(name, []).append(seconds)
    forms: dict[str, dict[str, Floats]] = {}
    for name, members_s in members.items():
        first, last, count = map(int, name.split("-"))
        shortest_s = np.min(members_s, axis=0)
        if len(members_s) == count and shortest_s.min() > 0:
            forms.setdefault(f"{last - first}-{count}", {})[name] = shortest_s
    return {form: groups for form, groups in forms.items() if len(groups) > 1}

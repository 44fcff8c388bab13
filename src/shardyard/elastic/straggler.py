"""Which rank computes longer than its peers, from what all ranks note of their own steps.

A step is as long as the slowest rank makes it, so only compute tells ranks apart: a step less its
waits for other ranks. Each agent keeps the last steps of its own ranks and publishes their
quartiles every few seconds; the one that writes events compares. A rank is named when even its
quicker steps are longer than its peers' longer ones, at several looks at new steps each: a loaded
machine makes times scatter, and steps of a slow rank do not scatter down to those of a fast one.

A rank that is held up now and then (stopped, throttled, paged out) has steps as quick as its peers'
in between. It is named by the mean of many steps, and by a larger factor, since bursts of a loaded
machine make means scatter too.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from shardyard.elastic.notes import RankNotes
from shardyard.elastic.notices import Notices

_LOOK_EVERY_S = 2.0
WINDOW_STEPS = 20
"""Steps of a rank that a look is at; a step that comes and goes between two notes is missed."""
_NEW_STEPS = WINDOW_STEPS // 2
"""A look is at no fewer that the look before has not seen."""
LOOKS = 6
"""In a row, before a rank is named, or named no more."""
WINDOW_OF_MEANS = 50
"""New steps over which a mean is taken: enough that bursts of a loaded machine come and go."""
MEANS = 5
"""In a row, before a rank is named by them, or named no more."""
_SLOW = 1.5
"""Of a rank that is named: its median beside that of its peers, at least."""
_HELD_UP = 2.0
"""Of a rank that is named by its mean: that beside those of its peers, at least."""
_APART = 1.2
"""Of a rank that is named: its lower quartile beside the upper one of its peers, at least."""
_WELL = 1.25
"""Below this a rank is as fast as its peers again."""
_LEAST_S = 0.005
"""A rank that is slower by less is not worth a word: rank 0 writes the lines of all, for one."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long one rank computed in its last steps."""

    rank: int
    node: str
    step: int
    lower_s: float
    """A quarter of them is quicker."""
    median_s: float
    upper_s: float
    """A quarter of them is slower."""
    computed_s: float
    """In all of its steps so far."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that computes longer than its peers, or does so no more."""

    rank: int
    node: str
    step: int
    factor: float
    """How many times as long as its peers, the middle one of them."""
    compute_s: float
    peers_s: float
    is_over: bool
    is_held_up: bool
    """Now and then, so that the mean of its steps is long and most of them are not; else it is
    slow in each."""

    def event(self) -> dict[str, Any]:
        """Fields of the event straggler."""
        fields = asdict(self)
        rounded = {key: round(fields[key], 4) for key in ("factor", "compute_s", "peers_s")}
        return fields | rounded


class StragglerWatch:
    """One node's part of it, in one generation."""

    def __init__(
        self, notices: Notices, *, node: str, ranks: Sequence[int], ranks_of_stage: int
    ) -> None:
        """Args:
        ranks: Those of this node, by local rank.
        ranks_of_stage: So many ranks, in order, compute the same part of the model.
        """
        self._notices = notices
        self._node = node
        self._ranks = ranks
        self._computed_s: dict[int, float] = {}
        self._judge = Judge(ranks_of_stage)
        self._steps: dict[int, int] = {}
        self._compute_s: dict[int, deque[float]] = {}
        self._looked_s = time.monotonic()

    def look(self, notes: Sequence[RankNotes], *, judges: bool) -> list[Straggler]:
        """Take in what the ranks of this node noted, by local rank; now and then, tell or judge.

        Args:
            judges: Whether this node's agent compares those of all nodes.

        Returns:
            What is to be told.
        """
        for rank, note in zip(self._ranks, notes, strict=False):
            self._take(rank, note)
        if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = time.monotonic()
        mine = self._paces()
        if not judges:
            self._notices.publish("paces", [asdict(pace) for pace in mine])
            return []
        return self._judge.look([*mine, *(Pace(**p) for p in self._notices.from_others("paces"))])

    def _take(self, rank: int, note: RankNotes) -> None:
        before, self._steps[rank] = self._steps.get(rank, 0), note.step
        self._computed_s[rank] = note.computed_ns / 1e9
        if note.step > before and note.compute_ns > 0:  # that of the step before the one under way
            window = self._compute_s.setdefault(rank, deque(maxlen=WINDOW_STEPS))
            window.append(note.compute_ns / 1e9)

    def _paces(self) -> list[Pace]:
        return [
            pace_of(
                window, rank=rank, node=self._node, step=self._steps[rank],
                computed_s=self._computed_s[rank],
            )
            for rank, window in self._compute_s.items()
            if len(window) == WINDOW_STEPS
        ]  # fmt: skip


def pace_of(
    compute_s: Sequence[float], *, rank: int, node: str, step: int, computed_s: float
) -> Pace:
    """The quartiles of a rank's last steps, and the sum of all of them."""
    lower_s, median_s, upper_s = quantiles(compute_s, n=4)
    return Pace(
        rank=rank, node=node, step=step, lower_s=lower_s, median_s=median_s, upper_s=upper_s,
        computed_s=computed_s,
    )  # fmt: skip


@dataclass(kw_only=True)
class _Rule:
    """One way of being slow: who is named for it."""

    slow: float
    """Beside the peers, at least."""
    looks: int
    """In a row that speak for it, and later against it."""
    named: set[int] = field(default_factory=set)
    _looks: dict[int, int] = field(default_factory=dict)
    """Rank -> looks in a row that spoke against what is said of it now."""

    def turns(self, pace: Pace, peers: Sequence[Pace]) -> bool:
        """Take a look in; whether the rank is named from now on, or named no more."""
        if pace.rank in self.named:
            speaks = not _is_slow(pace, peers, factor=_WELL)
        else:
            is_apart = pace.lower_s >= _APART * median(peer.upper_s for peer in peers)
            speaks = is_apart and _is_slow(pace, peers, factor=self.slow)
        looks = self._looks.get(pace.rank, 0) + 1 if speaks else 0
        self._looks[pace.rank] = looks % self.looks
        if looks == self.looks:
            self.named ^= {pace.rank}
        return looks == self.looks

    def forget(self, rank: int) -> None:
        """Its looks in a row begin anew."""
        self._looks.pop(rank, None)


class Judge:
    """Compares the paces of all ranks, look by look."""

    def __init__(self, ranks_of_stage: int) -> None:
        self._ranks_of_stage = ranks_of_stage
        self._step = 0
        self._always = _Rule(slow=_SLOW, looks=LOOKS)
        self._now_and_then = _Rule(slow=_HELD_UP, looks=MEANS)
        self._before: dict[int, Pace] = {}
        """Where the steps of the next means begin."""

    def look(self, paces: Sequence[Pace]) -> list[Straggler]:
        """Ranks that are named from now on, and that are named no more."""
        step = min((pace.step for pace in paces), default=0)
        if step < self._step + _NEW_STEPS:
            return []
        self._step = step
        always = self._judged(paces, self._always, but=self._now_and_then.named)
        return always + self._judged(self._means(paces), self._now_and_then, but=self._always.named)

    def _judged(
        self, paces: Sequence[Pace], rule: _Rule, *, but: Collection[int]
    ) -> list[Straggler]:
        """By one rule, those that the other one has not named."""
        found = []
        for pace in paces:
            peers = [each for each in paces if self._are_peers(pace, each)]
            if pace.rank in but:
                rule.forget(pace.rank)
            elif peers and rule.turns(pace, peers):
                found.append(self._told(pace, peers, rule))
        return found

    def _means(self, paces: Sequence[Pace]) -> list[Pace]:
        """How long each rank computed in the steps since the last ones; empty: they are too few."""
        before, now = self._before, {pace.rank: pace for pace in paces}
        if before.keys() != now.keys():  # it begins here
            self._before = now
            return []
        if min(pace.step - before[pace.rank].step for pace in paces) < WINDOW_OF_MEANS:
            return []
        self._before = now
        return [_mean_pace(before[pace.rank], pace) for pace in paces]

    def _are_peers(self, one: Pace, other: Pace) -> bool:
        stages = {pace.rank // self._ranks_of_stage for pace in (one, other)}
        return one.rank != other.rank and len(stages) == 1

    def _told(self, pace: Pace, peers: Sequence[Pace], rule: _Rule) -> Straggler:
        peers_s = median(peer.median_s for peer in peers)
        return Straggler(
            rank=pace.rank,
            node=pace.node,
            step=pace.step,
            factor=pace.median_s / peers_s,
            compute_s=pace.median_s,
            peers_s=peers_s,
            is_over=pace.rank not in rule.named,
            is_held_up=rule is self._now_and_then,
        )


def _mean_pace(before: Pace, after: Pace) -> Pace:
    mean_s = (after.computed_s - before.computed_s) / (after.step - before.step)
    return replace(after, lower_s=mean_s, median_s=mean_s, upper_s=mean_s)


def _is_slow(pace: Pace, peers: Sequence[Pace], *, factor: float) -> bool:
    peers_s = median(peer.median_s for peer in peers)
    return pace.median_s >= factor * peers_s and pace.median_s - peers_s >= _LEAST_S

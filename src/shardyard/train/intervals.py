"""Intervals of snapshots and checkpoints, and what ``auto`` begins with.

How often the run fails, as its plan expects and corrected by what it has met so far; and the
interval that it came to before it was restarted.
"""

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from shardyard.checkpoint.save_interval import Interval
from shardyard.io.files import read_json_object
from shardyard.rundir.jsonl import EventWriter, read_lines, read_lines_backwards
from shardyard.rundir.layout import RunDir

UNKNOWN_MTBF_S = 86_400.0
"""Assumed time between failures without a plan's estimate: once a day."""
FIRST_EVERY = 10
"""Steps until the cost of one is known: measured soon, as a plan's step may be far off."""

Kind = Literal["snapshot_interval", "checkpoint_interval"]
"""The event that tells of a new one."""
_EXPECTED = {"snapshot_interval": "snapshot_mtbf_s", "checkpoint_interval": "checkpoint_mtbf_s"}
"""Plan's name of the time between failures for each kind of interval."""


def open_interval(
    kind: Kind,
    every: int | Literal["auto"],
    run_dir: RunDir,
    attempt: int,
    *,
    first_step: int,
    losses: Collection[str],
    group: dist.ProcessGroup,
    events: EventWriter | None,
) -> Interval:
    """The interval of one of the two. All ranks call it.

    Args:
        first_step: Of the newest one that counts.
        losses: Kinds of events that it is to help against.
        group: A gloo group of all ranks.
        events: On the rank that writes them.
    """
    if every != "auto":
        return Interval(every, first_step=first_step)
    values: list[Any] = [0.0, 0]
    # Rank 0 reads for all. With other intervals ranks would save at other steps, and a save is a
    # collective.
    if dist.get_rank() == 0:
        values = [
            measured_mtbf_s(kind, run_dir, attempt, losses),
            first_every(kind, run_dir),
        ]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return Interval(
        every,
        first_step=first_step,
        first_every=values[1],
        mtbf_s=values[0],
        group=group,
        report=None if events is None else partial(events.write, kind),
    )


def measured_mtbf_s(kind: Kind, run_dir: RunDir, attempt: int, losses: Collection[str]) -> float:
    """Seconds between losses of these kinds.

    What was expected counts as one failure seen after so long; each real one is one more.
    """
    started_t: dict[int, float] = {}
    ended_t: dict[int, float] = {}
    lost: set[tuple[int, int]] = set()
    for event in read_lines(run_dir.events):
        number, t = event["attempt"], event["t"]
        started_t.setdefault(number, t)
        ended_t[number] = t
        if event["kind"] in losses:
            # A failure can cost several workers of a generation. It counts once.
            lost.add((number, event["generation"]))
    # Time between two attempts is left out, as nothing ran that could have failed.
    trained_s = sum(ended_t[number] - started_t[number] for number in started_t)
    planned = _planned(run_dir, attempt, _EXPECTED[kind])
    expected_s = UNKNOWN_MTBF_S if planned is None else planned
    return (expected_s + trained_s) / (1 + len(lost))


def first_every(kind: Kind, run_dir: RunDir) -> int:
    """Steps: what the run came to last; before that few."""
    for event in read_lines_backwards(run_dir.events, with_any=(f'"{kind}"',)):
        if event["kind"] == kind:
            return int(event["every"])
    return FIRST_EVERY


def _planned(run_dir: RunDir, attempt: int, name: str) -> float | None:
    """A number of the plan's failures; None: no plan has one."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = read_json_object(run_dir.plan(attempt))
        plan = content["phases"][0] if content.get("phases") else content
        return float(plan["failures"][name])
    return None

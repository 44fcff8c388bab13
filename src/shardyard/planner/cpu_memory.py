"""Memory of ranks that compute in host memory: a rank's is that of its process."""

from dataclasses import replace

from shardyard.planner.memory import Fit, MemoryEstimate, Term, fit
from shardyard.units import format_bytes

CPU_PROCESS_BYTES = 340 * 2**20
"""Resident memory of an idle process that has imported torch and transformers.

It is 330 MiB with torch 2.13.0 (CPU) and transformers 5.23.0, measured 2026-11-21, and some
for gloo.
"""

PARKED_BYTES = 90 * 2**20
"""Resident memory that a parked process shares with no other: 34 MiB, with model.compile 86, with
torch 2.13.0 (CPU), measured 2026-11-23."""

_PARKED = Term(
    name="parked process",
    bytes=PARKED_BYTES,
    reason="elastic.parked: what is its own; the rest it shares with the fork server",
)

CPU_SAFE_SHARE = 0.8
"""Share of a machine's memory that processes may fill: what the allocator of a CPU wastes is not
modelled."""


def on_cpu(needed: MemoryEstimate, *, snapshots: int, has_standby: bool) -> MemoryEstimate:
    """Add the process's memory to a rank's, where ranks compute in host memory.

    Args:
        snapshots: Copies that elastic.snapshot_every keeps, and elastic.snapshot_neighbour of a
            rank of another node; a save writes from one of them.
        has_standby: A second process of the rank waits to take over.
    """
    states = needed.term("parameters") + needed.term("optimizer")
    # A save writes from a copy of the state, which exists whether or not there are snapshots.
    copies = states * max(1, snapshots)
    process = "Python, torch and transformers themselves, measured 2026-11-21"
    more = (
        _copies(copies, snapshots),
        Term(name="process", bytes=CPU_PROCESS_BYTES, reason=process),
        *((_PARKED,) if has_standby else ()),
    )
    total = needed.allocated_bytes + sum(term.bytes for term in more)
    # torch has no caching allocator and no context on a CPU: the three numbers are the same.
    return replace(
        needed,
        terms=(*needed.terms, *more),
        allocated_bytes=total,
        reserved_bytes=total,
        device_bytes=total,
    )


def _copies(size: int, snapshots: int) -> Term:
    if snapshots:
        several = f"elastic.snapshot_every: {snapshots} copies of parameters and optimizer"
        return Term(name="snapshots", bytes=size, reason=several)
    one = "a checkpoint is written from a copy of parameters and optimizer in host memory"
    return Term(name="checkpoint copy", bytes=size, reason=one)


def fit_on_cpu(needed: MemoryEstimate, limit: int | None) -> Fit:
    """A word for how near a process comes to its share of the host's memory, and its reason."""
    if limit is None:
        return fit(needed.device_bytes, None)
    share = needed.device_bytes / limit
    reason = f"{share:.0%} of {format_bytes(limit)}"
    if share <= CPU_SAFE_SHARE:
        return Fit(verdict="fits", reason=reason)
    if share <= 1:
        rest = "what the allocator wastes needs the rest"
        return Fit(verdict="tight", reason=f"{reason}; above {CPU_SAFE_SHARE:.0%} {rest}")
    return Fit(verdict="does not fit", reason=reason)

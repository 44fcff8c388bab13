"""Which rank hangs, and why: told from what all ranks noted and from what the kernel says of them.

When no rank moves, most of them wait in a collective for the one that hangs. That one is stopped,
waits for storage, computes or sleeps: whatever it does, it is in no collective.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, assert_never

from shardyard.elastic.stacks import Frame

_WAITING_FILES = ("/torch/distributed/", "/shardyard/parallel/pipeline.py")
_WAITING_FUNCTIONS = {("/shardyard/train/step.py", "read")}
"""Where a rank waits for others and cannot note it: torch's own collectives of a pipeline, and on
an accelerator the end of what was queued."""


class Doing(StrEnum):
    """What a rank that does not move is at."""

    STOPPED = "stopped"
    STORAGE = "storage"
    """Or a device's driver: uninterruptible."""
    WAITING = "waiting"
    """For other ranks."""
    COMPUTING = "computing"
    STARVED = "starved"
    """Could go on, and gets no processor."""
    SLEEPING = "sleeping"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One rank, seen from outside."""

    rank: int
    node: str
    pid: int
    step: int
    phase: str
    quiet_s: float
    """Since it moved last."""
    is_overdue: bool
    """For what it is at."""
    is_long_overdue: bool
    """For whatever it is at."""
    doing: Doing
    where: str | None
    """Innermost Python code of its main thread; None: it did not answer."""
    collective: str | None
    """What it waits in, where it waits for other ranks."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that the others wait for."""

    rank: int | None
    """None: all wait for each other, and none is to blame; the rest is of the lowest rank."""
    node: str
    pid: int
    step: int
    phase: str
    collective: str | None
    """What the others wait in; None: nobody waits."""
    doing: Doing
    reason: str
    quiet_s: float

    def event(self) -> dict[str, Any]:
        """Fields of the event worker_hung."""
        fields = asdict(self)
        fields["seconds"] = round(fields.pop("quiet_s"), 3)
        return fields

    @property
    def cause(self) -> str:
        """Of the loss that ends it."""
        return f"hung for {self.quiet_s:.1f} s in step {self.step}, {self.phase}: {self.reason}"


def culprits(looks: Sequence[Look]) -> list[Hang]:
    """The ranks that hang; none while what they do may be right.

    Args:
        looks: At every rank, of all nodes.
    """
    stopped = [look for look in looks if look.doing is Doing.STOPPED and look.is_overdue]
    if not stopped and not all(look.is_overdue for look in looks):
        return []
    waiting = [look for look in looks if look.doing is Doing.WAITING]
    blamed = stopped or [look for look in looks if look.doing is not Doing.WAITING]
    if blamed and (stopped or waiting):
        collective = next((look.collective for look in waiting if look.collective), None)
        return [_hang(look, others=len(waiting), collective=collective) for look in blamed]
    # no rank waits for another, or each for each: a long step of all, or a slow network
    if not all(look.is_long_overdue for look in looks):
        return []
    if blamed:
        return [_hang(look, others=0, collective=None) for look in blamed]
    first = min(looks, key=lambda look: look.rank)
    return [replace(_hang(first, others=0, collective=first.collective), rank=None)]


def _hang(look: Look, *, others: int, collective: str | None) -> Hang:
    return Hang(
        rank=look.rank,
        node=look.node,
        pid=look.pid,
        step=look.step,
        phase=look.phase,
        collective=collective,
        doing=look.doing,
        reason=_reason(look, others=others, collective=collective),
        quiet_s=look.quiet_s,
    )


def waits_in(stack: Sequence[Frame]) -> str | None:
    """What a stack, innermost frame first, waits in for other ranks; None: it does not."""
    if not stack:
        return None
    is_waiting = any(part in stack[0].file for part in _WAITING_FILES) or any(
        stack[0].file.endswith(file) and stack[0].function == function
        for file, function in _WAITING_FUNCTIONS
    )
    if not is_waiting:
        return None
    names = (f.function for f in stack if f.file.endswith("/distributed_c10d.py"))
    return next(names, stack[0].function)


def _reason(look: Look, *, others: int, collective: str | None) -> str:
    where = "" if look.where is None else f" in {look.where}"
    match look.doing:
        case Doing.STOPPED:
            what = "its process is stopped, as by SIGSTOP"
        case Doing.STORAGE:
            what = "it waits for storage or for a device's driver, and hears no signal"
        case Doing.COMPUTING:
            what = f"it computes{where}, in no collective"
        case Doing.STARVED:
            what = "it gets no processor: too many processes want one"
        case Doing.SLEEPING:
            what = f"it sleeps or waits{where}, in no collective"
        case Doing.WAITING:
            return (
                f"every rank waits for others in {look.collective or 'a collective'}: a broken "
                "network, or ranks that call different collectives"
            )
        case _:
            assert_never(look.doing)
    if not others:
        return what
    wait = "1 other rank waits" if others == 1 else f"{others} other ranks wait"
    return f"{what}; {wait} for it" + (f" in {collective}" if collective else "")

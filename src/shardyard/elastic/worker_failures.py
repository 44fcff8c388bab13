"""A lost worker: which one, and why in words; and which of several losses was the first cause."""

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from shardyard.elastic.forkserver import ServerEnd
from shardyard.elastic.hang_watch import Hang
from shardyard.errors import OutOfMemoryError

_SIGNAL_HINTS = {
    "SIGKILL": "often the kernel's out-of-memory killer; look at `dmesg`",
    "SIGSEGV": "a crash in native code; the rank's log may show where",
    "SIGABRT": "native code gave up; the rank's log says why",
    "SIGBUS": "often a full /dev/shm, or a mapped file that shrank",
    "SIGILL": "an instruction that this processor lacks; check the wheel of torch",
}
FIRST_STEPS = 2
"""Number of a process's first steps.

The first finds no gradients and no optimizer state; from the second on all need the same
memory.
"""
OWN_SIGNALS = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""A process brings these on itself; all others come from outside."""


class Process(Protocol):
    """Process of a worker that has ended."""

    pid: int
    exitcode: int


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The end of one worker that was not its normal end."""

    rank: int
    node: str
    pid: int
    exit_code: int | None
    signal: str | None
    """Name of the signal that killed it; None if it ended by itself."""
    cause: str
    is_final: bool = False
    """An error that a restart cannot cure; ``cause`` is its whole message."""
    waited: bool = False
    """Whether it waited for other ranks when a signal ended it, as far as it could note that."""
    t: float = 0.0
    """Seconds from the agreement on the generation until the worker recorded its own end.

    They are by its node's monotonic clock; 0: it could not record its end.
    """
    step: int = 0
    """The last that its generation finished."""
    durable_step: int | None = None
    """Step of the newest durable checkpoint, to which a restart goes back."""
    is_out_of_memory: bool = False
    """Whether the kernel killed it for want of host memory."""
    page: str = ""
    """Page of the documentation on its error; empty: none."""

    def event(self) -> dict[str, Any]:
        """Fields of the event worker_lost."""
        fields = asdict(self)
        del fields["is_final"], fields["waited"], fields["t"], fields["page"]
        if not self.is_out_of_memory:
            del fields["is_out_of_memory"]
        return fields

    @property
    def is_clear(self) -> bool:
        """Whether no other loss can have brought it about.

        Where a collective breaks, exceptions are raised, and native code may give up.
        """
        return self.is_final or (self.signal is not None and self.signal not in OWN_SIGNALS)

    @property
    def order(self) -> tuple[int, float, int]:
        """By which the first cause comes first: its kind, when it ended, its rank."""
        if self.signal is None:
            kind = 2 if self.is_final else 4
        elif self.is_clear:
            kind = 0
        else:
            kind = 3 if self.waited else 1
        return (kind, self.t, self.rank)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node} was lost ({self.cause})"


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node whose agent is gone, and with it all that it could have said of its workers."""

    node: str
    node_rank: int
    """Its number in the job."""
    group_rank: int
    """Its number in this generation; -1: it trained no more, and served the store."""
    ranks: tuple[int, ...]
    cause: str

    def event(self) -> dict[str, Any]:
        """Fields of the event node_lost."""
        return {
            "node": self.node,
            "node_rank": self.node_rank,
            "ranks": list(self.ranks),
            "cause": self.cause,
        }

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.node}) was lost: {self.cause}"


def describe_loss(
    *,
    rank: int,
    node: str,
    pid: int,
    exit_status: int,
    failure: dict[str, Any] | None,
    agreed_s: float,
    waited: bool = False,
) -> Loss:
    """Put a worker's exit status and its own last words together.

    Args:
        waited: Whether it had noted that it waits for other ranks.
        agreed_s: When all nodes agreed on the generation, by this node's monotonic clock.
        exit_status: As in ``Process.exitcode``: negative for a signal.
        failure: Content of its failure file.
    """
    if exit_status < 0:
        name = _signal_name(-exit_status)
        hint = _SIGNAL_HINTS.get(name)
        cause = f"killed by {name}" + (f": {hint}" if hint else "")
        return Loss(
            rank=rank, node=node, pid=pid, exit_code=None, signal=name, cause=cause, waited=waited
        )
    if failure is None:
        cause = f"ended with exit code {exit_status} and without a message"
        return Loss(rank=rank, node=node, pid=pid, exit_code=exit_status, signal=None, cause=cause)
    lines = failure["message"].strip().splitlines() or [""]
    return Loss(
        rank=rank,
        node=node,
        pid=pid,
        exit_code=failure["exit_code"],
        signal=None,
        cause=failure["message"] if failure["is_own"] else f"{failure['error']}: {lines[-1]}",
        is_final=failure["is_final"],
        page=failure.get("page", ""),
        t=failure["noted_s"] - agreed_s,
    )


def host_memory_loss(loss: Loss, reason: str, *, steps_done: int) -> Loss:
    """A loss by SIGKILL where the kernel has killed for want of memory.

    Its first steps need as much as all others: if it ends in these, a restart would end so too.

    Args:
        reason: Which limit was reached.
        steps_done: By its generation.
    """
    is_final = steps_done < FIRST_STEPS
    cause = f"out of host memory: {reason}, and the kernel killed it"
    if is_final:
        cause = (
            f"rank {loss.rank} on {loss.node} ran {cause}. Use a smaller optim.micro_batch or "
            "data.seq_len, fewer cluster.devices with cluster.device=cpu, or give the container or "
            "job more memory."
        )
    return replace(
        loss, cause=cause, is_final=is_final, is_out_of_memory=True, page=OutOfMemoryError.page
    )


def describe_orphan(*, rank: int, node: str, pid: int, server: ServerEnd) -> Loss:
    """A worker that ended because the fork server, its parent, did."""
    name = _signal_name(-server.exit_status) if server.exit_status < 0 else None
    how = f"was killed by {name}" if name else f"ended with exit code {server.exit_status}"
    hint = _SIGNAL_HINTS.get(name or "")
    cause = f"the fork server of its node, process {server.pid}, {how}, and its ranks with it"
    return Loss(
        rank=rank,
        node=node,
        pid=pid,
        exit_code=None,
        signal="SIGKILL",  # from the kernel, as each worker asked for
        cause=cause + (f": {hint}" if hint else ""),
    )


def describe_hung(hangs: Sequence[Hang], *, pids: Mapping[int, int], node: str) -> list[Loss]:
    """Return the losses of this node's hung ranks; where no rank is to blame, of its first.

    Args:
        pids: Process ids of this node's ranks.
    """
    first = min(pids)
    ended = [(first if hang.rank is None else hang.rank, hang.cause) for hang in hangs]
    return [
        Loss(
            rank=rank, node=node, pid=pids[rank], exit_code=None, signal="SIGKILL", cause=cause
        )
        for rank, cause in ended
        if rank in pids
    ]  # fmt: skip


def describe_unresponsive(pids: Mapping[int, int], *, node: str, waited_s: float, t: float) -> Loss:
    """Describe the loss of a node whose ranks wait for others without a live agent.

    The arguments are as above.
    """
    rank = min(pids)
    cause = f"its ranks waited for others, whose agent did not answer for {waited_s:g} s"
    return Loss(
        rank=rank, node=node, pid=pids[rank], exit_code=None, signal=None, cause=cause, t=t
    )  # fmt: skip


def describe_dead(
    dead: Mapping[int, Process],
    *,
    node: str,
    server: ServerEnd | None,
    last_words: Callable[[int], dict[str, Any] | None],
    agreed_s: float,
    waiting: Collection[int] = (),
) -> list[Loss]:
    """This node's ranks whose processes have ended.

    Args:
        waiting: Ranks that had noted that they wait for others.
        server: How the fork server ended, and they with it; None: it runs.
        last_words: Content of a rank's failure file.
        agreed_s: When all nodes agreed on the generation, by this node's monotonic clock.
    """
    if server is not None:
        return [
            describe_orphan(rank=rank, node=node, pid=process.pid, server=server)
            for rank, process in dead.items()
        ]
    return [
        describe_loss(
            rank=rank, node=node, pid=process.pid, exit_status=process.exitcode,
            failure=last_words(rank), agreed_s=agreed_s, waited=rank in waiting,
        )
        for rank, process in dead.items()
    ]  # fmt: skip


def first_cause(losses: Iterable[Loss]) -> Loss:
    """The loss that brought the others about.

    A signal from outside first, then native code that gave up outside of a collective, then an
    error raised on purpose; the rest are mostly peers whose collective broke: native code that gave
    up in one, which may be the fault of its own, and of exceptions the earliest.
    """
    return min(losses, key=lambda loss: loss.order)


def causes(losses: Sequence[Loss]) -> list[Loss]:
    """Return the losses to report: the first cause, and other signals of its kind.

    Losses that may follow from it are left out.
    """
    first = first_cause(losses)
    if first.signal is None:
        return [first]
    alike = [loss for loss in losses if loss.order[0] == first.order[0]]
    return sorted(alike, key=lambda loss: loss.order)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

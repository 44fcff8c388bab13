"""Output of pods: of one node or of all merged, with a bounded amount in memory."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

from shardyard.errors import CapacityError, ShardyardError
from shardyard.launchers.base import LogLine
from shardyard.launchers.kubernetes.state import Object, latest_pods, node_rank

_LONGEST_LINE_BYTES = 2**16
_LINES_AHEAD = 1000
"""Lines of all nodes together that wait to be printed; readers wait when there are more."""
POLL_S = 2.0
"""Between looks for pods that are new since a restart."""

Read = Callable[[Object, bool], Iterator[bytes]]
"""Pod, whether to follow -> pieces of its output."""


def has_output(pod: Object) -> bool:
    """Whether its container has started."""
    states = pod.get("status", {}).get("containerStatuses", [])
    # lastState: a container that waits for its restart has the output of its last start.
    return any("running" in s.get("state", {}) or "terminated" in s.get("state", {})
               or s.get("lastState") for s in states)  # fmt: skip


def lines_of(pieces: Iterator[bytes]) -> Iterator[str]:
    """Whole lines; one that never ends is cut, so that it cannot fill the memory."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
        while len(rest) > _LONGEST_LINE_BYTES:
            yield rest[:_LONGEST_LINE_BYTES].decode(errors="replace")
            rest = rest[_LONGEST_LINE_BYTES:]
    if rest:
        yield rest.decode(errors="replace")


def logs_so_far(pods: list[Object], read: Read, *, node: int | None) -> Iterator[LogLine]:
    """Yield the output so far, node after node.

    Raises:
        CapacityError: Nodes that cannot be reached; the logs of the others come first.
    """
    silent: list[CapacityError] = []
    for pod in latest_pods(pods):
        if node in (None, node_rank(pod)) and has_output(pod):
            try:
                for line in lines_of(read(pod, False)):
                    yield LogLine(source=f"node {node_rank(pod)}", text=line)
            except CapacityError as error:
                silent.append(error)
    if silent:
        more = f" {len(silent) - 1} more logs cannot be read either." if silent[1:] else ""
        raise type(silent[0])(f"{silent[0]}.{more}" if more else str(silent[0])) from silent[0]


def follow_logs(
    pods: Callable[[], list[Object]],
    read: Read,
    *,
    node: int | None,
    is_over: Callable[[], bool],
    poll_s: float = POLL_S,
) -> Iterator[LogLine]:
    """Yield past and future output, of pods of later restarts too, until the job is over.

    Args:
        pods: Called again and again.
        is_over: Whether the job has ended; called when no pod prints any more.

    Raises:
        ShardyardError: A log cannot be read. One of a node that cannot be reached now is tried
            again instead, and a line says so.
    """
    merged = _Merged(read, retry_after_s=poll_s)
    try:
        while True:
            over = is_over() if merged.readers == 0 else False  # asked before the last look
            for pod in latest_pods(pods()):
                if node in (None, node_rank(pod)) and has_output(pod):
                    merged.add(pod, is_last=over)
            yield from merged.lines(for_s=0 if over else poll_s)
            if over and merged.readers == 0:
                return
    finally:
        merged.stop()


class _Merged:
    """One thread a pod, one bounded queue."""

    def __init__(self, read: Read, *, retry_after_s: float) -> None:
        self._read = read
        self._retry_after_s = retry_after_s
        self._lines: queue.Queue[LogLine | ShardyardError | None] = queue.Queue(_LINES_AHEAD)
        self._seen: set[str] = set()
        self._silent: set[str] = set()
        """Pods whose log could not be read, each of which is reported once."""
        self._stopped = threading.Event()
        self.readers = 0

    def add(self, pod: Object, *, is_last: bool) -> None:
        """Read a pod, unless it is or was read already.

        Args:
            is_last: Whether the job is over: what could not be read until then is left.
        """
        uid = str(pod["metadata"]["uid"]) + _starts(pod)
        if uid in self._seen or (is_last and uid in self._silent):
            return
        self._seen.add(uid)
        self.readers += 1
        # A daemon: a read that waits for output cannot be ended, and must not keep the program.
        threading.Thread(
            target=self._follow, args=(pod, uid), name=f"log {uid}", daemon=True
        ).start()

    def lines(self, *, for_s: float) -> Iterator[LogLine]:
        """Lines for so long, or until no pod prints any more."""
        end = time.monotonic() + for_s
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                return
            if isinstance(line, ShardyardError):
                raise line
            if line is not None:
                yield line
            else:
                self.readers -= 1
                if self.readers == 0:
                    return
            if time.monotonic() >= end and self._lines.empty():
                return

    def stop(self) -> None:
        """Let the readers end."""
        self._stopped.set()

    def _follow(self, pod: Object, uid: str) -> None:
        source = f"node {node_rank(pod)}"
        try:
            for line in lines_of(self._read(pod, True)):
                if not self._put(LogLine(source=source, text=line)):
                    return
        except (
            CapacityError
        ) as error:  # a node that is lost now may come back, or its pod elsewhere
            if uid not in self._silent:
                self._silent.add(uid)
                self._put(LogLine(source=source, text=f"{error}. Shardyard tries again."))
            self._stopped.wait(self._retry_after_s)
            self._seen.discard(uid)
        except ShardyardError as error:
            self._put(error)
        finally:
            self._put(None)

    def _put(self, line: LogLine | ShardyardError | None) -> bool:
        while not self._stopped.is_set():
            try:
                # With a time-out, so that a reader in front of a full queue sees `stop`.
                self._lines.put(line, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False


def _starts(pod: Object) -> str:
    """Changes when a container is started again inside its pod."""
    states = pod.get("status", {}).get("containerStatuses", [])
    return "".join(f"+{state.get('restartCount', 0)}" for state in states)

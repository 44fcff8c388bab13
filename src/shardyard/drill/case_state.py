"""One running case as a fault sees it: which process is what, and how far the run is."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.drill.network import DrillNetwork
from shardyard.drill.sandbox import SkewedClock
from shardyard.drill.scene import TaggedProcesses, parent_of, words_of
from shardyard.io.files import parse_json
from shardyard.io.polling import wait_for
from shardyard.rundir.contracts import FAULT_MARK
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

_POLL_S = 0.005


class MissedInjection(Exception):  # noqa: N818  not an error
    """The fault's target never came, or was gone before the fault struck."""


@dataclass
class CaseState:
    """A case under way, its target chosen."""

    run: RunDir
    marked: TaggedProcesses
    scratch: Path
    """TMPDIR of all its processes."""
    draw: random.Random
    rank: int
    """The target: a rank, or one on the node that is the target."""
    node: int
    """Rank of the target's node."""
    is_launched: bool
    """Whether a supervisor has started the nodes, and no command line waits for them."""
    within_s: float
    """Longest wait for a moment to strike at."""
    network: DrillNetwork | None = None
    """Between the nodes, of a fault that needs one."""
    clock: SkewedClock | None = None
    """Clock of the target's node, for a fault that moves it."""
    injected_t: float | None = None
    """Unix seconds of the blow; None: it was that at which the fault began."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Details that an injection adds to the result."""

    def aim(self, *, at_node: bool) -> None:
        """Find where the target is: ranks are dealt to nodes as these come.

        Args:
            at_node: The node is the target, and any of its ranks will do; else the rank is.

        Raises:
            Missed: It has ended.
        """
        if not self.is_launched:
            return
        wanted, ranks = self.node, self.workers() if at_node else (self.rank,)
        for self.rank in ranks:
            words = words_of(self.above_agent)
            if "--node-rank" in words:
                self.node = int(words[words.index("--node-rank") + 1])
                if self.node == wanted or not at_node:
                    return
        raise MissedInjection(f"node {wanted} had ended")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events so far, of these kinds."""
        return [event for event in read_lines(self.run.events) if event["kind"] in kinds]

    def last_step(self) -> int:
        """The newest finished step; 0 before the first."""
        return max(
            (line["step"] for line in read_lines(self.run.metrics) if "eval" not in line), default=0
        )

    def workers(self) -> dict[int, int]:
        """Rank -> pid in the newest generation."""
        met = self.events("rendezvous")
        return {w["rank"]: w["pid"] for w in met[-1]["workers"]} if met else {}

    @property
    def world_size(self) -> int:
        """Ranks in the newest generation."""
        return len(self.workers())

    @property
    def worker(self) -> int:
        """Process of the target rank."""
        return self._require_alive(self.workers().get(self.rank), f"rank {self.rank}")

    @property
    def fork_server(self) -> int:
        """Process id of the fork server on the target's node."""
        return self._require_alive(parent_of(self.worker), "the fork server")

    @property
    def agent(self) -> int:
        """Process id of the agent on the target's node."""
        return self._require_alive(parent_of(self.fork_server), "the agent")

    @property
    def above_agent(self) -> int:
        """Process that started that agent: the command line, or the node's program."""
        return self._require_alive(parent_of(self.agent), "what started the agent")

    @property
    def top(self) -> int:
        """Above all: the command line, or the supervisor of the nodes of a local job."""
        above = self.above_agent
        return (
            self._require_alive(parent_of(above), "the supervisor") if self.is_launched else above
        )

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process of this case.

        Raises:
            Missed: It had ended.
        """
        now_t = time.time()
        if not self.marked.signal(pid, number):
            raise MissedInjection(f"process {pid} had ended")
        self.injected_t = self.injected_t or now_t

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a moment.

        Raises:
            Missed: It did not come before the run was over.
        """
        found = wait_for(
            lambda: condition() or (not self.marked.pids() and "over") or None,
            every_s=_POLL_S, within_s=self.within_s,
        )  # fmt: skip
        if not found or found == "over":
            raise MissedInjection(f"{what} did not come")
        return found

    def injection_line(self) -> dict[str, Any] | None:
        """The line with which a worker said that it makes a fault now."""
        return next(self._marked_lines(), None)

    def _marked_lines(self) -> Iterator[dict[str, Any]]:
        for log in sorted((self.run.path / "logs").glob("attempt-*/rank-*.log")):
            for line in _lines(log):
                if line.startswith(FAULT_MARK) and line.endswith("}"):
                    yield parse_json(line.removeprefix(FAULT_MARK))

    def _require_alive(self, pid: int | None, what: str) -> int:
        if pid is None or not self.marked.has(pid):
            raise MissedInjection(f"{what} had ended")
        return pid


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()
    except OSError:
        return []

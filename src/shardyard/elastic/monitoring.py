"""Monitor of one node's workers: dead, hung and slow ranks, and problems of the node's devices.

This part says what is wrong; it restarts nothing and writes no events. See `group.py`.
"""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from shardyard.control_groups import OutOfMemoryKills
from shardyard.elastic.dead_workers import Generation
from shardyard.elastic.device_watch import DeviceWatch, Findings
from shardyard.elastic.hang_finder import HangFinder
from shardyard.elastic.hang_watch import Budgets, Hang, HangWatch
from shardyard.elastic.heartbeat import clear_heartbeats, read_heartbeats
from shardyard.elastic.membership import GroupMembership
from shardyard.elastic.shared_memory import AgentMemory
from shardyard.elastic.slowdown import SlowdownEvent, SlowdownWatch
from shardyard.elastic.worker_failures import Loss, describe_hung, describe_unresponsive
from shardyard.rundir.layout import RunDir

_PEER_REPORT_S = 3.0
"""Seconds to wait for other nodes' losses; a node that is silent for so long is gone."""
_CUT_OFF_S = 3.0
"""A store that has not answered for so long, while ranks hang, does not answer."""


class WorkerMonitor:
    """Finds out what is wrong with one node's workers, and asks the other nodes."""

    def __init__(
        self,
        group: WorkerGroup,
        membership: GroupMembership,
        *,
        run: RunDir,
        attempt: int,
        heartbeats: AgentMemory | None,
        budgets: Budgets | None,
        stages: int | None,
        findings: Findings,
    ) -> None:
        """Args:
        group: Torch's record of this node's workers.
        budgets: Longest times without a move; None: hangs are not looked for.
        stages: Stages of the pipeline, or 1; None: heartbeats do not tell ranks apart on these
            devices.
        findings: Returns the faults of this node's devices; called now and then.
        """
        self._group = group
        self._membership = membership
        self._run = run
        self._attempt = attempt
        self._heartbeats = heartbeats
        self._budgets = budgets
        self._stages = stages
        self._devices = DeviceWatch(run, attempt, membership.node, findings)
        self._hang_finder: HangFinder | None = None  # of this generation
        self._slow_ranks: SlowdownWatch | None = None
        self._memory_kills: OutOfMemoryKills
        self._last_reply_s = math.inf
        """Time of the store's newest answer about hangs."""
        self.hangs: list[Hang] = []
        """Hangs that ended this generation."""
        self.losses: list[Loss] = []
        """Causes of the newest generation's end, on all nodes; empty while it is well."""

    def reset(self) -> None:
        """Forget the last generation, before workers of the next one start."""
        self.losses = []
        # Else the straggler watch would read the last generation's steps as steps of this one.
        clear_heartbeats(self._heartbeats)

    def count_memory_kills(self) -> None:
        """Count the kernel's kills for want of memory from now on."""
        self._memory_kills = OutOfMemoryKills()

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch the workers that have started.

        Args:
            pids: Process of each, by local rank; torch's record has none until all have started.
        """
        self.hangs = []
        by_rank = {worker.global_rank: pids[worker.local_rank] for worker in self._group.workers}
        self._hang_finder = finder = self._new_hang_finder(by_rank)
        self._slow_ranks = SlowdownWatch(
            self._membership.messages, node=self._membership.node.name, ranks=list(by_rank),
            world_size=self._membership.world_size, stages=self._stages,
            heartbeats=self._heartbeats, hang_watch=None if finder is None else finder.watch,
        )  # fmt: skip

    def _new_hang_finder(self, pids: Mapping[int, int]) -> HangFinder | None:
        if self._budgets is None or self._heartbeats is None:
            return None
        read = partial(read_heartbeats, self._heartbeats, len(pids))
        return HangFinder(
            HangWatch(self._budgets, read=read, pids=list(pids.values())),
            self._membership.messages,
            node=self._membership.node.name,
            ranks=list(pids),
            logs={pid: self._run.log(self._attempt, rank) for rank, pid in pids.items()},
            answer_within_s=_PEER_REPORT_S,
        )

    def _pids(self) -> dict[int, int]:
        """Processes of this node's workers, by rank."""
        return {worker.global_rank: worker.id for worker in self._group.workers}

    def have_all_stepped(self) -> bool:
        """Whether each worker has ended two steps: the first of a process is not recorded."""
        notes = read_heartbeats(self._heartbeats, self._group.spec.local_world_size)
        return bool(notes) and all(note.step_ns for note in notes)

    # -- slow and faulty --------------------------------------------------------------------

    def poll_slow_ranks(self, *, writes: bool) -> Iterator[SlowdownEvent]:
        """Tell the node that writes events, or find what is to be written."""
        return iter(()) if self._slow_ranks is None else self._slow_ranks.poll(writes=writes)

    def poll_devices(self, *, writes: bool) -> list[tuple[str, dict[str, Any]]]:
        """The same of devices: kinds and fields of events."""
        return self._devices.poll(self._membership.messages, writes=writes)

    # -- hung -------------------------------------------------------------------------------

    def poll_ranks(self) -> None:
        """See which ranks move; call it often, from a thread that waits for no other node."""
        if self._hang_finder is not None:
            self._hang_finder.watch.poll(time.monotonic())

    @property
    def is_cut_off(self) -> bool:
        """Whether ranks hang and the store does not answer: the network is cut, as it seems."""
        finder = self._hang_finder
        return (
            finder is not None
            and not (self._membership.is_in_rendezvous or self._membership.is_excluded)
            and finder.watch.is_suspicious()
            # The agent's thread sets it after each answer of the store; while it waits, the time is
            # old.
            and time.monotonic() - self._last_reply_s > _CUT_OFF_S
        )

    def find_hung(self) -> list[Hang] | None:
        """None: no rank of any node hangs, as far as is known."""
        found = None if self._hang_finder is None else self._hang_finder.find()
        self._last_reply_s = time.monotonic()
        return found

    def end_hung(self, hangs: list[Hang] | None) -> list[Loss]:
        """End ranks of this node that hang.

        Args:
            hangs: None: another agent may know of a hang, and has lost its ranks by now.
        """
        if hangs is None:
            hangs = [] if self._hang_finder is None else self._hang_finder.decided()
            if not hangs:
                return []
        self.hangs = hangs
        pids, name = self._pids(), self._membership.node.name
        hung = describe_hung(hangs, pids=pids, node=name)
        for loss in hung:
            with suppress(ProcessLookupError):
                os.kill(loss.pid, signal.SIGKILL)  # also ends a process that is stopped
        if not hangs:
            # No rank here is to blame: they wait for a node whose agent did not answer.
            t = time.monotonic() - self._membership.agreed_s
            hung = [describe_unresponsive(pids, node=name, waited_s=_PEER_REPORT_S, t=t)]
        return self._generation().at_its_step(hung)

    # -- dead -------------------------------------------------------------------------------

    def describe_dead(self, dead: Mapping[int, Any]) -> list[Loss]:
        """Describe ended workers.

        Args:
            dead: Their processes, by rank.
        """
        return self._generation().dead(
            dead, pids=self._pids(), heartbeats=self._heartbeats,
            node=self._membership.node.name,
            agreed_s=self._membership.agreed_s, kills=self._memory_kills,
        )  # fmt: skip

    def gather_losses(self, own_losses: list[Loss]) -> None:
        """Collect the losses of the other nodes; wait for them where the cause is not clear here.

        A node without a report by then counts as gone, and the next rendezvous begins without
        it.
        """
        is_clear = any(loss.is_clear for loss in own_losses)
        # Nothing on another node can have caused a clear loss, so there is nothing to wait for.
        theirs = self._membership.messages.from_others(
            "losses", wait_s=0.0 if is_clear else _PEER_REPORT_S
        )
        self.losses = own_losses + [Loss(**loss) for loss in theirs]
        if not is_clear:
            cause = f"its agent was silent for {_PEER_REPORT_S:g} s after its ranks were lost"
            self._membership.drop_silent("losses", cause)

    def finished_step(self) -> int:
        """The last step that this generation finished, or from which it continued."""
        return self._generation().finished_step()

    def _generation(self) -> Generation:
        return Generation(run=self._run, attempt=self._attempt, number=self._membership.generation)

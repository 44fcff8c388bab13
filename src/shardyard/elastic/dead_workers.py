"""Losses of one node's dead workers, with the step that their generation had finished."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardyard.control_groups import OutOfMemoryKills
from shardyard.elastic import forkserver
from shardyard.elastic.heartbeat import read_heartbeats
from shardyard.elastic.restart_budget import durable_step, last_finished_step, steps_done
from shardyard.elastic.shared_memory import AgentMemory
from shardyard.elastic.worker import failure_path, read_failure
from shardyard.elastic.worker_failures import (
    FIRST_STEPS,
    Loss,
    Process,
    describe_dead,
    host_memory_loss,
)
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One start of the workers, whose losses are described."""

    run: RunDir
    attempt: int
    number: int

    def finished_step(self) -> int:
        """The last that it finished, or from which it continued."""
        return last_finished_step(self.run, self.attempt, self.number)

    def at_its_step(self, losses: list[Loss]) -> list[Loss]:
        """The same losses with the last finished step and the newest durable one."""
        if not losses:
            return []
        step = self.finished_step()
        durable = durable_step(self.run)
        return [replace(loss, step=step, durable_step=durable) for loss in losses]

    def dead(
        self,
        processes: Mapping[int, Process],
        *,
        node: str,
        agreed_s: float,
        pids: Iterable[int],
        heartbeats: AgentMemory | None,
        kills: OutOfMemoryKills,
    ) -> list[Loss]:
        """Losses of ended processes; arguments as of ``describe_dead``.

        Args:
            pids: Of this node's workers, by rank.
            heartbeats: Where the workers note what they do.
            kills: The kernel's kills for want of memory since the workers started.
        """
        ranks = list(pids)
        noted = zip(ranks, read_heartbeats(heartbeats, len(ranks)), strict=False)
        losses = describe_dead(
            processes,
            node=node,
            server=forkserver.ended(),
            last_words=lambda rank: read_failure(
                failure_path(self.run, self.attempt, rank), self.number
            ),
            agreed_s=agreed_s,
            waiting=[rank for rank, note in noted if note.is_in_collective],
        )
        return self.at_its_step(self._of_host_memory(losses, kills))

    def _of_host_memory(self, losses: list[Loss], kills: OutOfMemoryKills) -> list[Loss]:
        """Name the limit where the kernel killed them for want of memory."""
        killed = [loss for loss in losses if loss.signal == "SIGKILL"]
        if not killed or (why := kills.words()) is None:
            return losses
        done = steps_done(self.run, self.attempt, self.number, most=FIRST_STEPS)
        return [
            host_memory_loss(loss, why, steps_done=done) if loss in killed else loss
            for loss in losses
        ]

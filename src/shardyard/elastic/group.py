"""The workers of one node as a group that starts, is lost, drains and restarts as one.

Torch's LocalElasticAgent does the work; this subclass ends a group quickly when one worker is
lost, and lets a group drain. It runs the loop over three parts:

- ``GroupMembership`` (`membership.py`): who is in the group. It has the rendezvous, the
  generation with its messages, the lost and the excluded nodes, and the restart policy.
- ``WorkerMonitor`` (`monitoring.py`): what is wrong with this node's workers. It has the losses
  and hangs of the generation, the hang finder, and the watches of slow ranks and of devices.
- ``EventReporter`` (`reporting.py`): what events.jsonl says. It has the event writer, and knows
  which node writes and which lost nodes it has reported.

Membership knows neither of the others; monitor and reporter know membership, and not each other.
None knows the agent, which carries results from one to the next. The agent itself has the drain,
the standby workers, and the replication of snapshots.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from shardyard import torch_private
from shardyard.elastic.agent_messages import Node
from shardyard.elastic.device_watch import Findings
from shardyard.elastic.drain import DrainRequest
from shardyard.elastic.hang_watch import Budgets, Hang
from shardyard.elastic.membership import GroupMembership
from shardyard.elastic.monitoring import WorkerMonitor
from shardyard.elastic.node_exclusion import ExclusionRules, NodeExcluded, RestartPolicy
from shardyard.elastic.peer_snapshots import PeerReplication, RingPosition
from shardyard.elastic.processes import ProcessesAgent, standby_pool_of
from shardyard.elastic.rendezvous.c10d import Rendezvous
from shardyard.elastic.reporting import EventReporter
from shardyard.elastic.restart_budget import RestartBudget, durable_step, earlier_failures
from shardyard.elastic.shared_memory import AgentMemory, translate_semaphore_errors
from shardyard.elastic.worker_failures import Loss, LostNode, first_cause
from shardyard.io.polling import wait_for
from shardyard.rundir.attempt_files import StoreLocation
from shardyard.rundir.layout import RunDir

DRAINED = "drained"

_SETTLE_S = 0.3
"""Wait after an ambiguous loss: its cause may be a peer whose end is noticed a moment later."""
_DRAIN_POLL_S = 0.05
_DEAD_S = 30
"""For a killed process to be gone: longer only if the kernel holds it."""


class StoppedBeforeStart(Exception):  # noqa: N818  not an error
    """A drain was requested before there were workers; no work is lost."""


class GroupAgent(ProcessesAgent):
    """Keeps one node's workers running through one attempt."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        run: RunDir,
        attempt: int,
        drain: DrainRequest,
        describe_attempt: Callable[[], dict[str, Any]],
        max_restarts: int,
        node_rank: int = 0,
        heartbeats: AgentMemory | None = None,
        budgets: Budgets | None = None,
        stages: int | None = None,
        use_standby: bool = False,
        join_interval_s: float = 0.0,
        has_met: Callable[[list[Node], list[Node]], bool] | None = None,
        peer_replication: PeerReplication | None = None,
        is_lease_available: Callable[[], bool] = lambda: True,
        min_nodes: int = 1,
        leave_out_for: Sequence[str] = (),
        findings: Findings = tuple,
    ) -> None:
        """Args:
        stages: Stages of the pipeline, or 1; None: heartbeats do not tell ranks apart on these
            devices.
        use_standby: Whether standby processes wait to take over after a loss.
        has_met: Called with the nodes of each rendezvous, and the excluded ones.
        is_lease_available: Whether no agent of another node holds the run.
        min_nodes: Fewest nodes with which the run continues.
        leave_out_for: Verdicts that exclude a node, in addition to a report.
        findings: Returns the faults of this node's devices; called now and then.
        """
        super().__init__(spec)
        self._run = run
        self._attempt = attempt
        self._drain = drain
        self._drain_sent = False
        self._standby_pool = standby_pool_of(spec, run.resolved(attempt)) if use_standby else None
        self._peer_replication = peer_replication
        self._rendezvous_s = 0.0
        restarts = RestartBudget(max_restarts, earlier_failures(run, attempt))
        restart_policy = RestartPolicy(restarts, min_nodes=min_nodes)
        self.membership = GroupMembership(
            self.get_worker_group(),
            Node.local(node_rank),
            restart_policy=restart_policy,
            rules=ExclusionRules(leave_out_for, restart_policy),
            join_interval_s=join_interval_s,
            has_met=has_met,
        )
        self.monitor = WorkerMonitor(
            self.get_worker_group(),
            self.membership,
            run=run,
            attempt=attempt,
            heartbeats=heartbeats,
            budgets=budgets,
            stages=stages,
            findings=findings,
        )
        self.reporter = EventReporter(
            run,
            attempt,
            self.membership,
            describe_attempt=describe_attempt,
            is_lease_available=is_lease_available,
        )

    # -- start ------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._stop_if_draining()
        membership = self.membership
        if membership.is_excluded:
            raise NodeExcluded
        is_resize = not (self.monitor.losses or membership.lost_nodes)
        membership.is_in_rendezvous = True
        # A resize is no loss, so it costs nothing of the restart budget.
        if not is_resize:
            restarts = membership.restart_policy.restarts
            self._pause(restarts.record_restart(durable_step(self._run)))
        membership.expect_survivors()
        started_s = time.monotonic()
        super()._rendezvous(worker_group)
        # The fork server got its environment before the rendezvous, so these go with each start.
        self._variables = membership.agree_on_generation(is_resize=is_resize)
        unreported = self.reporter.begin_generation(membership.clear_lost_nodes())
        if membership.can_take_over_store():
            self.reporter.report_store_taken(unreported)
        self._rendezvous_s = time.monotonic() - started_s
        membership.is_in_rendezvous = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_if_draining()
        self._drain_sent = False
        self.monitor.reset()
        membership = self.membership
        if self._peer_replication is not None:
            place = RingPosition.of(worker_group, membership.generation, membership.handler.seal)
            self._peer_replication.begin(
                place, membership.messages, self.reporter.report_not_copied
            )
        run_dir = str(self._run.path).replace("$", "$$")  # torch treats arguments as templates
        worker_group.spec.args = (run_dir, self._attempt, membership.generation)
        pids = super()._start_workers(worker_group)
        self.monitor.count_memory_kills()
        workers = membership.publish_workers(pids)
        self.reporter.announce(workers, rendezvous_s=self._rendezvous_s)
        self.monitor.watch(pids)
        return pids

    def _pause(self, seconds: float) -> None:
        # A back-off lasts up to 30 s, and a drain must not wait for it.
        wait_for(lambda: self._drain.is_requested, within_s=seconds, every_s=_DRAIN_POLL_S)
        self._stop_if_draining()

    def _stop_if_draining(self) -> None:
        if self._drain.is_requested:
            raise StoppedBeforeStart

    # -- watch ------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_drain_on()
        self._spawn_standby()
        # Before torch's own check, which sees only this node and restarts without a cause.
        if self._dead() or self.membership.messages.any_from_others("losses"):
            return self._handle_loss()
        if (found := self.monitor.find_hung()) is not None:
            return self._handle_loss(found)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:  # died after the check above
            return self._handle_loss()
        self._check_slow_ranks()
        self._check_devices()
        if self._excludes_node(result):
            return RunResult(state=WorkerState.UNHEALTHY)  # all drain and restart
        is_resize = self._is_resize(result)
        self.membership.take_in(is_resize=is_resize)
        if is_resize:
            return RunResult(state=WorkerState.HEALTHY)  # then torch asks for waiting nodes
        return result

    def _spawn_standby(self) -> None:
        """Once all workers step: before, they would share the cores with what gets ready."""
        if (
            self._standby_pool is None
            or not self._standby_pool.is_empty
            or self._drain.is_requested
        ):
            return
        if self.monitor.have_all_stepped():
            with translate_semaphore_errors():
                self._standby_pool.spawn()

    def _check_slow_ranks(self) -> None:
        if self._drain.is_requested:
            return
        membership = self.membership
        for event in self.monitor.poll_slow_ranks(writes=self.reporter.writes_events):
            stays, node = "", membership.node_of(event.rank)
            left = membership.remaining_nodes()
            if event.is_slow_rank:
                stays = membership.rules.on_slow_rank(
                    event.rank, event.factor, node, membership.messages, left
                )
            self.reporter.write(event.kind, **event.fields, **_reason_to_stay(stays))

    def _check_devices(self) -> None:
        membership = self.membership
        for kind, problem in self.monitor.poll_devices(writes=self.reporter.writes_events):
            stays = membership.rules.on_device(
                kind, problem, membership.messages, membership.remaining_nodes()
            )
            self.reporter.write_own(kind, **problem, **_reason_to_stay(stays))

    def _excludes_node(self, result: RunResult) -> bool:
        """Return whether a recipe's rule lets all continue without a node that leaves now."""
        has_finished = result.state is WorkerState.SUCCEEDED and not _have_drained(result)
        if self._drain.is_requested or has_finished:
            return False
        rules = self.membership.rules
        if (decided := rules.decided(self.membership.messages)) is None:
            return False
        node, cause, verdict = decided
        self._exclude(node, cause, verdict=verdict, rule=rules.words)
        return True

    def _pass_drain_on(self) -> None:
        if self._drain.is_overdue:
            self._signal_workers(signal.SIGKILL)
            for process in self._processes():  # torch would wait for ever to wake a killed one
                process.join(timeout=10)
        elif self._drain.is_requested and not self._drain_sent:
            self._drain_sent = True
            name = self._drain.signal.name if self._drain.signal else None
            self.reporter.write("draining", node=self.membership.node.name, signal=name)
            self._signal_workers(signal.SIGTERM)

    def _is_resize(self, result: RunResult) -> bool:
        """Whether the workers drained because another node's agent makes room for newcomers."""
        if not _have_drained(result) or self._drain.is_requested:
            return False
        return self.membership.handler.nodes_waiting() > 0

    # -- loss -------------------------------------------------------------------------------

    def _handle_loss(self, hangs: list[Hang] | None = None) -> RunResult:
        """Find out what was lost and why, on all nodes, and end the rest of this node's workers.

        Args:
            hangs: What hangs, where that is why.
        """
        hung = self.monitor.end_hung(hangs)
        mine = hung or self.monitor.describe_dead(self._dead())
        if mine and not hung and not any(loss.is_clear for loss in mine):
            time.sleep(_SETTLE_S)
            mine = self.monitor.describe_dead(self._dead())
        # The other nodes wait for it.
        self.membership.messages.publish("losses", [asdict(loss) for loss in mine])
        self._signal_workers(signal.SIGKILL)  # they wait in collectives for ranks that are gone
        for process in self._processes():
            process.join(timeout=10)
        self.monitor.gather_losses(mine)
        self._report_losses()
        if self._drain.is_requested or not self.should_restart():
            torch_private.disable_restarts(self)  # not wanted, or it would end the same way
        return RunResult(state=WorkerState.FAILED)

    def should_restart(self) -> bool:
        """Judge the newest loss, once; all may continue without the node on which it began."""
        membership, monitor = self.membership, self.monitor
        node = membership.origin(monitor.losses, monitor.hangs)
        if membership.lost_nodes:  # its peers' broken connections are no cause
            first: Loss | LostNode = membership.lost_nodes[0]
            step = monitor.finished_step()
        else:
            first = first_cause(monitor.losses)
            step = first.step
        verdict = membership.restart_policy.decide(
            first,
            node=node,
            remaining=membership.remaining_nodes(),
            finished_step=step,
            hangs=monitor.hangs,
        )
        if node is not None and verdict.exclusion_reason:
            self._exclude(node, verdict.exclusion_reason)
        return verdict.should_restart

    def _exclude(self, node: Node, cause: str, **details: str) -> None:
        """Continue without a node, which may be this one."""
        fields = self.membership.exclusion_event(node, cause)
        self.reporter.write("node_left_out", **fields, **details)
        # If it is this node, the next _rendezvous raises NodeExcluded, after the workers drained.
        self.membership.exclude(node)

    def handle_lost_store(self, cause: str, *, node_rank: int) -> None:
        """Record the loss of the store's node, whose state is now unknown. Safe to repeat."""
        if self.membership.leave_store(cause, node_rank=node_rank):
            self._report_losses()

    def _report_losses(self) -> None:
        if not self._drain.is_overdue:  # else this agent killed them
            self.reporter.report_losses(self.monitor.losses, self.monitor.hangs)

    def use_rendezvous(self, handler: Rendezvous, store: TCPStore, location: StoreLocation) -> None:
        """Set the rendezvous to use from now on; the node that serves the store logs it."""
        self.membership.use_rendezvous(handler, store)
        self.reporter.report_new_store(location.node_rank, location.endpoint)

    # -- stop -------------------------------------------------------------------------------

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        """Before a restart: let healthy workers save their step, end lost ones at once."""
        if not self.monitor.losses:
            # After a loss the others sit in collectives, where no drain reaches them.
            self._drain_workers()
        self._shutdown(signal.SIGKILL, timeout=_DEAD_S)

    def _drain_workers(self) -> None:
        """Wait for this node's workers to save their step; torch would not take their result."""
        self._signal_workers(signal.SIGTERM)
        is_over = lambda: bool(self._dead()) or self._drain.is_overdue  # noqa: E731
        self._wait_for_ends(is_over, within_s=self._drain.timeout_s, every_s=_DRAIN_POLL_S)


def _have_drained(result: RunResult) -> bool:
    return result.state is WorkerState.SUCCEEDED and DRAINED in result.return_values.values()


def _reason_to_stay(reason: str) -> dict[str, str]:
    return {"stays": reason} if reason else {}

"""The workers of one node as a group that starts, is lost, drains and restarts as one.

Torch's LocalElasticAgent does the work; this subclass adds what a reader of events.jsonl wants to
know, ends a group quickly when one worker is lost, and lets a group drain.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from shardyard import torch_private
from shardyard.control_groups import OutOfMemoryKills
from shardyard.elastic.agent_messages import AgentMessages, Node
from shardyard.elastic.dead_workers import Generation
from shardyard.elastic.device_watch import DeviceWatch, Findings
from shardyard.elastic.drain import DrainRequest
from shardyard.elastic.hang_finder import HangFinder
from shardyard.elastic.hang_watch import Budgets, Hang, HangWatch
from shardyard.elastic.heartbeat import clear_heartbeats, read_heartbeats
from shardyard.elastic.node_exclusion import (
    ExclusionRules,
    NodeExcluded,
    RestartPolicy,
    find_origin,
    lost_node,
)
from shardyard.elastic.peer_snapshots import PeerReplication, RingPosition
from shardyard.elastic.processes import ProcessesAgent, standby_pool_of
from shardyard.elastic.rendezvous.c10d import Rendezvous
from shardyard.elastic.restart_budget import RestartBudget, durable_step, earlier_failures
from shardyard.elastic.shared_memory import AgentMemory, translate_semaphore_errors
from shardyard.elastic.slowdown import SlowdownWatch
from shardyard.elastic.worker_failures import (
    Loss,
    LostNode,
    causes,
    describe_hung,
    describe_unresponsive,
    first_cause,
)
from shardyard.errors import StorageError
from shardyard.io.polling import wait_for
from shardyard.network_interface import address_of_node, worker_variables
from shardyard.rundir.attempt_files import StoreLocation
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir

DRAINED = "drained"

_SETTLE_S = 0.3
"""Wait after an ambiguous loss: its cause may be a peer whose end is noticed a moment later."""
_PEER_REPORT_S = 3.0
"""Seconds to wait for other nodes' losses; a node that is silent for so long is gone."""
_PEER_START_S = 60.0
_CUT_OFF_S = 3.0
"""A store that has not answered for so long, while ranks hang, does not answer."""
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
        self._describe_attempt = describe_attempt
        self._heartbeats = heartbeats
        self._budgets = budgets
        self._hang_finder: HangFinder | None = None  # of this generation
        self._hangs: list[Hang] = []
        self._monitored_s = math.inf
        self._stages = stages
        self._slow_ranks: SlowdownWatch | None = None
        self._node = Node.local(node_rank)
        self._events: EventWriter | None = None
        self._world_size = 0
        self._drain_sent = False
        self._standby_pool = standby_pool_of(spec, run.resolved(attempt)) if use_standby else None
        self._messages: AgentMessages  # of this generation; set by each rendezvous
        self._rendezvous_s = self._agreed_s = 0.0
        self._round = 0
        self._has_met = has_met
        self._peer_replication = peer_replication
        self._is_lease_available = is_lease_available
        self._reported_lost: set[int] = set()  # nodes whose loss was reported
        self._devices = DeviceWatch(run, attempt, self._node, findings)
        self._is_excluded = False
        self._join_interval_s = join_interval_s
        self._joined_s = -math.inf  # when nodes that came while others trained were taken in last
        self.is_in_rendezvous = True
        """Whether it waits for other nodes and has no workers."""
        self.generation = -1
        restarts = RestartBudget(max_restarts, earlier_failures(run, attempt))
        self.restart_policy = RestartPolicy(restarts, min_nodes=min_nodes)
        self._rules = ExclusionRules(leave_out_for, self.restart_policy)
        self.losses: list[Loss] = []
        """Causes of the newest generation's end, on all nodes; empty while it is well."""
        self.lost_nodes: list[LostNode] = []
        """Nodes that were gone at the newest loss: they did not say how their workers are."""

    @property
    def _rendezvous_handler(self) -> Rendezvous:
        handler = self.get_worker_group().spec.rdzv_handler
        assert isinstance(handler, Rendezvous)
        return handler

    @property
    def writes_events(self) -> bool:
        """Whether no node of a lower rank is left; false until the first rendezvous.

        Where one of them holds the run still, this node is cut off, and the lost one itself.
        """
        rank = self.get_worker_group().group_rank
        gone = {lost.group_rank for lost in self.lost_nodes}
        if self._is_excluded or rank is None or not gone.issuperset(range(rank)):
            return False
        return rank == 0 or self._is_lease_available()

    def write_event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl if this is the node of rank 0, or the first of those left."""
        if self.writes_events:
            self._write_event(kind, **fields)

    def _write_event(self, kind: str, **fields: Any) -> None:
        with suppress(StorageError):  # a full disk must not hide why the attempt ends
            if self._events is None:
                self._events = EventWriter(
                    self._run.events, attempt=self._attempt, generation=self.generation
                )
            self._events.generation = self.generation
            self._events.write(kind, **fields)

    # -- start ------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._stop_if_draining()
        if self._is_excluded:
            raise NodeExcluded
        is_resize = not (self.losses or self.lost_nodes)
        self.is_in_rendezvous = True
        # A resize is no loss, so it costs nothing of the restart budget.
        if not is_resize:
            self._pause(self.restart_policy.restarts.record_restart(durable_step(self._run)))
        if self.generation >= 0:
            # Ends torch's last call for further nodes (3 s) as soon as all survivors are there.
            left = (worker_group.group_world_size or 0) - len(self.lost_nodes)
            self._rendezvous_handler.expect(left)
        started_s = time.monotonic()
        super()._rendezvous(worker_group)
        group_rank, num_nodes = worker_group.group_rank, worker_group.group_world_size
        assert group_rank is not None and num_nodes is not None  # set by the rendezvous
        self._messages = AgentMessages(
            worker_group.store, group_rank=group_rank, num_nodes=num_nodes
        )
        history = self.restart_policy.failure_history
        address = address_of_node(str(worker_group.master_addr), int(worker_group.master_port or 0))
        # Workers meet under keys of their generation: a reused number holds dead addresses.
        self.generation = self._messages.agree_on_generation(
            self.generation + 1, self._node,
            world_size=self._world_size, failure_history=history.to_json(), address=address,
        )  # fmt: skip
        # The fork server got its environment before the rendezvous, so these go with each start.
        self._variables = worker_variables(address, self._messages.addresses, os.environ)
        history.adopt(self._messages.failure_histories)
        self._agreed_s = time.monotonic()  # the same moment on all nodes
        if self.generation > 0 and is_resize:  # so it is for the node that came
            self._joined_s = self._agreed_s
        self._round = self._rendezvous_handler.round
        met = {node.rank for node in self._messages.nodes}
        untold = [
            lost for lost in self.lost_nodes if lost.node_rank not in self._reported_lost | met
        ]
        self.lost_nodes, self._reported_lost = [], set()
        if self._has_met is not None and self._has_met(
            self._messages.nodes, history.excluded_nodes
        ):
            for lost in untold:  # it held the run still when noticed, as if others were cut off
                self._write_event("node_lost", **lost.event())
            self._write_event("store_moved", **self._node.event())
        self._rendezvous_s = time.monotonic() - started_s
        self.is_in_rendezvous = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_if_draining()
        self.losses = []
        self._drain_sent = False
        # Else the straggler watch would read the last generation's steps as steps of this one.
        clear_heartbeats(self._heartbeats)
        if self._peer_replication is not None:
            place = RingPosition.of(worker_group, self.generation, self._rendezvous_handler.seal)
            self._peer_replication.begin(place, self._messages, self._report_not_copied)
        run_dir = str(self._run.path).replace("$", "$$")  # torch treats arguments as templates
        worker_group.spec.args = (run_dir, self._attempt, self.generation)
        pids = super()._start_workers(worker_group)
        self._announce(worker_group, pids)
        self._hangs = []
        self._hang_finder = finder = self._find_hangs_of(worker_group, pids)
        self._slow_ranks = SlowdownWatch(
            self._messages, node=self._node.name, ranks=list(self._pids_by_rank()),
            world_size=self._world_size, stages=self._stages, heartbeats=self._heartbeats,
            hang_watch=None if finder is None else finder.watch,
        )  # fmt: skip
        return pids

    def _pause(self, seconds: float) -> None:
        # A back-off lasts up to 30 s, and a drain must not wait for it.
        wait_for(lambda: self._drain.is_requested, within_s=seconds, every_s=_DRAIN_POLL_S)
        self._stop_if_draining()

    def _find_hangs_of(self, group: WorkerGroup, pids: dict[int, int]) -> HangFinder | None:
        if self._budgets is None or self._heartbeats is None:
            return None
        by_rank = {worker.global_rank: pids[worker.local_rank] for worker in group.workers}
        read = partial(read_heartbeats, self._heartbeats, len(pids))
        return HangFinder(
            HangWatch(self._budgets, read=read, pids=list(by_rank.values())),
            self._messages,
            node=self._node.name,
            ranks=list(by_rank),
            logs={pid: self._run.log(self._attempt, rank) for rank, pid in by_rank.items()},
            answer_within_s=_PEER_REPORT_S,
        )

    def _stop_if_draining(self) -> None:
        if self._drain.is_requested:
            raise StoppedBeforeStart

    def _report_not_copied(self, reason: str) -> None:
        self._write_event("snapshot_not_copied", **self._node.event(), reason=reason)

    def _announce(self, group: WorkerGroup, pids: dict[int, Any]) -> None:
        mine = [
            {"rank": worker.global_rank, "node": self._node.name, "pid": pids[worker.local_rank]}
            for worker in group.workers
        ]
        self._memory_kills = OutOfMemoryKills()  # of this generation
        self._messages.publish("workers", mine)
        self._world_size = world_size = group.workers[0].world_size
        if not self.writes_events:
            return
        workers = mine + self._messages.from_others("workers", wait_s=_PEER_START_S)
        facts = {"workers": workers, "world_size": world_size}
        if self.generation == 0:
            self.write_event("attempt_started", **facts, **self._describe_attempt())
        self.write_event("rendezvous", seconds=round(self._rendezvous_s, 3), **facts)
        if (resize := self._messages.resize_event(world_size)) is not None:
            self.write_event("resized", **resize)

    # -- watch ------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_drain_on()
        self._spawn_standby()
        # Before torch's own check, which sees only this node and restarts without a cause.
        if self._dead() or self._messages.any_from_others("losses"):
            return self._handle_loss()
        if (found := self._find_hung()) is not None:
            return self._handle_loss(found)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:  # died after the check above
            return self._handle_loss()
        self._check_slow_ranks()
        for kind, problem in self._devices.poll(self._messages, writes=self.writes_events):
            stays = self._rules.on_device(kind, problem, self._messages, self.remaining_nodes())
            self._write_event(kind, **problem, **({"stays": stays} if stays else {}))
        if self._excludes_node(result):
            return RunResult(state=WorkerState.UNHEALTHY)  # all drain and restart
        is_resize = self._is_resize(result)
        # torch asks for waiting nodes after each healthy check, and restarts all if there are any.
        self._rendezvous_handler.takes_in = is_resize or self._is_time_to_join()
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
        notes = read_heartbeats(self._heartbeats, self.get_worker_group().spec.local_world_size)
        # step_ns is 0 until a second step has ended, as the first one of a process is not recorded.
        if notes and all(note.step_ns for note in notes):
            with translate_semaphore_errors():
                self._standby_pool.spawn()

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
            and not (self.is_in_rendezvous or self._is_excluded)
            and finder.watch.is_suspicious()
            # The agent's thread sets it after each answer of the store; while it waits, the time is
            # old.
            and time.monotonic() - self._monitored_s > _CUT_OFF_S
        )

    def _find_hung(self) -> list[Hang] | None:
        """None: no rank of any node hangs, as far as is known."""
        found = None if self._hang_finder is None else self._hang_finder.find()
        self._monitored_s = time.monotonic()
        return found

    def _end_hung(self, hangs: list[Hang] | None) -> list[Loss]:
        """End ranks of this node that hang.

        Args:
            hangs: None: another agent may know of a hang, and has lost its ranks by now.
        """
        if hangs is None:
            hangs = [] if self._hang_finder is None else self._hang_finder.decided()
            if not hangs:
                return []
        self._hangs = hangs
        pids = self._pids_by_rank()
        hung = describe_hung(hangs, pids=pids, node=self._node.name)
        for loss in hung:
            with suppress(ProcessLookupError):
                os.kill(loss.pid, signal.SIGKILL)  # also ends a process that is stopped
        if not hangs:
            # No rank here is to blame: they wait for a node whose agent did not answer.
            t, name = time.monotonic() - self._agreed_s, self._node.name
            hung = [describe_unresponsive(pids, node=name, waited_s=_PEER_REPORT_S, t=t)]
        return self._generation().at_its_step(hung)

    def _is_time_to_join(self) -> bool:
        """Whether nodes that have come may cost the others a restart now.

        One node says so, and its workers tell all others by agreeing on a last step.
        """
        is_over = time.monotonic() - self._joined_s >= self._join_interval_s
        return is_over and self.get_worker_group().group_rank == 0

    def _check_slow_ranks(self) -> None:
        if self._slow_ranks is None or self._drain.is_requested:
            return
        for told in self._slow_ranks.poll(writes=self.writes_events):
            stays, node, left = "", self._node_of(told.rank), self.remaining_nodes()
            if told.is_slow_rank:
                stays = self._rules.on_slow_rank(told.rank, told.factor, node, self._messages, left)
            self.write_event(told.kind, **told.fields, **({"stays": stays} if stays else {}))

    def _excludes_node(self, result: RunResult) -> bool:
        """Return whether a recipe's rule lets all continue without a node that leaves now."""
        has_finished = result.state is WorkerState.SUCCEEDED and not _have_drained(result)
        if self._drain.is_requested or has_finished:
            return False
        if (decided := self._rules.decided(self._messages)) is None:
            return False
        node, cause, verdict = decided
        self._exclude(node, cause, verdict=verdict, rule=self._rules.words)
        return True

    def _node_of(self, rank: int) -> Node:
        # torch numbers ranks node by node, and all nodes have the same number of devices.
        return self._messages.nodes[rank // self.get_worker_group().spec.local_world_size]

    def _pass_drain_on(self) -> None:
        if self._drain.is_overdue:
            self._signal_workers(signal.SIGKILL)
            for process in self._processes():  # torch would wait for ever to wake a killed one
                process.join(timeout=10)
        elif self._drain.is_requested and not self._drain_sent:
            self._drain_sent = True
            name = self._drain.signal.name if self._drain.signal else None
            self.write_event("draining", node=self._node.name, signal=name)
            self._signal_workers(signal.SIGTERM)

    def _is_resize(self, result: RunResult) -> bool:
        """Whether the workers drained because another node's agent makes room for newcomers."""
        if not _have_drained(result) or self._drain.is_requested:
            return False
        return self._rendezvous_handler.nodes_waiting() > 0

    def _handle_loss(self, hangs: list[Hang] | None = None) -> RunResult:
        """Find out what was lost and why, on all nodes, and end the rest of this node's workers.

        Args:
            hangs: What hangs, where that is why.
        """
        hung = self._end_hung(hangs)
        mine = hung or self._describe_dead()
        if mine and not hung and not any(loss.is_clear for loss in mine):
            time.sleep(_SETTLE_S)
            mine = self._describe_dead()
        self._messages.publish("losses", [asdict(loss) for loss in mine])  # others wait for it
        self._signal_workers(signal.SIGKILL)  # they wait in collectives for ranks that are gone
        for process in self._processes():
            process.join(timeout=10)
        self._gather_losses(mine)
        self._report_losses()
        if self._drain.is_requested or not self.should_restart():
            torch_private.disable_restarts(self)  # not wanted, or it would end the same way
        return RunResult(state=WorkerState.FAILED)

    def should_restart(self) -> bool:
        """Judge the newest loss, once; all may continue without the node on which it began."""
        size = self.get_worker_group().spec.local_world_size
        group_rank = find_origin(self.losses, self.lost_nodes, self._hangs, ranks_per_node=size)
        node = None if group_rank is None else self._messages.nodes[group_rank]
        if self.lost_nodes:  # its peers' broken connections are no cause
            first: Loss | LostNode = self.lost_nodes[0]
            step = self._generation().finished_step()
        else:
            first = first_cause(self.losses)
            step = first.step
        verdict = self.restart_policy.decide(
            first,
            node=node,
            remaining=self.remaining_nodes(),
            finished_step=step,
            hangs=self._hangs,
        )
        if node is not None and verdict.exclusion_reason:
            self._exclude(node, verdict.exclusion_reason)
        return verdict.should_restart

    def _exclude(self, node: Node, cause: str, **details: str) -> None:
        """Continue without a node, which may be this one."""
        self.restart_policy.failure_history.exclude(node)
        left = sum(each != node for each in self.remaining_nodes())
        fields = {**node.event(), "machine": node.machine, "cause": cause, "nodes_left": left}
        self.write_event("node_left_out", **fields, **details)
        # If true, the next _rendezvous raises NodeExcluded, after the workers have drained.
        self._is_excluded = node == self._node

    def leave(self) -> None:
        """Leave the other nodes, which continue."""
        self._rendezvous_handler.leave(self.get_worker_group().group_rank or 0)

    def _gather_losses(self, own_losses: list[Loss]) -> None:
        """Collect the losses of the other nodes; wait for them where the cause is not clear here.

        A node without a report by then counts as gone, and the next rendezvous begins without
        it.
        """
        is_clear = any(loss.is_clear for loss in own_losses)
        # Nothing on another node can have caused a clear loss, so there is nothing to wait for.
        theirs = self._messages.from_others("losses", wait_s=0.0 if is_clear else _PEER_REPORT_S)
        self.losses = own_losses + [Loss(**loss) for loss in theirs]
        if not is_clear and (silent := self._messages.silent("losses")):
            cause = f"its agent was silent for {_PEER_REPORT_S:g} s after its ranks were lost"
            nodes = self._messages.nodes
            self.lost_nodes = [self._lost_node(nodes[rank], cause) for rank in silent]
            # Else torch keeps the silent nodes in the rendezvous for elastic.keep_alive_s.
            self._rendezvous_handler.forget(silent, round=self._round)

    def handle_lost_store(self, cause: str, *, node_rank: int) -> None:
        """Record the loss of the store's node, whose state is now unknown. Safe to repeat."""
        if self.generation < 0:
            return  # it never answered: there was no generation to lose
        self.is_in_rendezvous = True  # or looks for the next store
        if self._rendezvous_handler.first_serves:
            node_rank = self._messages.nodes[0].rank
        if node_rank in {lost.node_rank for lost in self.lost_nodes}:
            return
        self.lost_nodes += [
            self._lost_node(node, cause)
            # An excluded node trains no more, but may still serve the store.
            for node in (*self._messages.nodes, *self.restart_policy.failure_history.excluded_nodes)
            if node.rank == node_rank
        ]
        self._report_losses()

    def serving_node(self, *, otherwise: int) -> int:
        """Rank of the node that serves the store of the newest meeting.

        Args:
            otherwise: The one that does where all meetings have the same.
        """
        if not self._rendezvous_handler.first_serves or self.generation < 0:
            return otherwise
        return self._messages.nodes[0].rank if self._messages.nodes else otherwise

    def remaining_nodes(self) -> list[Node]:
        """The nodes of this generation that are not known to be gone, in order of their numbers."""
        if self.generation < 0:
            return []
        known = {lost.node_rank for lost in self.lost_nodes}
        left = [node for node in self._messages.nodes if node.rank not in known]
        # Turns at the lease go by the node's number in the job; group ranks change.
        return sorted(left, key=lambda node: node.rank)

    def use_rendezvous(self, handler: Rendezvous, store: TCPStore, location: StoreLocation) -> None:
        """Set the rendezvous to use from now on; the node that serves the store logs it."""
        spec = self.get_worker_group().spec
        spec.rdzv_handler, spec.master_addr, spec.master_port = handler, store.host, store.port
        if location.node_rank == self._node.rank:
            self._write_event("store_moved", **self._node.event(), endpoint=location.endpoint)

    def _lost_node(self, node: Node, cause: str) -> LostNode:
        size = self.get_worker_group().spec.local_world_size
        return lost_node(node, self._messages.nodes, ranks_per_node=size, cause=cause)

    def report_lost_nodes(self) -> None:
        """Write down which nodes are gone, each once, where this one is to say it."""
        for node in self.lost_nodes:
            if node.node_rank not in self._reported_lost and self.writes_events:
                self._reported_lost.add(node.node_rank)
                self.write_event("node_lost", **node.event())

    def _report_losses(self) -> None:
        if self._drain.is_overdue:  # killed by this agent
            return
        self.report_lost_nodes()
        for hang in self._hangs:
            finished = first_cause(self.losses).step if self.losses else None
            self.write_event("worker_hung", **hang.event(), finished_step=finished)
        if self._hangs:
            return  # the peers that lost contact with it are no news
        for loss in causes(self.losses) if self.losses else ():
            if not self.lost_nodes or (loss.signal and loss.is_clear):  # else it followed from that
                self.write_event("worker_lost", **loss.event())

    def _generation(self) -> Generation:
        return Generation(run=self._run, attempt=self._attempt, number=self.generation)

    def _describe_dead(self) -> list[Loss]:
        return self._generation().dead(
            self._dead(), pids=self._pids_by_rank(), heartbeats=self._heartbeats,
            node=self._node.name,
            agreed_s=self._agreed_s, kills=self._memory_kills,
        )  # fmt: skip

    # -- stop -------------------------------------------------------------------------------

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        """Before a restart: let healthy workers save their step, end lost ones at once."""
        if not self.losses:
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

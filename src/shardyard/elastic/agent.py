"""The agent of one node: from a run folder to an answer, without leftover processes.

The main thread waits for signals; torch's agent runs in a second thread. In the main one it
would take the signals over and kill workers that should drain. A third thread watches for a run
folder that is removed, renamed or unmounted. No other check would notice: open files stay writable,
so steps continue until one cannot be saved.
"""

import errno
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from shardyard.config.endpoints import parse_rendezvous_endpoint
from shardyard.config.resolved import Resolved
from shardyard.config.rules.timeouts import restart_timeout_s
from shardyard.config.schema.recipe import Recipe
from shardyard.elastic.agent_messages import Node
from shardyard.elastic.device_watch import Findings
from shardyard.elastic.drain import DrainRequest
from shardyard.elastic.group import DRAINED, GroupAgent, StoppedBeforeStart
from shardyard.elastic.hang_watch import Budgets
from shardyard.elastic.node_exclusion import NodeExcluded, wait_for_end, was_excluded
from shardyard.elastic.peer_snapshots import PeerReplication
from shardyard.elastic.rendezvous.c10d import (
    Rendezvous,
    RendezvousConfig,
    RendezvousWait,
    build_rendezvous,
    parse_endpoint,
    sever,
    wait_for_all,
)
from shardyard.elastic.rendezvous.etcd import etcd_rendezvous
from shardyard.elastic.rendezvous.store_failover import StoreFailover
from shardyard.elastic.seal import Seal
from shardyard.elastic.shared_memory import AgentMemory
from shardyard.elastic.worker import failure_path
from shardyard.elastic.worker_failures import Loss, first_cause
from shardyard.errors import LostNodeError, ShardyardError, StorageError
from shardyard.rundir.attempt_files import StoreLocation, read_store_location, run_secret
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import end_of_attempt

Worker = Callable[[str, int, int], str]
"""Entry point of a worker: (run_dir, attempt, generation) -> outcome."""

_POLL_S = 0.1
_GIVE_UP_AFTER_S = 15.0
"""Wait for torch's agent after its workers were killed; more only if it hangs."""


@dataclass(frozen=True)
class AttemptResult:
    """End of an attempt on this node."""

    outcome: str
    """finished, drained (the last step is durable) or failed."""
    exit_code: int
    message: str
    drain_left_s: float | None = None
    """Seconds left of a drain, by this node's clock; None: this node got no request to stop."""
    page: str = ""
    """Page of the documentation that explains the end; empty: none."""


@dataclass
class NodeAttempt:
    """One node's part in one attempt."""

    run: RunDir
    number: int
    resolved: Resolved
    drain: DrainRequest
    worker: Worker
    log: Path
    """Log file of torch and this agent."""
    endpoint: str | None = None
    node_rank: int = 0
    own_host: str | None = None
    """Its name, as the other nodes reach it; None: its launcher knows none."""
    heartbeats: AgentMemory | None = None
    """Memory for heartbeats of the workers; None: the system has no such memory."""
    peer_replication: PeerReplication | None = None
    """Keeps this node's snapshots on the next one.

    None: the node has no snapshots, or keeps them only itself.
    """
    store_moves: bool = False
    """Whether the others continue where the node that serves the store is lost."""
    findings: Findings = tuple
    """Problems that telemetry has found on this node's devices."""
    print_status: Callable[[str], None] = print
    """Function that shows users of this node's output what the node waits for."""
    seal: Seal = field(init=False)
    """Marks what the nodes of this attempt tell each other."""
    _wait: RendezvousWait = field(init=False)
    _store_failover: StoreFailover = field(init=False)
    _agent: GroupAgent | None = field(default=None, init=False)
    _answer: AttemptResult | None = field(default=None, init=False)
    _checkpoint_before: str | None = field(default=None, init=False)

    def conduct(self) -> AttemptResult:
        """Run to the end; call from the main thread."""
        self._checkpoint_before = latest_checkpoint_name(self.run)
        self._wait = RendezvousWait(self.node_rank)
        thread = threading.Thread(target=self._run_agent, name="elastic-agent", daemon=True)
        thread.start()
        folder = FolderWatch(self.run.resolved(self.number))
        polls_in_vain = 0
        while thread.is_alive() and polls_in_vain * _POLL_S < _GIVE_UP_AFTER_S:
            if folder.is_gone:
                return self._folder_lost_result()  # the workers end with the fork server
            if self._agent is not None:
                self._agent.monitor.poll_ranks()
                if self._agent.monitor.is_cut_off and not self._leave_dead_store():
                    self._answer = self._cut_off_result(self._agent)
                    break
            thread.join(_POLL_S)
            if (line := self._wait.line()) is not None:
                self.print_status(line)
            # In rendezvous there is no step to save, so a drain need not wait for its timeout.
            is_meeting = self._agent is None or self._agent.membership.is_in_rendezvous
            polls_in_vain += self.drain.is_overdue or (self.drain.is_requested and is_meeting)
        folder.stop()
        answer = self._answer or self._stopped_result()
        # A save can fail before the watch has missed the folder twice, so look once more.
        if answer.outcome == "failed" and folder.is_missing():
            return self._folder_lost_result()
        self._finish(answer)
        return replace(answer, drain_left_s=self.drain.remaining_s)

    def _run_agent(self) -> None:
        try:
            self.seal = Seal(run_secret(self.run, self.number))
            self._answer = self._run_group()
        except StoppedBeforeStart:
            self._answer = AttemptResult(
                "drained", self.drain.exit_code, self._resume_hint("stopped")
            )
        except ShardyardError as error:
            self._answer = AttemptResult("failed", error.exit_code, str(error), page=error.page)
        except (RendezvousError, DistError) as error:
            text = (
                f"node {self.node_rank} lost the others, or fewer than elastic.min_nodes came "
                f"({str(error).splitlines()[0]}). Without the store of node "
                f"{self._store_failover.location.node_rank} no node can continue. Look at the "
                "agents' logs of the other nodes."
            )
            self._answer = AttemptResult("failed", LostNodeError.exit_code, self._resume_hint(text))
            if self._agent is not None and not isinstance(error, RendezvousTimeoutError):
                self._handle_lost_store(self._agent, error)
        except BaseException as error:  # noqa: BLE001  the outermost line of a thread
            traceback.print_exc()
            kind = type(error).__name__
            text = f"the agent failed unexpectedly ({kind}: {error}). See {self.log}."
            self._answer = AttemptResult("failed", 1, text)

    def _run_group(self) -> AttemptResult:
        recipe = self.resolved.recipe
        first = StoreLocation(moves=0, node_rank=0, endpoint=self.endpoint or "")
        place = read_store_location(self.run, self.number) or first
        self._store_failover = StoreFailover(
            self.run, self.number, self.node_rank, place, self.own_host
        )
        # A scheduler may restart an excluded node's agent, which must not join the others again.
        if was_excluded(self.run, self.number, Node.local(self.node_rank)):
            return self._wait_excluded(lambda: not self._store_failover.is_lease_available())
        meeting = self._rendezvous_config()
        if (answer := self._result_if_late(meeting)) is not None:
            return answer
        handler, store, wait = self._enter(meeting)
        # Only then: with a fixed size, torch's rendezvous itself waits for all nodes.
        if meeting.min_nodes < recipe.cluster.nodes:
            wait(
                nodes=recipe.cluster.nodes,
                wait_s=recipe.elastic.start_wait_s,
                is_over=lambda: self.drain.is_requested,
            )
        self._agent = GroupAgent(
            self._worker_spec(handler, store),
            run=self.run,
            attempt=self.number,
            drain=self.drain,
            describe_attempt=self._describe,
            max_restarts=recipe.elastic.max_restarts,
            node_rank=self.node_rank,
            heartbeats=self.heartbeats,
            budgets=Budgets.of(recipe.elastic, compiles=recipe.model.compile is True),
            stages=_stages(recipe),
            use_standby=recipe.elastic.parked is True,
            join_interval_s=recipe.elastic.join_interval_s,
            # Each rendezvous in etcd may have another first node. In a TCP store, the node that
            # serves the new store takes over instead.
            has_met=self._store_failover.take_over if handler.first_serves else None,
            peer_replication=self.peer_replication,
            is_lease_available=self._store_failover.is_lease_available,
            min_nodes=meeting.min_nodes,
            leave_out_for=recipe.elastic.leave_out_for,
            findings=self.findings,
        )
        try:
            while isinstance(end := self._run_until_lost(self._agent), Exception):
                if handler.first_serves:
                    self._retry_rendezvous(self._agent, handler, end)
                else:
                    handler = self._move_to_new_store(self._agent, handler, end)
            return end
        except NodeExcluded:
            return self._leave_run(self._agent, handler)
        finally:
            # Closes the rendezvous for all: nodes that wait there end now, not at their timeout.
            handler.shutdown()
            if self.peer_replication is not None:
                self.peer_replication.close()

    def _worker_spec(self, handler: Rendezvous, store: TCPStore | None) -> WorkerSpec:
        devices = self.resolved.recipe.cluster.devices
        assert devices != "auto"
        return WorkerSpec(
            role="train",
            local_world_size=devices,
            rdzv_handler=handler,
            entrypoint=self.worker,
            max_restarts=sys.maxsize,  # GroupAgent decides when to stop
            monitor_interval=_POLL_S,
            master_addr=None if store is None else store.host,
            master_port=None if store is None else store.port,
        )

    def _result_if_late(self, config: RendezvousConfig) -> AttemptResult | None:
        """Return how the others ended before this node came; it would wait long for their store."""
        end = None if config.serves else end_of_attempt(self.run, self.number)
        return None if end is None else _result_of_others(end, "came later")

    def _run_until_lost(self, agent: GroupAgent) -> AttemptResult | Exception:
        """Return how the attempt ended, or why the store no longer answers."""
        try:
            return self._attempt_result(agent, agent.run())
        except (RendezvousConnectionError, DistError) as error:
            return error

    def _leave_run(self, agent: GroupAgent, handler: Rendezvous) -> AttemptResult:
        """Let the others continue without this node."""
        agent.membership.leave()
        if self.peer_replication is not None:
            self.peer_replication.close()
        # A node that serves the store holds the lease itself, so the lease tells it nothing.
        serves = self._store_failover.serves
        return self._wait_excluded(
            handler.has_others if serves else lambda: not self._store_failover.is_lease_available()
        )

    def _wait_excluded(self, has_others: Callable[[], bool]) -> AttemptResult:
        """Wait without workers until the others have ended the attempt, and end as they did.

        The store that this node serves stays. A stop request ends only this node, at once where
        the others do not need it.
        """

        def is_to_stop() -> bool:
            is_needed = self._store_failover.serves and has_others()
            return self.drain.is_requested and (self.drain.is_overdue or not is_needed)

        end = wait_for_end(self.run, self.number, has_others=has_others, is_to_stop=is_to_stop)
        if end is not None:
            return _result_of_others(end, "was left out")
        if self.drain.is_requested:
            text = "stopped after this node was left out: the others continue without it"
            return AttemptResult("drained", self.drain.exit_code, text)
        text = "the others are gone without a word, and this node was left out before"
        return AttemptResult("failed", LostNodeError.exit_code, self._resume_hint(text))

    def _enter(
        self, config: RendezvousConfig
    ) -> tuple[Rendezvous, TCPStore | None, Callable[..., None]]:
        """Come to where the agents meet.

        Returns:
            The rendezvous, the store if all meetings have the same, and what waits for all nodes.
        """
        place = parse_rendezvous_endpoint(self.resolved.recipe.elastic.rendezvous)
        if place is None:
            handler, store = build_rendezvous(config)
            return handler, store, partial(wait_for_all, config, store)
        # Another run may have the same id and use the same etcd.
        digest = self.seal.derived("etcd").hex()[:8]
        in_etcd = etcd_rendezvous(replace(config, id=f"{config.id}-{digest}"), place)
        return in_etcd, None, in_etcd.wait_for_all

    def _retry_rendezvous(self, agent: GroupAgent, handler: Rendezvous, error: Exception) -> None:
        """Have the next meeting do without the node that served the store of the last one.

        Raises:
            Exception: The given one, as there is to be no other meeting.
        """
        is_wanted = self.store_moves and not self.drain.is_requested
        # Group rank 0 served the store itself: if its own store fails, no other node is gone.
        is_server = agent.membership.group_rank == 0
        if not is_wanted or is_server or self._store_failover.has_ended():
            raise error
        self._handle_lost_store(agent, error)
        if not agent.should_restart():
            raise error
        # The lost node had group rank 0. Otherwise its lease in etcd would last keep_alive_s more.
        handler.forget([0], round=handler.round)

    def _leave_dead_store(self) -> bool:
        """Have an agent that waits in a store which does not answer look for the next one.

        Returns:
            Whether it does; else its node is cut off from one that lives.
        """
        where = self._store_failover
        is_elsewhere = (
            parse_rendezvous_endpoint(self.resolved.recipe.elastic.rendezvous) is not None
        )
        if not self.store_moves or is_elsewhere or where.serves or not where.is_lease_available():
            return False
        sever(parse_endpoint(where.location.endpoint)[1])
        return True

    def _move_to_new_store(
        self, agent: GroupAgent, handler: Rendezvous, error: Exception
    ) -> Rendezvous:
        """Meet at another node's store.

        Raises:
            Exception: The given one, as there is none to meet at.
        """
        is_elsewhere = (
            parse_rendezvous_endpoint(self.resolved.recipe.elastic.rendezvous) is not None
        )
        if not self.store_moves or is_elsewhere or self._store_failover.serves:
            raise error
        if self.drain.is_requested:
            raise error
        # The heartbeat thread of the old rendezvous would continue to ask the lost store.
        handler.shutdown()
        self._handle_lost_store(agent, error)
        left = [node.rank for node in agent.membership.remaining_nodes()]
        is_enough = self.node_rank in left and len(left) >= self._rendezvous_config().min_nodes
        if not (is_enough and agent.should_restart()):
            raise error
        # All agents sort the remaining nodes alike, so each has another turn at the run's lease.
        turn = left.index(self.node_rank)
        store = self._store_failover.find(turn=turn, is_over=lambda: self.drain.is_requested)
        if store is None:
            raise error
        store.set("shardyard/begun", "")  # who comes now need not wait for all
        agent.reporter.report_lost_nodes()  # now it is known that the lost node was not this one
        handler, store = build_rendezvous(self._rendezvous_config(), store)
        agent.use_rendezvous(handler, store, self._store_failover.location)
        return handler

    def _handle_lost_store(self, agent: GroupAgent, error: Exception) -> None:
        cause = f"its store does not answer ({str(error).splitlines()[0]})"
        node_rank = agent.membership.serving_node(otherwise=self._store_failover.location.node_rank)
        agent.handle_lost_store(cause, node_rank=node_rank)

    def _rendezvous_config(self) -> RendezvousConfig:
        elastic, nodes = self.resolved.recipe.elastic, self.resolved.recipe.cluster.nodes
        return RendezvousConfig(
            id=f"{self.run.run_id}-{self.number}",
            seal=self.seal,
            wait=self._wait,
            min_nodes=nodes if elastic.min_nodes == "auto" else elastic.min_nodes,
            max_nodes=nodes if elastic.max_nodes == "auto" else elastic.max_nodes,
            endpoint=self._store_failover.location.endpoint or None,
            node_rank=self.node_rank,
            serving_rank=self._store_failover.location.node_rank,
            join_interval_s=elastic.join_interval_s,
            keep_alive_s=elastic.keep_alive_s,
            restart_timeout_s=restart_timeout_s(elastic),
        )

    def _describe(self) -> dict[str, Any]:
        return {"command": shlex.join(sys.argv)}

    def _attempt_result(self, agent: GroupAgent, result: RunResult | None) -> AttemptResult:
        if result is None or result.is_failed():
            return self._failed_result(agent, agent.monitor.losses)
        if DRAINED in result.return_values.values():
            return AttemptResult("drained", self.drain.exit_code, self._resume_hint("drained"))
        return AttemptResult("finished", 0, "finished")

    def _failed_result(self, agent: GroupAgent, losses: Sequence[Loss]) -> AttemptResult:
        # After the drain's timeout the losses are this agent's own SIGKILL, and no cause.
        if self.drain.is_requested and (self.drain.is_overdue or not losses):
            return self._not_saved_result()
        loss = first_cause(losses)
        if loss.is_final:
            return AttemptResult("failed", loss.exit_code or 1, loss.cause, page=loss.page)
        who = "; ".join(map(str, agent.membership.lost_nodes)) or str(loss)
        why, where = self._no_restart_reason(agent, loss), self._log_hint(agent, loss)
        code = LostNodeError.exit_code if agent.membership.lost_nodes else 1
        code = self.drain.exit_code if self.drain.is_requested else code
        text, page = self._resume_hint(f"{who} {why}. {where}"), loss.page or LostNodeError.page
        return AttemptResult("failed", code, text, page=page)

    def _no_restart_reason(self, agent: GroupAgent, loss: Loss) -> str:
        policy, remaining = agent.membership.restart_policy, agent.membership.remaining_nodes()
        restarts = policy.restarts
        if self.drain.is_requested:
            return "while draining"
        of_node = policy.describe_node_losses(remaining)
        if restarts.is_crash_loop:
            return (
                f"twice after step {loss.step}, and the run did not come beyond it in between: "
                f"another restart would end the same way{of_node}"
            )
        if not restarts.used():
            return "and elastic.max_restarts allows no restart"
        is_same = latest_checkpoint_name(self.run) == self._checkpoint_before
        in_vain = "; no checkpoint became durable in this attempt" if is_same else ""
        return (
            f"and the {restarts.limit} restarts within an hour that elastic.max_restarts allows "
            f"are used up{in_vain}{of_node}"
        )

    def _log_hint(self, agent: GroupAgent, loss: Loss) -> str:
        if not agent.membership.lost_nodes:
            return f"Read {self.run.log(self.number, loss.rank)}."
        log = f"agent-{agent.membership.lost_nodes[0].node_rank}.log"
        return f"Read {self.run.attempt(self.number) / log}."

    def _folder_lost_result(self) -> AttemptResult:
        text = (
            f"{self.run.path} is not there any more: it was removed, renamed or unmounted while "
            "the run trained. No checkpoint could be saved, so all processes of the run were "
            f"ended. Bring it back; then `shardyard resume {self.run.handle}` continues from the "
            "newest checkpoint in it."
        )
        return AttemptResult("failed", StorageError.exit_code, text)

    def _cut_off_result(self, agent: GroupAgent) -> AttemptResult:
        cause = "its store does not answer, while the ranks here wait for others"
        serving = self._store_failover.location.node_rank
        agent.handle_lost_store(cause, node_rank=serving)
        text = (
            f"node {self.node_rank} lost the others: node {serving} does not answer, and no rank "
            "here has moved since. Look at the network between them, and at the agent's log of "
            f"node {serving}."
        )
        return AttemptResult("failed", LostNodeError.exit_code, self._resume_hint(text))

    def _stopped_result(self) -> AttemptResult:
        if self.drain.is_overdue:
            return self._not_saved_result()
        text = "stopped while waiting for the other nodes"
        return AttemptResult("drained", self.drain.exit_code, self._resume_hint(text))

    def _not_saved_result(self) -> AttemptResult:
        text = (
            f"the processes were killed before they had saved their last step, because "
            f"{self.drain.overdue_reason}."
        )
        return AttemptResult("failed", self.drain.exit_code, self._resume_hint(text))

    def _resume_hint(self, text: str) -> str:
        newest = latest_checkpoint_name(self.run)
        durable = f"{newest} is durable" if newest else "no checkpoint is durable yet"
        where = "continues from there" if newest else "begins again at step 0"
        end = f". {durable[0].upper()}{durable[1:]}" if text.endswith(".") else f"; {durable}"
        text = text.removesuffix(".")
        return f"{text}{end}. `shardyard resume {self.run.handle}` {where}."

    def _finish(self, answer: AttemptResult) -> None:
        agent = self._agent
        if agent is None:
            return
        agent.reporter.write(
            "attempt_ended",
            outcome=answer.outcome,
            reason=answer.message,
            exit_code=answer.exit_code,
        )
        for pid in agent.worker_pids():  # only where torch's agent hangs
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        _remove_blank_failures(self.run, self.number)


def _result_of_others(end: dict[str, Any], cause: str) -> AttemptResult:
    text = f"the others ended without this node, which {cause}: {end.get('reason')}"
    return AttemptResult(str(end.get("outcome")), int(end.get("exit_code") or 0), text)


def _stages(recipe: Recipe) -> int | None:
    """Return the pipeline's stages; None on an accelerator, where compute includes waits."""
    if recipe.cluster.device != "cpu":
        return None
    return recipe.parallel.pp if isinstance(recipe.parallel.pp, int) else 1


def latest_checkpoint_name(run: RunDir) -> str | None:
    """Name of the newest durable checkpoint."""
    folder = run.latest_checkpoint()
    return None if folder is None else folder.name


def _remove_blank_failures(run: RunDir, attempt: int) -> None:
    """Remove the room for last words of workers that were killed without any."""
    pattern: Path = failure_path(run, attempt, 0)
    for path in pattern.parent.glob(pattern.name.replace("-0", "-*")):
        with suppress(OSError):
            if not path.read_text(encoding="utf-8").strip():
                path.unlink()


_LOOK_EVERY_S = 1.0
_LOOKS = 2
"""In a row: storage that others share may hide a file for a moment."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderWatch:
    """Checks for one file now and then, in a thread, so that hanging storage blocks only that."""

    def __init__(self, file: Path) -> None:
        """Begin to watch a file that is there as long as its folder is."""
        self._file = file
        self._is_over = threading.Event()
        self.is_gone = False
        threading.Thread(target=self._watch, name="folder-watch", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def is_missing(self) -> bool:
        """Look now: what failed for want of the folder may have ended before it was missed."""
        return not _is_present(self._file)

    def _watch(self) -> None:
        missed = 0
        while not (self.is_gone or self._is_over.wait(_LOOK_EVERY_S)):
            missed = 0 if _is_present(self._file) else missed + 1
            self.is_gone = missed >= _LOOKS


def _is_present(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:  # others may pass, or the next write reports them
        return error.errno not in _GONE
    return True

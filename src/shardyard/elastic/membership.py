"""Nodes of the group: their rendezvous and generation, and those that are lost or excluded.

This part knows nothing of workers' ends and writes no events; see `group.py`.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.elastic.agent.server.api import WorkerGroup

from shardyard.elastic.agent_messages import AgentMessages, Node
from shardyard.elastic.hang_watch import Hang
from shardyard.elastic.node_exclusion import (
    ExclusionRules,
    RestartPolicy,
    find_origin,
    lost_node,
)
from shardyard.elastic.rendezvous.c10d import Rendezvous
from shardyard.elastic.worker_failures import Loss, LostNode
from shardyard.network_interface import address_of_node, worker_variables


class GroupMembership:
    """Nodes that train together, as the agent of one of them knows them."""

    def __init__(
        self,
        group: WorkerGroup,
        node: Node,
        *,
        restart_policy: RestartPolicy,
        rules: ExclusionRules,
        join_interval_s: float,
        has_met: Callable[[list[Node], list[Node]], bool] | None,
    ) -> None:
        """Args:
        group: Torch's record of the newest rendezvous and of this node's workers.
        node: This node.
        rules: Verdicts that exclude a node.
        has_met: Called with the nodes of each rendezvous, and the excluded ones; returns whether
            this node took the store over.
        """
        self._group = group
        self.node = node
        self.restart_policy = restart_policy
        self.rules = rules
        self._join_interval_s = join_interval_s
        self._has_met = has_met
        self._joined_s = -math.inf  # when nodes that came while others trained were taken in last
        self._round = 0
        self.messages: AgentMessages
        """Messages of this generation; each rendezvous sets it."""
        self.generation = -1
        self.agreed_s = 0.0
        """Time at which all nodes agreed on the generation, by this node's monotonic clock."""
        self.world_size = 0
        self.is_in_rendezvous = True
        """Whether this node waits for other nodes and has no workers."""
        self.is_excluded = False
        """Whether the others continue without this node."""
        self.lost_nodes: list[LostNode] = []
        """Nodes that were gone at the newest loss: they did not say how their workers are."""

    @property
    def handler(self) -> Rendezvous:
        """Torch's rendezvous of the nodes."""
        handler = self._group.spec.rdzv_handler
        assert isinstance(handler, Rendezvous)
        return handler

    @property
    def group_rank(self) -> int | None:
        """Rank of this node in the group; None until the first rendezvous."""
        return self._group.group_rank

    def expect_survivors(self) -> None:
        """End torch's last call for further nodes (3 s) as soon as all survivors are there."""
        if self.generation >= 0:
            self.handler.expect((self._group.group_world_size or 0) - len(self.lost_nodes))

    def agree_on_generation(self, *, is_resize: bool) -> dict[str, str]:
        """Agree with the nodes of a rendezvous on the next generation.

        Args:
            is_resize: Whether no loss ended the generation before.

        Returns:
            Variables of this node's workers that name their network interface.
        """
        group = self._group
        assert group.group_rank is not None  # set by the rendezvous
        assert group.group_world_size is not None
        self.messages = AgentMessages(
            group.store, group_rank=group.group_rank, num_nodes=group.group_world_size
        )
        history = self.restart_policy.failure_history
        address = address_of_node(str(group.master_addr), int(group.master_port or 0))
        # Workers meet under keys of their generation: a reused number holds dead addresses.
        self.generation = self.messages.agree_on_generation(
            self.generation + 1, self.node,
            world_size=self.world_size, failure_history=history.to_json(), address=address,
        )  # fmt: skip
        variables = worker_variables(address, self.messages.addresses, os.environ)
        history.adopt(self.messages.failure_histories)
        self.agreed_s = time.monotonic()  # the same moment on all nodes
        if self.generation > 0 and is_resize:  # so it is for the node that came
            self._joined_s = self.agreed_s
        self._round = self.handler.round
        return variables

    def clear_lost_nodes(self) -> list[LostNode]:
        """Start a generation in which no node is lost; returns those that have not come back."""
        met = {node.rank for node in self.messages.nodes}
        absent = [lost for lost in self.lost_nodes if lost.node_rank not in met]
        self.lost_nodes = []
        return absent

    def can_take_over_store(self) -> bool:
        """Report the nodes of a rendezvous; returns whether this node took the store over."""
        if self._has_met is None:
            return False
        excluded = self.restart_policy.failure_history.excluded_nodes
        return self._has_met(self.messages.nodes, excluded)

    def publish_workers(self, pids: Mapping[int, int]) -> list[dict[str, Any]]:
        """Publish the workers of this node to the others.

        Args:
            pids: Process of each worker, by local rank.

        Returns:
            Rank, node and process of each.
        """
        mine = [
            {"rank": worker.global_rank, "node": self.node.name, "pid": pids[worker.local_rank]}
            for worker in self._group.workers
        ]
        self.messages.publish("workers", mine)
        self.world_size = self._group.workers[0].world_size
        return mine

    # -- nodes that come or go --------------------------------------------------------------

    def take_in(self, *, is_resize: bool) -> None:
        """Let torch's agent see waiting nodes, if the others may restart for them now.

        Torch asks for waiting nodes after each healthy check, and restarts all if there are any.
        """
        self.handler.takes_in = is_resize or self._is_time_to_join()

    def _is_time_to_join(self) -> bool:
        """Whether nodes that have come may cost the others a restart now.

        One node decides; its workers agree with all others on a last step.
        """
        is_over = time.monotonic() - self._joined_s >= self._join_interval_s
        return is_over and self.group_rank == 0

    def remaining_nodes(self) -> list[Node]:
        """The nodes of this generation that are not known to be gone, in order of their numbers."""
        if self.generation < 0:
            return []
        known = {lost.node_rank for lost in self.lost_nodes}
        left = [node for node in self.messages.nodes if node.rank not in known]
        # Turns at the lease go by the node's number in the job; group ranks change.
        return sorted(left, key=lambda node: node.rank)

    def drop_silent(self, kind: str, cause: str) -> None:
        """Count nodes as lost that have published no message of a kind."""
        if silent := self.messages.silent(kind):
            nodes = self.messages.nodes
            self.lost_nodes = [self._lost_node(nodes[rank], cause) for rank in silent]
            # Else torch keeps the silent nodes in the rendezvous for elastic.keep_alive_s.
            self.handler.forget(silent, round=self._round)

    def leave_store(self, cause: str, *, node_rank: int) -> bool:
        """Count the node of the store as lost, whose state is now unknown. Safe to repeat.

        Returns:
            Whether that is news.
        """
        if self.generation < 0:
            return False  # it never answered: there was no generation to lose
        self.is_in_rendezvous = True  # or looks for the next store
        if self.handler.first_serves:
            node_rank = self.messages.nodes[0].rank
        if node_rank in {lost.node_rank for lost in self.lost_nodes}:
            return False
        self.lost_nodes += [
            self._lost_node(node, cause)
            # An excluded node trains no more, but may still serve the store.
            for node in (*self.messages.nodes, *self.restart_policy.failure_history.excluded_nodes)
            if node.rank == node_rank
        ]
        return True

    def _lost_node(self, node: Node, cause: str) -> LostNode:
        size = self._group.spec.local_world_size
        return lost_node(node, self.messages.nodes, ranks_per_node=size, cause=cause)

    def origin(self, losses: Sequence[Loss], hangs: Sequence[Hang]) -> Node | None:
        """Return the node on which the newest loss began; None: several, or unknown."""
        size = self._group.spec.local_world_size
        group_rank = find_origin(losses, self.lost_nodes, hangs, ranks_per_node=size)
        return None if group_rank is None else self.messages.nodes[group_rank]

    def node_of(self, rank: int) -> Node:
        """Return the node of a rank."""
        # torch numbers ranks node by node, and all nodes have the same number of devices.
        return self.messages.nodes[rank // self._group.spec.local_world_size]

    def exclusion_event(self, node: Node, cause: str) -> dict[str, Any]:
        """Return the fields of the event that excludes a node."""
        left = sum(each != node for each in self.remaining_nodes())
        return {**node.event(), "machine": node.machine, "cause": cause, "nodes_left": left}

    def exclude(self, node: Node) -> None:
        """Continue without a node, which may be this one: then it writes no events any more."""
        self.restart_policy.failure_history.exclude(node)
        self.is_excluded = node == self.node

    # -- place of the rendezvous ------------------------------------------------------------

    def serving_node(self, *, otherwise: int) -> int:
        """Rank of the node that serves the store of the newest rendezvous.

        Args:
            otherwise: The one that does where all of them have the same store.
        """
        if not self.handler.first_serves or self.generation < 0:
            return otherwise
        return self.messages.nodes[0].rank if self.messages.nodes else otherwise

    def use_rendezvous(self, handler: Rendezvous, store: TCPStore) -> None:
        """Set the rendezvous to use from now on."""
        spec = self._group.spec
        spec.rdzv_handler, spec.master_addr, spec.master_port = handler, store.host, store.port

    def leave(self) -> None:
        """Leave the other nodes, which continue."""
        self.handler.leave(self.group_rank or 0)

"""Search for the rank that hangs, together with the agents of the other nodes.

An agent whose ranks have not moved for too long asks the others how theirs are. A rank is
blamed only when every agent has answered that none of its ranks moves; an agent that does not
answer is gone. No agent waits for another meanwhile: each continues to answer.

    shardyard/looks             how many questions have been asked
    shardyard/looks-<n>/<g>     what the node with group rank g sees of its ranks, for question n
    shardyard/hung              which ranks hang, as the first agent that knew has found
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardyard.elastic.agent_messages import AgentMessages
from shardyard.elastic.hang_watch import Activity, Hang, HangWatch, RankStatus, culprits
from shardyard.elastic.process_inspection import Frame, dump_stacks

_ASK_AGAIN_S = 1.0


class HangFinder:
    """One node's part in finding hung ranks of one generation."""

    def __init__(
        self,
        watch: HangWatch,
        messages: AgentMessages,
        *,
        node: str,
        ranks: Sequence[int],
        logs: Mapping[int, Path],
        answer_within_s: float,
    ) -> None:
        """Args:
        ranks: Global numbers of this node's ranks, by local rank.
        logs: Of its workers, by process.
        answer_within_s: For the other agents.
        """
        self.watch = watch
        self._messages = messages
        self._node, self._ranks, self._logs = node, ranks, logs
        self._answer_within_s = answer_within_s
        self._own_statuses: list[RankStatus] = []
        """This agent's newest answer."""
        self._num_responses = 0
        """Questions that it has answered."""
        self._question: int | None = None
        """Its own that is open."""
        self._requested_s = -math.inf
        self._dumped: Mapping[int, Sequence[Frame]] = {}
        self._dumped_at_move = -1

    def find(self) -> list[Hang] | None:
        """Look for a hang; call it again and again.

        Returns:
            None: all is well, as far as is known. An empty list: an agent does not answer, while
            the ranks of this node wait.
        """
        if decided := self.decided():
            return decided
        self._publish_statuses()
        if not self.watch.is_suspicious():
            self._question = None
            return None
        if self._question is None:
            return self._request_statuses()
        return self._collect(self._question)

    def decided(self) -> list[Hang]:
        """Return the hangs that an agent has found, for all nodes."""
        told = self._messages.decided("hung")
        return [Hang(**{**each, "doing": Activity(each["doing"])}) for each in told]

    def _request_statuses(self) -> list[Hang] | None:
        now_s = time.monotonic()
        # Every agent answers each question, so one agent asks at most once a second.
        if now_s - self._requested_s < _ASK_AGAIN_S:
            return None
        self._requested_s = now_s
        self._question = self._messages.ask("looks")
        self._publish_statuses()
        return self._collect(self._question)

    def _collect(self, question: int) -> list[Hang] | None:
        kind = f"looks-{question}"
        if self._messages.silent(kind):
            is_over = time.monotonic() - self._requested_s > self._answer_within_s
            return [] if is_over else None
        self._question = None
        hangs = culprits(
            self._own_statuses + [_parse_status(each) for each in self._messages.from_others(kind)]
        )
        if not hangs:
            return None
        self._messages.decide("hung", [asdict(hang) for hang in hangs])
        return hangs

    def _publish_statuses(self) -> None:
        """Tell the other agents what is seen here, once for each question."""
        asked = self._messages.num_questions("looks")
        if asked == self._num_responses:
            return
        self._own_statuses = self.watch.statuses(self._ranks, self._node, self._stacks())
        for question in range(self._num_responses + 1, asked + 1):
            self._messages.publish(
                f"looks-{question}", [asdict(look) for look in self._own_statuses]
            )
        self._num_responses = asked

    def _stacks(self) -> Mapping[int, Sequence[Frame]]:
        """Return the stacks of the main threads, by process; empty while all may be well."""
        if not self.watch.is_suspicious():
            return {}
        # One dump until a rank moves: others would fill the logs with the same stacks.
        if self._dumped_at_move != self.watch.moves:
            looks = self.watch.statuses(self._ranks, self._node, {})
            # These hear no signal; waiting for their stacks would cost the whole second.
            deaf = {
                look.pid for look in looks if look.doing in (Activity.STOPPED, Activity.STORAGE)
            }
            self._dumped_at_move = self.watch.moves
            self._dumped = dump_stacks(
                {pid: log for pid, log in self._logs.items() if pid not in deaf},
                header=f"shardyard: no rank of {self._node} has moved for "
                f"{min(look.quiet_s for look in looks):.1f} s; where every thread is:",
            )
        return self._dumped


def _parse_status(fields: dict[str, Any]) -> RankStatus:
    return RankStatus(**{**fields, "doing": Activity(fields["doing"])})

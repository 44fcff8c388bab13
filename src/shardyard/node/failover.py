"""Duties of node 0 apart from training, taken over by another node once node 0 is lost.

The node whose agent serves the store instead (``attempts/<n>/store.json``) tells late nodes
what to join and answers their requests. It also holds the run to its limits and writes its
report. A node 0 that is restarted meanwhile is one of the late nodes.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardyard.config.resolved import Resolved
from shardyard.io.polling import poll_in_background, wait_for
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.log import info
from shardyard.node.budget import AttemptLimits, enforce_limits
from shardyard.node.handshake import Session
from shardyard.node.preflight import Readiness, serve_digests
from shardyard.rundir.attempt_files import read_resolved, read_store_location
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.rundir.state import has_attempt_ended, read_spending, seconds_since_count

_POLL_S = 0.5
_SUCCESSION_S = 30.0
"""For a loss to be noticed, the next store to be served, and network file systems to show it."""


class Node0Failover:
    """A node that may have to."""

    def __init__(
        self, run: RunDir, attempt: int, assignment: NodeAssignment, session: Session
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._assignment = assignment
        self._session = session
        self.is_active = False
        """Whether it does what node 0 did."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Do it while the block runs, from the moment at which it is called."""
        with ExitStack() as duties:

            def poll() -> bool:
                where = read_store_location(self._run, self._attempt)
                if where is not None and where.node_rank == self._assignment.node_rank:
                    self.is_active = True
                    self._take_over(duties, read_resolved(self._run.resolved(self._attempt)))
                return self.is_active

            with poll_in_background(poll, every_s=_POLL_S, name="stand-in"):
                yield

    def _take_over(self, duties: ExitStack, resolved: Resolved) -> None:
        info(f"node {self._assignment.node_rank} takes the place of the lost one")
        files = Readiness(self._run, self._assignment.session)
        duties.enter_context(serve_digests(files, self._attempt, resolved))
        duties.enter_context(self._session.announced(self._attempt, has_started=True))
        terms = terms_from_now(self._run, self._attempt, resolved, self._assignment.session)
        duties.enter_context(enforce_limits(self._run, self._attempt, terms))


def has_node0_failed_over(
    run: RunDir, session: Session, *, within_s: float = _SUCCESSION_S
) -> bool:
    """Check whether a starting node 0's session already trains, at the store of another node.

    This matters where node 0 may be restarted alongside nodes that continue: it rejoins like
    any other.

    Args:
        within_s: Time for the others to notice the loss of node 0, and to agree on a new store.
    """
    attempt = session.started_attempt()
    if attempt is None:
        return False

    def check_moved() -> bool | None:
        if has_attempt_ended(run, attempt):
            return False
        place = read_store_location(run, attempt)
        moved = place is not None and place.node_rank != 0
        return True if moved and is_locked(run.lease) else None

    info("node 0 was lost in this session: looking for the node that does its part")
    return wait_for(check_moved, within_s=within_s, every_s=_POLL_S) is True


def terms_from_now(run: RunDir, attempt: int, resolved: Resolved, session: str) -> AttemptLimits:
    """Return the limits for the rest of the attempt, at the price that node 0 wrote down.

    The other nodes cost money from node 0's last count on, also while they agreed on its
    replacement.
    """
    spent = read_spending(run)
    uncounted_s = seconds_since_count(run, attempt, now_t=time.time())
    return AttemptLimits.of(
        resolved.recipe,
        started_s=time.monotonic() - uncounted_s,
        session=session,
        usd_per_hour=None if spent is None else spent.usd_per_hour,
    )

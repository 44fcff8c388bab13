"""What node 0 does beside training, done by another node once node 0 is lost.

The node whose agent serves the store in its place (``attempts/<n>/store.json``) tells those who
come late what to join, answers what they ask, holds the run to its limits and writes its report.
A node 0 that is started again meanwhile is one of those who come late.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardyard.config.resolved import Resolved
from shardyard.io.polling import meanwhile, wait_for
from shardyard.launchers.node_rank import Place
from shardyard.log import say
from shardyard.node.budget import Terms, held_to_limits
from shardyard.node.handshake import Session
from shardyard.node.preflight import Readiness, answering
from shardyard.rundir.attempt_files import read_resolved, read_store_place
from shardyard.rundir.cost import read_spending, seconds_since_count
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_held
from shardyard.rundir.state import has_attempt_ended

_POLL_S = 0.5
_SUCCESSION_S = 30.0
"""For a loss to be noticed, the next store to be served, and network file systems to show it."""


class StandIn:
    """A node that may have to."""

    def __init__(self, run: RunDir, attempt: int, place: Place, talk: Session) -> None:
        self._run = run
        self._attempt = attempt
        self._place = place
        self._talk = talk
        self.is_called = False
        """Whether it does what node 0 did."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Do it while the block runs, from the moment at which it is called."""
        with ExitStack() as duties:

            def look() -> bool:
                where = read_store_place(self._run, self._attempt)
                if where is not None and where.node_rank == self._place.node_rank:
                    self.is_called = True
                    self._take_up(duties, read_resolved(self._run.resolved(self._attempt)))
                return self.is_called

            with meanwhile(look, every_s=_POLL_S, name="stand-in"):
                yield

    def _take_up(self, duties: ExitStack, resolved: Resolved) -> None:
        say(f"node {self._place.node_rank} takes the place of the lost one")
        files = Readiness(self._run, self._place.session)
        duties.enter_context(answering(files, self._attempt, resolved))
        duties.enter_context(self._talk.announced(self._attempt, has_begun=True))
        terms = terms_from_now(self._run, self._attempt, resolved, self._place.session)
        duties.enter_context(held_to_limits(self._run, self._attempt, terms))


def is_stood_in_for(run: RunDir, talk: Session, *, within_s: float = _SUCCESSION_S) -> bool:
    """Whether the session of a node 0 that starts trains already, at the store of another node.

    Asked where node 0 may be started again beside nodes that go on: it comes back as any other.

    Args:
        within_s: For the others to notice that node 0 was lost, and to agree who serves the store.
    """
    attempt = talk.begun()
    if attempt is None:
        return False

    def found() -> bool | None:
        if has_attempt_ended(run, attempt):
            return False
        place = read_store_place(run, attempt)
        moved = place is not None and place.node_rank != 0
        return True if moved and is_held(run.lease) else None

    say("node 0 was lost in this session: looking for the node that does its part")
    return wait_for(found, within_s=within_s, every_s=_POLL_S) is True


def terms_from_now(run: RunDir, attempt: int, resolved: Resolved, session: str) -> Terms:
    """What is left of the attempt is held to; its price is what node 0 wrote down.

    The other nodes cost money from node 0's last count on, also while they agreed who stands in.
    """
    spent = read_spending(run)
    uncounted_s = seconds_since_count(run, attempt, now_t=time.time())
    return Terms.of(
        resolved.recipe,
        began_s=time.monotonic() - uncounted_s,
        session=session,
        usd_per_hour=None if spent is None else spent.usd_per_hour,
    )

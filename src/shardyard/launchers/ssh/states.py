"""State of a job by ssh, from what its hosts wrote and what they answer now."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.ssh_hosts import SshHost
from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, CapacityError, ShardyardError
from shardyard.io.files import read_json_object
from shardyard.launchers.base import JobState, JobStatus
from shardyard.launchers.job_folder import end_reason, exit_word
from shardyard.launchers.local_job import job_exit_code
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import resume_words

_ENDS = {
    0: JobState.SUCCEEDED,
    EXIT_DRAINED: JobState.DRAINED,
    # 130 is a run that stopped itself, which can be resumed like a drained one.
    EXIT_INTERRUPTED: JobState.DRAINED,
}
_LOST_CODE = 1


@dataclass(frozen=True, kw_only=True)
class SshNodeReport:
    """One node of a job."""

    host: SshHost
    written: dict[str, Any]
    """Content of its state file; empty: none is there."""
    is_alive: bool = False
    """Whether its process runs."""
    is_draining: bool = False
    """Whether only the node itself is left, without the process that supervises it."""
    error: str = ""
    """Why its host did not answer."""
    unasked: str = ""
    """Why its host was not asked, so that its node may run."""

    @property
    def exit_code(self) -> int | None:
        """Exit code that its host wrote; None: it wrote none."""
        code = self.written.get("exit_code")
        return code if isinstance(code, int) else None

    @property
    def runs(self) -> bool:
        """Whether something of it runs."""
        return self.exit_code is None and (self.is_alive or self.is_draining or bool(self.unasked))

    @property
    def words(self) -> str:
        """Its state, for a person."""
        if self.exit_code is not None:
            return exit_word(self.exit_code)
        if self.error or self.unasked:
            return "not asked" if self.unasked else "does not answer"
        if self.is_draining:
            return "draining without its supervisor"
        return "running" if self.is_alive else "lost"

    @property
    def loss(self) -> str:
        """Why it counts as lost, as a sentence; empty: it does not."""
        if self.exit_code is not None or self.runs:
            return ""
        if self.error:
            return f"{self.host.text} does not answer: its node may be lost, or still run"
        return f"{self.host.text} lost its node: its process was killed, or the host was restarted"


def status_of(
    nodes: Sequence[SshNodeReport], *, run: RunDir, session: str, is_side: bool, outlives: bool
) -> JobStatus:
    """Compose the status of a job.

    Args:
        session: Of a training, by which node 0 tells how it is.
        outlives: Whether the others continue without a lost node.

    Raises:
        CapacityError: No host answers, and none wrote how its node ended.
    """
    rows = tuple((node.host.text, node.words) for node in nodes)
    losses = [node.loss for node in nodes if node.loss]
    if any(node.runs for node in nodes):
        progress = "running" if is_side else _progress(run, session, nodes)
        unasked = [f"its hosts were not asked: {node.unasked}" for node in nodes if node.unasked]
        reason = "; ".join([progress, *losses, *unasked[:1]])
        return JobStatus(state=JobState.RUNNING, reason=reason, nodes=rows)
    errors = [node.error for node in nodes if node.error]
    if errors and all(node.exit_code is None for node in nodes):
        # Whether it is over is not known, and nothing may be concluded from silence.
        raise CapacityError("\n".join(dict.fromkeys(errors)))
    code = _exit_code(nodes, run=run, session=session, outlives=outlives)
    state = _ENDS.get(code, JobState.FAILED)
    said = "" if is_side else end_reason(run)
    stops = [str(node.written.get("reason") or "") for node in nodes]
    reasons = list(dict.fromkeys(filter(None, [said, *stops, *losses])))
    if losses and state is JobState.FAILED and not is_side:
        reasons.append(resume_words(run))
    return JobStatus(
        state=state,
        reason="; ".join(reasons) or f"exit code {code}",
        exit_code=code,
        nodes=rows,
    )


def _exit_code(nodes: Sequence[SshNodeReport], *, run: RunDir, session: str, outlives: bool) -> int:
    ended = session_word(run, session).get("exit_code") if outlives else None
    if isinstance(ended, int):
        return ended  # who led the run knows; nodes that it lost do not count
    codes = [_LOST_CODE if node.exit_code is None else node.exit_code for node in nodes]
    is_stopped = any(node.written.get("reason") for node in nodes)
    return job_exit_code(codes, is_stopped=is_stopped)


def session_word(run: RunDir, session: str) -> dict[str, Any]:
    """Return node 0's newest message to the other nodes; empty: there is none."""
    try:
        return read_json_object(run.session(session))
    except (OSError, ValueError):
        return {}


def _progress(run: RunDir, session: str, nodes: Sequence[SshNodeReport]) -> str:
    if any(node.exit_code is not None for node in nodes):
        return "ending"
    return "training" if session_word(run, session).get("begins") is True else "preparing"


def report_of(
    host: SshHost, written: dict[str, Any], answer: dict[str, Any] | ShardyardError | None
) -> SshNodeReport:
    """Return the report of one node.

    Args:
        written: Its state file as this machine sees it.
        answer: Of its host; None: it was not asked, as its node has ended.
    """
    if answer is None:
        return SshNodeReport(host=host, written=written)
    if isinstance(answer, ShardyardError):
        return SshNodeReport(host=host, written=written, error=str(answer))
    # A network's file system may show here later what the host sees already.
    newest = answer.get("written") or written
    return SshNodeReport(
        host=host,
        written=newest,
        is_alive=bool(answer.get("alive")),
        is_draining=bool(answer.get("draining")),
        unasked=str(answer.get("unasked", "")),
    )


def job_session(folder: Path, nonce: str) -> str:
    """Return the session of a job, the same on all nodes and in no other job."""
    return f"{folder.name}-{nonce}"

"""Result of a run whose job is over."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.control.job import Job, reject_bench
from shardyard.errors import ShardyardError
from shardyard.launchers.base import JobState
from shardyard.report.files import write_report
from shardyard.report.summary import Summary
from shardyard.rundir.state import resume_words


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run that came to its end."""

    run_dir: Path
    checkpoint: Path | None
    """The newest durable one. None: none was saved, or it is where only the nodes see it:
    `shardyard fetch` brings it."""
    evaluation: dict[str, Any] | None
    """Metrics of the last evaluation, by name; None: there was no validation split."""
    report: Path
    """A page that opens from disk."""
    summary: Summary
    """The report's numbers."""


def result_of(job: Job) -> Result:
    """Wait until a job is over, and read what its run has left.

    Raises:
        RequestError: It is no training.
        ShardyardError: It failed, was cancelled, or is not known any more.
    """
    reject_bench(job.run_dir)
    status = job.wait()
    handle = job.run_dir.handle
    if status.state is not JobState.SUCCEEDED:
        raise ShardyardError(
            f"job {job.id} of run {job.run_id} has no result: it is {status.state.value} "
            f"({status.reason}). `shardyard logs {handle}` shows its output. "
            f"{resume_words(job.run_dir)}."
        )
    evaluations = job.evaluations()
    summary = write_report(job.run_dir)
    return Result(
        run_dir=job.run_dir.path,
        checkpoint=job.run_dir.latest_checkpoint(),
        evaluation=evaluations[-1]["eval"] if evaluations else None,
        report=job.run_dir.report_html,
        summary=summary,
    )

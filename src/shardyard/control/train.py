"""Training here and now: from a request to what came of an attempt on this machine."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardyard import network_interface
from shardyard.config.load import dump_recipe
from shardyard.config.paths import make_paths_absolute
from shardyard.config.resolved import Resolved, RollbackTarget
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.config.versions import check_packages, engines_for
from shardyard.control.agent_process import run_agent_process
from shardyard.control.alerts import alerting
from shardyard.control.attempt import (
    Attempt,
    check_single_node,
    check_storage,
    no_plan,
    resolve_locally,
    write_down,
)
from shardyard.control.follow import ViewFactory, log_view
from shardyard.control.job import check_submission_finished
from shardyard.control.request import Request, take_environment
from shardyard.control.resume import (
    check_same_run,
    check_step_exists,
    data_as_before,
    is_finished,
    latest_attempt,
)
from shardyard.control.submission import check_run_is_new, predict, unfit_reason
from shardyard.errors import OutOfMemoryError, RequestError, ShardyardError, StorageError
from shardyard.hardware.machine import Machine
from shardyard.io.files import create_text
from shardyard.launchers.ledger_owner import check_writable
from shardyard.log import info, warn
from shardyard.report.next_steps import Lever
from shardyard.report.page import write_report
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir, new_run_id
from shardyard.rundir.lease import Lease
from shardyard.trackers.supervisor import exporting

# The report at the end of an attempt: the last thing done, and only if there is time for it.
#
# Workers and agent have left by then and the lease is free: a scheduler that has lost its patience
# kills this writing and nothing else. It is never why a run is said to have failed.

_AGAIN_S = 0.05
"""An exception that comes while an object is finalized is printed and lost: so it comes again."""


class _OutOfTime(Exception):  # noqa: N818  not an error
    """A drain's time is over."""


def write_last_report(
    run: RunDir, attempt: int, recipe: Recipe, *, remaining_s: float | None
) -> Summary | None:
    """Write the report of an attempt that has ended; call from the main thread.

    Args:
        remaining_s: Of a drain's time, as this node's agent counted it; None: it was not asked to
            stop.

    Returns:
        Its numbers, also where the files could not be written; None if they cannot be read either.
    """
    if not run.attempt(attempt).is_dir():
        return None  # the folder is gone, and the agent has said so
    summary = None
    try:
        with _limited_to(remaining_s):
            summary = summarize(read_run(run))
            summary = write_report(run, suggest=_levers)
    except _OutOfTime:
        _warn(
            f"the {recipe.elastic.drain_timeout_s:g} s of elastic.drain_timeout_s are over; "
            f"`shardyard report {run.handle}` writes it"
        )
    except ShardyardError as error:  # how the training ended is what counts
        _warn(str(error))
    return summary


def _levers(record: RunRecord, step_time_s: float) -> Sequence[Lever]:
    # at the end only: with what plans again, a run would start later
    from shardyard.control.suggestions import levers_of_run

    return levers_of_run(record, step_time_s)


def _warn(reason: str) -> None:
    warn(f"no report was written: {reason}")


@contextmanager
def _limited_to(seconds: float | None) -> Iterator[None]:
    """Raise _OutOfTime inside when the time is over; None: no limit."""
    if seconds is None:
        yield
        return
    if seconds <= 0:
        raise _OutOfTime

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of an attempt."""

    run_dir: RunDir
    answer: dict[str, Any]
    """The agent's: ``outcome`` (finished, drained, failed), ``exit_code``, ``message``."""
    summary: Summary | None
    """None: the run's files cannot be read."""
    page: str = ""
    """Page of the documentation that explains a failure; empty: none."""

    @property
    def exit_code(self) -> int:
        """For a shell: 0 where the training is done."""
        return int(self.answer["exit_code"])

    @property
    def paths(self) -> dict[str, str | None]:
        """Paths of the files to open."""
        latest, report = self.run_dir.latest_checkpoint(), self.run_dir.report_html
        return {
            "checkpoint": None if latest is None else str(latest),
            "report_html": str(report) if report.is_file() else None,
        }

    def to_json(self) -> dict[str, Any]:
        numbers = {} if self.summary is None else self.summary.to_json()
        return {**self.paths, **numbers, **self.answer}


def first_attempt(request: Request, *, is_forced: bool = False) -> Attempt:
    """The first attempt of a new run on this machine; prepares the data, writes no run folder.

    Args:
        is_forced: Whether it starts although the plan does not fit into memory.

    Raises:
        RequestError: It cannot be trained here, does not fit, or the run is there already.
        StorageError: No run folder can be made.
    """
    run = request.recipe.run
    network_interface.check(os.environ)
    if run.id is not None:
        check_run_is_new(RunDir(Path(run.dir).expanduser().resolve() / run.id))
    _check_writable(Path(run.dir).expanduser())
    check_single_node(request.recipe)
    for warning in check_packages(engines_for(request.recipe)):
        warn(warning)
    machine, resolved = resolve_locally(
        request, check=None if is_forced else lambda machine: _check_fits(request, machine)
    )
    run_id = run.id or new_run_id(str(resolved.recipe.run.name))
    attempt = Attempt(
        run_dir=RunDir(Path(run.dir).expanduser().resolve() / run_id),
        number=0,
        requested=request.recipe,
        resolved=resolved,
        machine=machine,
    )
    check_storage(attempt)
    return attempt


def _check_fits(request: Request, machine: Machine, previous: Resolved | None = None) -> None:
    """Reject a plan that does not fit into memory, as ``launch`` does.

    Raises:
        RequestError: It does not fit.
    """
    preview = request.preview(machine, previous)
    devices = preview.recipe.cluster.devices
    if not isinstance(devices, int):
        return
    prediction, _ = predict(request, preview, machine, devices=devices)
    if (misfit := unfit_reason(prediction)) is not None:
        raise RequestError(misfit, page=OutOfMemoryError.page)


def next_attempt(
    run_dir: RunDir,
    overrides: Sequence[str],
    *,
    back_to: RollbackTarget | None = None,
    is_forced: bool = False,
) -> tuple[Attempt, bool]:
    """Return the next attempt of a run on this machine, and whether no work is left.

    Args:
        is_forced: As for ``first_attempt``.
        back_to: An earlier step to continue from; its checkpoints after that stay as they are.

    Raises:
        RequestError: It cannot continue so, or a process of this machine trains it.
        AccessError: The run is another user's.
    """
    check_writable(run_dir)
    check_submission_finished(run_dir)
    lease = Lease(run_dir.lease)  # before anything is read or written: of two, one goes on
    try:
        return _next_attempt(run_dir, overrides, back_to, lease, is_forced=is_forced)
    except BaseException:
        lease.close()
        raise


def _next_attempt(
    run_dir: RunDir,
    overrides: Sequence[str],
    back_to: RollbackTarget | None,
    lease: Lease,
    *,
    is_forced: bool,
) -> tuple[Attempt, bool]:
    number, previous, asked = latest_attempt(run_dir)
    if back_to is not None:
        check_step_exists(run_dir, back_to)
        previous = None if previous is None else replace(previous, back_to=back_to)
    recipe = make_paths_absolute(load_checked_recipe([asked], overrides, of_run=True))
    check_same_run(run_dir, asked, recipe)
    for warning in check_packages(engines_for(recipe)):
        warn(warning)
    check_single_node(recipe)
    take_environment(recipe)
    network_interface.check(os.environ)
    request = Request.of(recipe, name=run_dir.run_id, previous=previous)
    machine, resolved = resolve_locally(
        request,
        previous=previous,
        data=None if previous is None else data_as_before(previous, overrides),
        check=None if is_forced else lambda machine: _check_fits(request, machine, previous),
    )
    attempt = Attempt(
        run_dir=run_dir,
        number=number,
        requested=recipe,
        resolved=resolved,
        machine=machine,
        lease=lease,
    )
    if is_finished(run_dir, previous, resolved, step=None if back_to is None else back_to.step):
        return attempt, True
    check_storage(attempt)
    return attempt, False


def begin(attempt: Attempt) -> Attempt:
    """Make the folder of a new run; the attempt, which holds the run's lease from now on.

    Raises:
        RequestError: Another command made or trains the run meanwhile.
        StorageError: The folder cannot be written.
    """
    run_dir = attempt.run_dir
    lease = Lease(run_dir.lease)  # before anything is written: of two, one begins
    try:
        check_run_is_new(run_dir)
        _write_first(attempt)
    except BaseException:
        lease.close()
        raise
    return replace(attempt, lease=lease)


def _write_first(attempt: Attempt) -> None:
    run_dir = attempt.run_dir
    try:
        create_text(run_dir.recipe, dump_recipe(attempt.requested))
    except OSError as error:
        raise StorageError(
            f"{run_dir.recipe} cannot be written: {error.strerror}. Check that the folder is yours "
            "and has room (`df -h`), or choose another with run.dir."
        ) from error
    events = EventWriter(run_dir.events, attempt=0, generation=0)
    asked = attempt.requested.run
    events.write("run_started", run=run_dir.run_id, tags=asked.tags, started_from=asked.from_)
    events.close()


def train(attempt: Attempt, *, view_factory: ViewFactory = log_view) -> TrainResult:
    """Write an attempt's files, train, write its report. Call from the main thread.

    Args:
        view_factory: How its progress is shown.
    """
    prediction = attempt.plan()
    write_down(attempt, prediction)
    info(no_plan() if prediction is None else prediction.line())
    run_dir, number = attempt.run_dir, attempt.number
    with exporting(run_dir, number, attempt.requested, os.environ) as exporters:
        with alerting(run_dir, attempt.requested.observe.alerts, os.environ):
            answer = run_agent_process(
                run_dir, number, view_factory=view_factory, lease=attempt.lease
            )
        left_s, page = answer.pop("drain_left_s", None), str(answer.pop("page", ""))
        exporters.end(left_s)
        summary = write_last_report(run_dir, number, attempt.resolved.recipe, remaining_s=left_s)
    return TrainResult(run_dir=run_dir, answer=answer, summary=summary, page=page)


def _check_writable(runs_dir: Path) -> None:
    """Raise now, not after an hour of preparation, if no run folder can be made there."""
    nearest = next(folder for folder in (runs_dir, *runs_dir.absolute().parents) if folder.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    why = "cannot be written" if nearest.is_dir() else "is a file, not a folder"
    raise StorageError(
        f"run.dir={str(runs_dir)!r}: {nearest} {why}. Every run gets a folder there. Fix that, or "
        "choose another with run.dir."
    )

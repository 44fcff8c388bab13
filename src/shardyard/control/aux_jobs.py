"""Submit a side job, follow it and take its answer.

The same request gets the same work once. A side job is known in the run's ledger by its
label, the digest of what was asked. One that lives is followed, also after this command was
killed. The answer of one that is done is taken, unless it was handed on before; else
another is submitted.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardyard.config.load import dump_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.code_bundle import describe_code, packed_code
from shardyard.control.described_cluster import against_description
from shardyard.control.job import LaunchedJob, job_of, wait_until, wait_until_placed
from shardyard.control.submission import Proposal, check_launchable, submit
from shardyard.control.subprocesses import error_of
from shardyard.errors import EXIT_DRAINED, AccessError, RequestError, ShardyardError
from shardyard.io.sanitize import log_line
from shardyard.launchers.base import JobState, JobStatus, Launcher, LaunchRequest, LogLine, SideJob
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger, LedgerEntry
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.launchers.log_markers import new_nonce, parse
from shardyard.log import info, warn
from shardyard.rundir.contracts import read_answer, write_answer
from shardyard.rundir.layout import RunDir

_LOOKS = 3
"""At the log of one that has ended, for an answer that a shared file system shows late."""
_BETWEEN_LOOKS_S = 2.0


@dataclass(frozen=True, kw_only=True)
class SideTerms:
    """On what terms a side job is submitted."""

    agree: Callable[[str], None]
    """Asked before anything is submitted; raises if the answer is no."""
    show: Callable[[Proposal], None] | None = None
    """In place of submitting: shows what would be sent."""
    trusts_folder: bool = False
    accepts_old_answer: bool = False
    """An answer that was handed on before will do: what was asked cannot have changed since."""

    @property
    def dry_run(self) -> bool:
        """Whether the request is only shown."""
        return self.show is not None


class SideJobStoppedError(ShardyardError):
    """A side job was cancelled, or its time was over."""

    exit_code = EXIT_DRAINED


def side_request(
    run_dir: RunDir, launcher: Launcher, side: SideJob, *, recipe: Recipe
) -> LaunchRequest:
    """Return the request for a run's side job, without creating anything.

    Args:
        recipe: Recipe as the nodes read it; for a launched run, the one of its newest job.

    Raises:
        RequestError: The launcher cannot do it.
    """
    check_launchable(recipe, launcher)
    text, is_there = dump_recipe(recipe), run_dir.exists
    return LaunchRequest(
        run_id=run_dir.run_id,
        recipe=recipe,
        recipe_text=text,
        nodes=1,
        devices_per_node=1,
        cluster=None,
        run_dir=f"{recipe.run.dir.rstrip('/')}/{run_dir.run_id}",
        code=packed_code(recipe, text, run_dir, is_resume=is_there),
        is_resume=is_there,
        nonce=new_nonce(),
        submission=len(Ledger(run_dir.ledger).side_jobs(side.label)) + 1,
        side=side,
    )


def run_side_job(
    run_dir: RunDir, launcher: Launcher, request: LaunchRequest, terms: SideTerms
) -> dict[str, Any] | None:
    """Submit a side job or find it, follow it to its end; show its progress on stderr.

    Args:
        request: Result of ``side_request``.

    Returns:
        What its function answered; None: with ``dry_run`` no job was submitted.

    Raises:
        ShardyardError: The side job's own error, of the class for its exit code; or it ended
            without an answer.
        KeyboardInterrupt: This command was interrupted; the side job continues.
    """
    assert request.side is not None
    check_trusted(run_dir.ledger, trusts_folder=terms.trusts_folder)
    found = find_side_job(run_dir, launcher, request.side)
    old = read_answer(run_dir, request.side.label)
    if found is not None and old is not None and old.job_id == found.id:
        if terms.accepts_old_answer:
            return old.result
    elif found is not None:
        status = found.status()
        if not status.state.is_over:
            info(f"{_name(found)} lives already: it is followed")
            return None if terms.dry_run else follow_side_job(found)
        answer = None if status.state is JobState.GONE else _answer_in_log(found)
        if answer is not None and "result" in answer:
            info(f"{_name(found)} is done already")
            return None if terms.dry_run else _take(found, status, answer)
        info(
            f"{_name(found)} is over ({status.state.value}: {status.reason}): another is submitted"
        )
    started = start_side_job(run_dir, launcher, request, terms)
    return None if started is None else follow_side_job(started)


def find_side_job(run_dir: RunDir, launcher: Launcher, side: SideJob) -> LaunchedJob | None:
    """The newest submission of a side job with this launcher; None: there was none."""
    ledger = Ledger(run_dir.ledger)
    entries = [each for each in ledger.side_jobs(side.label) if each.launcher == launcher.name]
    if not entries:
        return None
    job = job_of(run_dir, entries[-1])
    return LaunchedJob(run_dir=run_dir, submission=job, launcher=launcher, ledger=ledger)


def start_side_job(
    run_dir: RunDir, launcher: Launcher, request: LaunchRequest, terms: SideTerms
) -> LaunchedJob | None:
    """Show, confirm and submit a request; None: it was only shown."""
    assert request.side is not None
    proposal = Proposal(
        launcher=launcher,
        run_dir=run_dir,
        request=request,
        rendered=launcher.render(request),
        plan=None,
        no_plan_reason="a side job does not train",
    )
    for line in _describe(proposal, in_full=terms.show is not None):
        info(line)
    if terms.show is not None:
        terms.show(proposal)
        return None
    if launcher.name == "kubernetes" and (against := against_description(request)):
        raise RequestError("\n".join(against))
    terms.agree("submit it?")
    _remove_leftovers(run_dir, launcher, request.side)
    job = submit(proposal)
    info(f"job: {job.id} ({job.name}) on {job.launcher}")
    return LaunchedJob(
        run_dir=run_dir, submission=job, launcher=launcher, ledger=Ledger(run_dir.ledger)
    )


def follow_side_job(
    launched: LaunchedJob, *, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Show what a side job prints until it is over; its answer.

    Raises:
        ShardyardError: As ``run_side_job``.
        KeyboardInterrupt: As ``run_side_job``.
    """
    handle, answer = launched.run_dir.handle, None
    try:
        status = wait_until_placed(launched, sleep=sleep, remedy=unplaced_remedy(launched))
        if status.state != JobState.GONE:
            answer = _read_log(launched)
        # the output ends a little before the scheduler says how the job did
        status = wait_until(launched, lambda now: now.state.is_over, sleep=sleep)
    except KeyboardInterrupt:
        info(
            "\nfollowing ended, the side job continues. The same command follows it again, "
            f"`shardyard cancel {handle} --side` ends it"
        )
        raise
    if answer is None:
        answer = _poll_answer(launched, status, sleep=sleep)
    return _take(launched, status, answer)


def unplaced_remedy(launched: LaunchedJob) -> str:
    """What to do about a side job that no node can hold."""
    return (
        "It stays in the queue, and the same command follows it again. Ask for less: "
        f"`shardyard cancel {launched.run_dir.handle} --side`, then the same command with "
        "launch.side.memory_gib=8 launch.side.cpus=2."
    )


def _read_log(launched: LaunchedJob) -> dict[str, Any] | None:
    """Show the log to its end; the last answer in it. A retry's answer comes after the first."""
    latest: dict[str, Any] | None = None
    try:
        for line in launched.launcher.logs(launched.submission, node=0, follow=True):
            answer = _answer_of(launched, line)
            if answer is None:
                info(log_line(line.text))
            latest = answer or latest
    except ShardyardError as error:
        if isinstance(error, RequestError | AccessError):
            raise
        warn(f"{error} What the side job prints is not shown any more.")
    return latest


def _poll_answer(
    launched: LaunchedJob, status: JobStatus, *, sleep: Callable[[float], None]
) -> dict[str, Any] | None:
    looks = _LOOKS if status.state is JobState.SUCCEEDED else 1
    for look in range(looks):
        if look:
            sleep(_BETWEEN_LOOKS_S)
        answer = None if status.state is JobState.GONE else _answer_in_log(launched)
        if answer is not None:
            return answer
    return None


def _answer_in_log(launched: LaunchedJob) -> dict[str, Any] | None:
    """The last answer in what has been printed."""
    try:
        lines: Iterable[LogLine] = launched.launcher.logs(launched.submission, node=0, follow=False)
        found = [answer for line in lines if (answer := _answer_of(launched, line)) is not None]
    except RequestError:  # the scheduler knows it no more
        return None
    return found[-1] if found else None


def _answer_of(launched: LaunchedJob, line: LogLine) -> dict[str, Any] | None:
    marked = parse(line.text, nonce=launched.nonce)
    label = launched.submission.details[SIDE_DETAIL]
    if marked is None or marked.kind != "answer" or marked.content.get("side") != label:
        return None
    return marked.content


def _take(
    launched: LaunchedJob, status: JobStatus, answer: dict[str, Any] | None
) -> dict[str, Any]:
    """Hand an answer on, written down first; or raise its error."""
    if answer is not None and isinstance(answer.get("result"), dict):
        label, result = launched.submission.details[SIDE_DETAIL], answer["result"]
        write_answer(launched.run_dir, label, job_id=launched.id, result=result)
        return dict(result)
    words = f"{_name(launched)} is over ({status.state.value}: {status.reason})"
    if status.state in (JobState.DRAINED, JobState.CANCELLED):
        raise SideJobStoppedError(
            f"{words}. It was ended before it was done. The same command starts another, which "
            "continues where this one stopped."
        )
    if answer is None:
        raise ShardyardError(
            f"{words} and gave no answer. Its last lines are above, and `shardyard logs "
            f"{launched.run_dir.handle} --side` shows it again. The same command starts another."
        )
    raise error_of(answer.get("exit_code"), str(answer.get("error")))


def _name(launched: LaunchedJob) -> str:
    return f"side job {launched.id} ({launched.name}) on {launched.on}"


def _describe(proposal: Proposal, *, in_full: bool) -> list[str]:
    request, side = proposal.request, proposal.request.recipe.launch.side
    assert request.side is not None
    where = f"{proposal.rendered.name} on {proposal.launcher.name}"
    is_here = proposal.launcher.capabilities.is_this_machine
    size = "this machine" if is_here else f"{side.cpus} cores, {side.memory_gib} GiB"
    lines = [f"{request.side.kind}: {where}: one node without accelerators, {size}"]
    lines += describe_code(request.code, in_full=in_full)
    return lines + [f"warning: {warning}" for warning in proposal.rendered.warnings]


def _remove_leftovers(run_dir: RunDir, launcher: Launcher, side: SideJob) -> None:
    """Remove what a submission left that was killed before it wrote its job down."""
    ledger = Ledger(run_dir.ledger)
    jobs = ledger.side_jobs(side.label)
    known = {name for job in jobs for name in (job.name, job.details.get("config"))}
    for entry in ledger.live():
        if _is_leftover(entry, side, known):
            launcher.remove(job_of(run_dir, entry), ledger)


def _is_leftover(entry: LedgerEntry, side: SideJob, recorded_names: set[str | None]) -> bool:
    return entry.details.get(SIDE_DETAIL) == side.label and entry.name not in recorded_names

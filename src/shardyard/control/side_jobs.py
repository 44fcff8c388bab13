"""Read files that only the nodes see, through an idle side job and commands in it.

The side job `fetch` only waits. It ends by itself when it has had no reader for a while,
and is removed at once when all that was wanted is here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardyard.config.schema.recipe import Recipe
from shardyard.control.aux_jobs import (
    SideTerms,
    find_side_job,
    side_request,
    start_side_job,
    unplaced_remedy,
)
from shardyard.control.job import LaunchedJob, wait_until_placed
from shardyard.errors import CapacityError, LostError, RequestError, ShardyardError
from shardyard.launchers.base import Executor, JobState, SideJob
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.log import info, warn
from shardyard.rundir.layout import RunDir
from shardyard.transfer.pod import PodSource

IDLE_S = 300
"""Without a reader, after which the side job ends by itself."""
_FIRST_TRIES = 5
"""Tries of the first command: a container is reported to run a little before it can be
entered.
"""


@dataclass(frozen=True, kw_only=True)
class RemoteFiles:
    """An idle side job that lives."""

    source: PodSource
    job: LaunchedJob

    def of(self, folder: str) -> PodSource:
        """Files of another folder of the same storage."""
        return PodSource(exec=self.source.exec, folder=folder)

    def remove(self, folder: str) -> None:
        """Remove a remote folder; a failure costs only room, and is a warning."""
        try:
            for _ in self.source.exec(["rm", "-rf", "--", folder]):
                pass
        except ShardyardError as error:
            warn(f"{folder} was not removed on the nodes' storage: {error}")


@contextmanager
def open_remote_files(
    run_dir: RunDir,
    trained: LaunchedJob,
    recipe: Recipe,
    terms: SideTerms,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RemoteFiles | None]:
    """Provide a side job whose container sees the run's files, and remove it afterwards.

    After Ctrl-C and after a lost connection it stays for a while: the same command finds it.

    Yields:
        None: with ``dry_run`` its request was only printed.
    """
    launcher = trained.launcher
    if not isinstance(launcher, Executor):
        raise RequestError(
            f"nodes of {launcher.name} cannot be read from here: they share no folder with this "
            "machine, and no command can be run on them. Let them send the files through a bucket: "
            "shardyard fetch --via s3://bucket/prefix, shardyard export --to s3://bucket/prefix."
        )
    check_trusted(run_dir.ledger, trusts_folder=terms.trusts_folder)
    side = SideJob(kind="fetch", arguments={"idle_s": IDLE_S})
    request = side_request(run_dir, launcher, side, recipe=recipe)
    job = find_side_job(run_dir, launcher, side)
    if job is not None and not job.status().state.is_over and not terms.dry_run:
        info(f"side job {job.id} ({job.name}) lives already: files are read there")
    else:
        job = start_side_job(run_dir, launcher, request, terms)
    if job is None:
        yield None
        return
    status = wait_until_placed(job, sleep=sleep, remedy=unplaced_remedy(job))
    if status.state is not JobState.RUNNING:
        raise ShardyardError(
            f"side job {job.id} ({job.name}) is over ({status.state.value}: "
            f"{status.reason}) before a file was read. `shardyard logs {run_dir.handle} --side` "
            "shows what it said."
        )
    found = job

    def run(command: Sequence[str]) -> Iterator[bytes]:
        return launcher.exec(found.submission, command)

    _wait_for_container(run, sleep=sleep)
    try:
        yield RemoteFiles(source=PodSource(exec=run, folder=request.run_dir), job=job)
    except (KeyboardInterrupt, LostError):
        raise
    except BaseException:
        _end(job)
        raise
    _end(job)


def _wait_for_container(
    run: Callable[[Sequence[str]], Iterator[bytes]], *, sleep: Callable[[float], None]
) -> None:
    for tries_left in range(_FIRST_TRIES - 1, -1, -1):
        try:
            for _ in run(["true"]):
                pass
            return
        except CapacityError:
            if not tries_left:
                raise
            sleep(2.0)


def _end(job: LaunchedJob) -> None:
    try:
        job.launcher.remove(job.submission, job.ledger)
    except ShardyardError as error:
        warn(
            f"side job {job.name} was not removed: {error} It ends by itself within "
            f"{IDLE_S // 60} minutes; `shardyard teardown {job.run_dir.handle}` removes the rest."
        )

"""AWS Batch: one multi-node parallel job, whose main node is node 0; of a side job one container.

Prerequisites: an image, a queue on an EC2 compute environment, a file system for the run's folder
(docs/launch-aws-batch.md). What is sent is made in requests.py.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.aws import (
    THROTTLING_CODES,
    UncertainError,
    aws_client,
    aws_session,
    error_code,
    translate_aws_errors,
)
from shardyard.launchers.aws_batch.checks import batch_checks
from shardyard.launchers.aws_batch.logs import read_logs, stream_names
from shardyard.launchers.aws_batch.queue import check_queue, container_of
from shardyard.launchers.aws_batch.requests import (
    LOG_GROUP,
    NAME_BEGINS,
    ORIGIN_TAG,
    RUN_TAG,
    job_definition,
    job_submission,
    warnings,
)
from shardyard.launchers.aws_batch.status import CANCEL_REASON, STATES, is_owned, job_status
from shardyard.launchers.base import (
    ORIGIN_DETAIL,
    Answer,
    Capabilities,
    JobState,
    JobStatus,
    LogLine,
    Removal,
    Rendered,
    SchedulerJob,
    answer,
    mounted_paths,
)
from shardyard.launchers.base import LaunchRequest as Request
from shardyard.launchers.ledger import (
    SUBMITTED,
    UUID,
    EntryForm,
    Ledger,
    LedgerEntry,
    Submission,
    form,
)

JOB = "batch job"
DEFINITION = "batch job definition"

_REGION = r"[a-z]{2,8}(-[a-z]{1,10}){1,3}-\d{1,2}"
_ARN = rf"arn:aws[a-z-]*:batch:{_REGION}:\d{{12}}"
_NAME = r"shardyard-[A-Za-z0-9_-]{1,118}"
_PLACE = {
    "region": form(_REGION),
    "queue": form(rf"({_ARN}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{{0,127}}"),
}
_DEFINITION_ARN = form(rf"{_ARN}:job-definition/{_NAME}:\d{{1,9}}")
_LOG_GROUP = form(r"[A-Za-z0-9_./#-]{1,512}")
_JOB_FORM = EntryForm(name=form(_NAME), id=form(UUID), details=_PLACE)

_MAX_IDS = 100
"""Limit on the ids of one DescribeJobs. Source: botocore's model."""
_SUBMIT_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Between tries of SubmitJob that were throttled."""


class BatchLauncher:
    """Registers a job definition for the run, submits it, follows and terminates it."""

    name: ClassVar[str] = "aws-batch"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=(),
        requeues=True,
        needs_image=True,
        shares_folder=False,
        secrets=("aws-sm", "ssm"),
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {
        JOB: _JOB_FORM,
        DEFINITION: EntryForm(name=form(_NAME), id=_DEFINITION_ARN, details=_PLACE),
        SUBMITTED: replace(
            _JOB_FORM, optional={"definition": _DEFINITION_ARN, "log_group": _LOG_GROUP}
        ),
    }

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._clients: dict[tuple[str, str], Any] = {}

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """Volumes, and what the image holds."""
        return mounted_paths(recipe.launch, launcher=self.name)

    def render(self, request: Request) -> Rendered:
        """RegisterJobDefinition and SubmitJob, as a JSON list of calls and parameters."""
        definition, job = job_definition(request), job_submission(request)
        calls: tuple[dict[str, Any], ...] = (
            {"call": "RegisterJobDefinition", "params": definition},
            {"call": "SubmitJob", "params": job},
        )
        region = request.recipe.launch.aws_batch.region
        return Rendered(
            launcher=self.name,
            run_id=request.run_id,
            name=job["jobName"],
            text=json.dumps(calls, indent=2) + "\n",
            objects=calls,
            warnings=warnings(request),
            target={} if region is None else {"region": region},
            side=request.side_details,
        )

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Check the queue, register the definition, submit the job; undo what was half done."""
        session = aws_session(rendered.target.get("region"))
        region = str(session.region_name)
        batch = aws_client(session, "batch")
        definition, job = (call["params"] for call in rendered.objects)
        # First, as nothing has to be undone yet: in a wrong queue a job waits in RUNNABLE for ever.
        check_queue(batch, job["jobQueue"], definition)
        self._check_no_active_job(batch, job)
        place = {"region": region, "queue": job["jobQueue"]}
        noted = {**place, **rendered.side}
        registered = self._register(batch, definition, ledger, noted)
        job_id = self._submit(session, job, ledger, ledger_details=noted, definition=registered)
        return Submission(
            launcher=self.name,
            run_id=rendered.run_id,
            id=job_id,
            name=job["jobName"],
            details={**place, "definition": str(registered.id), **_log_group(definition)},
        )

    def checks(self, request: Request) -> list[Finding]:
        """Run `doctor`'s checks of AWS; they change nothing."""
        return batch_checks(request)

    def status(self, job: Submission) -> JobStatus:
        """Ask Batch; ``gone`` some days after the end, when Batch has forgotten the job."""
        (said,) = self.statuses([job])
        if isinstance(said, ShardyardError):
            raise said
        return said

    def scheduler_of(self, job: Submission) -> str:
        """The region."""
        return job.details["region"]

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        """Describe jobs by the hundred, then the nodes of all of them."""
        batch = self._client(jobs[0].details["region"], "batch")
        found = {one["jobId"]: one for one in self._describe(batch, [job.id for job in jobs])}
        nodes = self._describe_nodes(batch, found.values())

        def status(job: Submission) -> JobStatus:
            if job.id not in found:
                forgot = "Batch knows this job no more; it forgets jobs some days after their end"
                return JobStatus(state=JobState.GONE, reason=forgot)
            return job_status(found[job.id], nodes.get(job.id, []), now_s=self._now())

        return [answer(partial(status, job)) for job in jobs]

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        """Return the jobs in the region's queues with our tag, submitted by any user."""
        region = str(aws_session(recipe.launch.aws_batch.region).region_name)
        batch = self._client(region, "batch")
        with translate_aws_errors("list the queues", region):
            pages = batch.get_paginator("describe_job_queues").paginate()
            queues = [queue["jobQueueName"] for page in pages for queue in page["jobQueues"]]
        # ListJobs answers for one queue at a time. A star matches any end of a name.
        ids = [
            one["jobId"]
            for queue in queues
            for one in _jobs_named(batch, {"jobName": f"{NAME_BEGINS}*", "jobQueue": queue})
            if not _is_over(one)
        ]
        return [
            SchedulerJob(
                id=one["jobId"], name=one["jobName"], run_id=one["tags"][RUN_TAG],
                state=job_status(one, [], now_s=self._now()).state,
                where=f"queue {one['jobQueue'].rpartition('/')[2]} in {region}",
                end=f"aws batch terminate-job --region {region} --job-id {one['jobId']} "
                "--reason stray",
            )
            # ListJobs returns no tags, so each job is described.
            for one in self._describe(batch, ids)
            if RUN_TAG in one.get("tags", {})
        ]  # fmt: skip

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines from CloudWatch, of all attempts so far."""
        batch = self._client(job.details["region"], "batch")
        logs = self._client(job.details["region"], "logs")
        look = partial(self._job_streams, batch, job, node)
        group = job.details.get("log_group", LOG_GROUP)
        return read_logs(logs, look, group=group, follow=follow, sleep=self._sleep)

    def _job_streams(
        self, batch: Any, job: Submission, node: int | None
    ) -> tuple[bool, dict[int, list[str]]]:
        """Whether the job is over, and the log streams of its nodes."""
        found = self._describe(batch, [job.id])
        if not found:
            raise RequestError(
                f"Batch knows job {job.id} no more, and so not where its logs are. They are still "
                "in CloudWatch: streams of the log group "
                f"{job.details.get('log_group', LOG_GROUP)} that begin with {job.name}."
            )
        count = _num_nodes(found[0])
        if node is not None and node >= count:
            raise RequestError(
                f"node {node} does not exist: job {job.id} has {count} nodes, numbered from 0. "
                "Give a smaller number."
            )
        wanted = range(count) if node is None else [node]
        ids = {f"{job.id}#{number}": number for number in wanted if _is_multinode(found[0])}
        streams = {
            ids[entry["jobId"]]: stream_names(entry)
            for entry in self._describe(batch, list(ids))
            if entry["jobId"] in ids
        }
        if node in (None, 0):  # the job's own entry is that of its main node
            streams[0] = list(dict.fromkeys(streams.get(0, []) + stream_names(found[0])))
        return _is_over(found[0]), streams

    def cancel(self, job: Submission) -> None:
        """TerminateJob, which asks a running job to end and takes a waiting one from the queue.

        CancelJob would leave a running job running and report success all the same.
        """
        batch = self._client(job.details["region"], "batch")
        entry = LedgerEntry(kind=JOB, name=job.name, launcher=self.name, id=job.id)
        for found in self._describe(batch, [job.id]):
            if is_owned(found, entry, run_id=job.run_id, region=job.details["region"]):
                self._terminate(batch, job.id)

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """End the job, then deregister its job definition; log streams are kept.

        Both have the job's name. The run's other jobs, such as a training next to a side job, stay.
        """
        live = ledger.live()
        mine = [one for one in live if (one.launcher, one.name) == (self.name, job.name)]
        removal = Removal()
        for entry in sorted(mine, key=lambda entry: entry.kind != JOB):  # dependants first
            region = entry.details.get("region") or job.details["region"]
            batch = self._client(region, "batch")
            if entry.kind == JOB:
                self._end_jobs(batch, entry, job.run_id, removal)
            elif entry.kind == DEFINITION:
                # Each submission of this name registered a revision of its own.
                confirmed = [one for one in ledger.all() if one.kind == entry.kind]
                named = [one for one in confirmed if one.name == entry.name]
                _deregister(batch, [*named, entry], job.run_id, removal)
            ledger.remove(entry)
        return removal

    def _client(self, region: str, service: str) -> Any:
        key = (region, service)
        if key not in self._clients:  # a client takes a fifth of a second to make
            self._clients[key] = aws_client(aws_session(region), service)
        return self._clients[key]

    def _register(
        self, batch: Any, params: dict[str, Any], ledger: Ledger, ledger_details: dict[str, str]
    ) -> LedgerEntry:
        name = params["jobDefinitionName"]
        entry = ledger.intend(
            DEFINITION, name, launcher=self.name, **ledger_details, **_origin(params)
        )
        try:
            with translate_aws_errors("register the job definition", ledger_details["region"]):
                answer = batch.register_job_definition(**params)
        except UncertainError:
            raise  # it may exist: the ledger keeps the intent, and removal looks for it
        except ShardyardError as error:
            ledger.fail(entry, type(error).__name__)
            raise
        return ledger.confirm(entry, answer["jobDefinitionArn"])

    def _submit(
        self,
        session: Any,
        params: dict[str, Any],
        ledger: Ledger,
        *,
        ledger_details: dict[str, str],
        definition: LedgerEntry,
    ) -> str:
        # SubmitJob has no token that makes a repeated call harmless, so botocore repeats nothing.
        batch = aws_client(session, "batch", retries=1)
        entry = ledger.intend(
            JOB, params["jobName"], launcher=self.name, **ledger_details, **_origin(params)
        )
        try:
            with translate_aws_errors("submit the job", ledger_details["region"]):
                answer = self._unless_throttled(batch, params)
        except UncertainError:
            # The job may exist and needs its definition, so both stay in the ledger.
            raise
        except ShardyardError as error:
            ledger.fail(entry, type(error).__name__)
            with suppress(ShardyardError):  # then it stays in the ledger; the first error counts
                _deregister(batch, [definition], params["tags"][RUN_TAG], Removal())
                ledger.remove(definition)
            raise
        job_id = str(answer["jobId"])
        ledger.confirm(entry, job_id)
        return job_id

    def _unless_throttled(self, batch: Any, params: dict[str, Any]) -> Any:
        import botocore.exceptions

        for wait_s in _SUBMIT_WAITS_S:
            try:
                return batch.submit_job(**params)
            except botocore.exceptions.ClientError as error:
                # A throttled call was not carried out, so it alone may be repeated.
                if error_code(error) not in THROTTLING_CODES:
                    raise
                self._sleep(wait_s)
        return batch.submit_job(**params)

    def _check_no_active_job(self, batch: Any, job: dict[str, Any]) -> None:
        active = [found for found in _jobs_named(batch, job) if not _is_over(found)]
        if active:
            raise RequestError(
                f"the run has a job already: {active[0]['jobId']} is {active[0]['status']} in "
                f"queue {job['jobQueue']}. Two jobs would write into one run folder. Follow it "
                "with `shardyard status`, or end it with `shardyard cancel` first."
            )

    def _describe(self, batch: Any, ids: list[str]) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = []
        with translate_aws_errors("ask for the job", batch.meta.region_name):
            for start in range(0, len(ids), _MAX_IDS):
                jobs += batch.describe_jobs(jobs=ids[start : start + _MAX_IDS])["jobs"]
        return jobs

    def _describe_nodes(
        self, batch: Any, jobs: Iterable[dict[str, Any]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Id of a multi-node job -> its nodes, as far as Batch knows them."""
        ids = {
            f"{job['jobId']}#{number}": job["jobId"]
            for job in jobs
            if _is_multinode(job)
            for number in range(_num_nodes(job))
        }
        nodes: dict[str, list[dict[str, Any]]] = {}
        for entry in self._describe(batch, list(ids)):
            if entry["jobId"] in ids:
                nodes.setdefault(ids[entry["jobId"]], []).append(entry)
        return nodes

    def _end_jobs(self, batch: Any, entry: LedgerEntry, run_id: str, removal: Removal) -> None:
        """End the jobs of an entry.

        An interrupted submission has no known id, so its jobs are found by their name.
        """
        place = {"jobName": entry.name, "jobQueue": entry.details["queue"]}
        ids = [entry.id] if entry.id else [one["jobId"] for one in _jobs_named(batch, place)]
        region = batch.meta.region_name
        going = [found for found in self._describe(batch, ids) if not _is_over(found)]
        # All are checked before the first one ends: the check may raise.
        is_mine = [is_owned(found, entry, run_id=run_id, region=region) for found in going]
        for found, mine in zip(going, is_mine, strict=True):
            name = f"{JOB} {found['jobId']}"
            if mine:
                self._terminate(batch, str(found["jobId"]))
            (removal.removed if mine else removal.not_owned).append(name)

    def _terminate(self, batch: Any, job_id: str) -> None:
        with translate_aws_errors("terminate the job", batch.meta.region_name):
            batch.terminate_job(jobId=job_id, reason=CANCEL_REASON)


def _is_over(job: dict[str, Any]) -> bool:
    state = STATES.get(job["status"])
    return state is not None and state.is_over


def _is_multinode(job: dict[str, Any]) -> bool:
    return bool(job.get("nodeProperties"))


def _num_nodes(job: dict[str, Any]) -> int:
    return int((job.get("nodeProperties") or {}).get("numNodes") or 1)


def _jobs_named(batch: Any, params: dict[str, Any]) -> list[dict[str, Any]]:
    named = [{"name": "JOB_NAME", "values": [params["jobName"]]}]
    pages = batch.get_paginator("list_jobs")
    with translate_aws_errors("list the jobs of the queue", batch.meta.region_name):
        return [
            job
            for page in pages.paginate(jobQueue=params["jobQueue"], filters=named)
            for job in page["jobSummaryList"]
        ]


def _origin(params: dict[str, Any]) -> dict[str, str]:
    """Return the mark of a submission, for the ledger."""
    origin = params["tags"].get(ORIGIN_TAG)
    return {ORIGIN_DETAIL: origin} if origin else {}


def _deregister(batch: Any, entries: Sequence[LedgerEntry], run_id: str, removal: Removal) -> None:
    """Deregister the active revisions of one name that these lines record.

    Each submission makes one revision.
    """
    region = batch.meta.region_name
    with translate_aws_errors("remove the job definition", region):
        pages = batch.get_paginator("describe_job_definitions")
        found = [
            definition
            for page in pages.paginate(jobDefinitionName=entries[0].name, status="ACTIVE")
            for definition in page["jobDefinitions"]
        ]
    revisions = {
        str(definition["jobDefinitionArn"]): any(
            is_owned(definition, entry, run_id=run_id, region=region) for entry in entries
        )
        for definition in found
    }
    with translate_aws_errors("remove the job definition", region):
        for revision, is_mine in revisions.items():
            name = f"{DEFINITION} {revision.rpartition('/')[2]}"
            if is_mine:
                batch.deregister_job_definition(jobDefinition=revision)
                removal.removed.append(name)
            elif any(entry.id is None for entry in entries):  # else no line may mean it
                removal.not_owned.append(name)


def _log_group(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the containers' log group, for the ledger; empty if it is Batch's own."""
    options = container_of(definition)["logConfiguration"]["options"]
    group = str(options["awslogs-group"])
    return {} if group == LOG_GROUP else {"log_group": group}

"""The Kubernetes launcher: JobSet, TrainJob, PyTorchJob and plain Jobs behind the same verbs.

Prerequisites: an image, a claim for the run's folder, and what prerequisites.py lists
(docs/launch-kubernetes.md).
"""

import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError, Problem, RequestError, ShardyardError
from shardyard.launchers.base import (
    ORIGIN_DETAIL,
    Answer,
    Capabilities,
    InstallablePart,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
    SchedulerJob,
    Watchers,
    answer,
    mounted_paths,
)
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.access import context_errors, permission_errors
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.checks import kubernetes_checks, require_served, trainjob_schema
from shardyard.launchers.kubernetes.exec import LostConnectionError
from shardyard.launchers.kubernetes.install import (
    RELEASE,
    RELEASE_FORM,
    install,
    missing,
    needed_parts,
    uninstall,
)
from shardyard.launchers.kubernetes.logs import follow_logs, logs_so_far
from shardyard.launchers.kubernetes.monitoring import missing_watchers, watchers
from shardyard.launchers.kubernetes.names import POD_LABELS, SIDE_KIND, TARGETS, container_of
from shardyard.launchers.kubernetes.objects import render_objects, to_yaml
from shardyard.launchers.kubernetes.ownership import (
    ORIGIN,
    RUN_ID,
    SHARED,
    create_in_ledger,
    is_owned,
)
from shardyard.launchers.kubernetes.placement import check_placeable
from shardyard.launchers.kubernetes.policies import KIND as GROUP_KIND
from shardyard.launchers.kubernetes.policies import NETWORK_POLICY_KIND, NO_NETWORK_POLICY
from shardyard.launchers.kubernetes.prerequisites import MONITORS
from shardyard.launchers.kubernetes.refusals import RBAC_PAGE, ApiUncertainError, ForbiddenError
from shardyard.launchers.kubernetes.state import Object, is_running, latest_pods, status_of
from shardyard.launchers.kubernetes.targets import RUNTIME_RIGHT, for_schema, has_content_of
from shardyard.launchers.ledger import (
    SUBMITTED,
    UUID,
    EntryForm,
    Ledger,
    LedgerEntry,
    Submission,
    form,
)
from shardyard.log import warn

CANCELLED = "shardyard/cancelled"
"""Annotation of the recipe's ConfigMap, which outlives the job."""

_PLACE = {"context": form(".+"), "namespace": form(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")}
_NAME = form(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_OBJECT = EntryForm(name=_NAME, id=form(UUID), details=_PLACE)
_TRAINING_KINDS = tuple(target.kind for target in TARGETS.values())
_JOB_KINDS = (*_TRAINING_KINDS, SIDE_KIND)
_SUBMITTED = EntryForm(
    name=_NAME,
    id=form(UUID),
    details={**_PLACE, "kind": form("|".join(_JOB_KINDS)), "config": _NAME},
)

_CONTENT = ("data", "binaryData")
"""Fields of a ConfigMap with its content."""

_MOST_NAMES = 100
"""In one selector: of 63 characters each they stay below the 8 KB that proxies take."""

_PARTS = (
    "ConfigMap",
    NETWORK_POLICY_KIND,
    GROUP_KIND,
    SHARED,
    "Secret",
    "Service",
    "Deployment",
    *MONITORS,
)
"""Kinds that are created in addition to a job, for etcd and for monitoring."""


class KubernetesLauncher:
    """Creates a ConfigMap and a job object, follows its pods, deletes both."""

    name: ClassVar[str] = "kubernetes"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=("pytorchjob",),
        requeues=True,
        needs_image=True,
        shares_folder=False,
        secrets=("k8s",),
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {
        SUBMITTED: _SUBMITTED,
        RELEASE: RELEASE_FORM,
        **dict.fromkeys((*_JOB_KINDS, *_PARTS), _OBJECT),
    }

    def __init__(self, *, kubeconfig: Path | None = None, poll_s: float = 2.0) -> None:
        self._kubeconfig = kubeconfig
        self._poll_s = poll_s

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """Volumes, and what the image holds."""
        return mounted_paths(recipe.launch, launcher=self.name)

    def render(self, request: LaunchRequest) -> Rendered:
        """A YAML stream: the recipe's ConfigMap, a runtime for a TrainJob, the job."""
        objects = render_objects(request)
        settings = request.recipe.launch.kubernetes
        target = {"namespace": settings.namespace}
        if settings.context is not None:
            target["context"] = settings.context
        return Rendered(
            launcher=self.name,
            run_id=request.run_id,
            name=objects[-1]["metadata"]["name"],
            text=to_yaml(objects),
            objects=objects,
            target=target,
            side=request.side_details,
            warnings=pod.warnings(request),
        )

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Run the checks of the cluster that come before a submission."""
        try:
            api = self._api_of(request)
        except ShardyardError as error:
            return [Finding(name="context", verdict="problem", what=str(error))]
        return kubernetes_checks(request, api)

    def context_errors(self, recipe: Recipe) -> list[Problem]:
        """Look for the context in the kubeconfig."""
        return context_errors(recipe, self._kubeconfig)

    def permission_errors(self, recipe: Recipe) -> list[Problem]:
        """Ask the cluster what this user may do."""
        return permission_errors(recipe, self._kubeconfig)

    def target_name(self, request: LaunchRequest) -> str:
        """The context."""
        return str(request.recipe.launch.kubernetes.context)

    def missing(self, request: LaunchRequest) -> list[InstallablePart]:
        """Prerequisites that the cluster lacks and we can install."""
        return missing(request, self._api_of(request))

    def needed(self, request: LaunchRequest) -> list[InstallablePart]:
        """Prerequisites that an empty cluster would lack."""
        return needed_parts(request)

    def watchers(self, request: LaunchRequest, kind: Watchers) -> list[InstallablePart]:
        """Prometheus and Grafana with what they need, or EKS's add-on for CloudWatch."""
        return watchers(request, kind)

    def missing_watchers(
        self, request: LaunchRequest, parts: Sequence[InstallablePart]
    ) -> list[InstallablePart]:
        """Return the parts that the cluster lacks."""
        return missing_watchers(parts, self._api_of(request))

    def install(self, request: LaunchRequest, part: InstallablePart, ledger: Ledger) -> None:
        """Install one of them."""
        install(part, self._api_of(request), ledger, self._kubeconfig)

    def uninstall(self, request: LaunchRequest, ledger: Ledger) -> list[str]:
        """Remove those that were installed from here, unless jobs need them."""
        return uninstall(self._api_of(request), ledger, self._kubeconfig)

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Create the objects; what was made before a refusal is removed again."""
        place = rendered.target
        api = Api(place.get("context"), place["namespace"], self._kubeconfig)
        config, *shared, job = rendered.objects
        kind = job["kind"]
        if against := check_placeable(api, job):
            warn(against)
        if kind != SIDE_KIND:  # which every cluster has
            require_served(api, kind)
        if kind == "TrainJob":
            job = for_schema(job, trainjob_schema(api))
        for item in shared:
            if item["kind"] == SHARED:
                # Shared with other runs, so it is not in `made` and stays if the job is rejected.
                _ensure_runtime(api, item, ledger, place)
        noted = {**place, **rendered.side}
        config_entry = _create_config(api, config, ledger, noted)
        made = [] if config_entry is None else [config_entry]
        try:
            for item in shared:
                if item["kind"] == NETWORK_POLICY_KIND:
                    made += _created_if_allowed(api, item, ledger, noted)
                elif item["kind"] != SHARED:
                    made.append(_created(api, item, ledger, noted))
            # Last: its pods start at once, mount the ConfigMap and need the policy.
            uid = _create(api, job, ledger, noted)
        except ApiUncertainError:
            raise  # the job may exist and needs what was made for it; all stands in the ledger
        except ShardyardError:
            for entry in reversed(made):
                api.delete(entry.kind, entry.name, uid=str(entry.id))
                ledger.remove(entry)
            raise
        return Submission(
            launcher=self.name,
            run_id=rendered.run_id,
            id=uid,
            name=rendered.name,
            details={**place, "kind": kind, "config": config["metadata"]["name"]},
        )

    def status(self, job: Submission) -> JobStatus:
        """Ask the API server for the job and its pods."""
        return _status(self._api(job), job)

    def scheduler_of(self, job: Submission) -> str:
        """Return the API server, and the namespace of the request."""
        return f"context {job.details['context']}, namespace {job.details['namespace']}"

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        """List the objects of each kind, their pods, and what is noted of those that are gone."""
        api = self._api(jobs[0])
        found = _objects(api, jobs)
        pods = _pods_of(api, [job for job in jobs if job.id in found])
        cancelled = _cancelled(api, {job.name for job in jobs if job.id not in found})

        def status(job: Submission) -> JobStatus:
            return status_of(
                job.details["kind"],
                found.get(job.id),
                pods.get(job.id, []),
                cancelled=job.details["config"] in cancelled,
            )

        return [answer(partial(status, job)) for job in jobs]

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        """Return the namespace's jobs that have our label and no owner."""
        settings = recipe.launch.kubernetes
        api = Api(settings.context, settings.namespace, self._kubeconfig)
        own = (TARGETS[settings.target].kind, SIDE_KIND)
        found = {
            item["metadata"]["uid"]: (kind, item)
            for kind in _JOB_KINDS
            if kind == SIDE_KIND or api.serves(kind)
            for item in _managed(api, kind, is_optional=kind not in own)
            if not item["metadata"].get("ownerReferences")
        }
        jobs = [_submission(kind, item) for kind, item in found.values()]
        pods = _pods_of(api, jobs)
        return [
            SchedulerJob(
                id=job.id, name=job.name, run_id=job.run_id, state=state,
                where=f"context {api.context}, namespace {api.namespace}",
                end=f"kubectl --context {api.context} -n {api.namespace} delete "
                f"{PLURALS[job.details['kind']][1]} {job.name}",
            )
            for job, (kind, item) in zip(jobs, found.values(), strict=True)
            if not (state := status_of(kind, item, pods[job.id], cancelled=False).state).is_over
        ]  # fmt: skip

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Output of the pods that are there; pods of earlier starts are gone with theirs."""
        api = self._api(job)
        container = container_of(job.details["kind"])

        def read(pod: Object, follow: bool) -> Iterator[bytes]:
            return api.log(pod["metadata"]["name"], container=container, follow=follow)

        if follow:
            return follow_logs(
                lambda: _pods(api, job),
                read,
                node=node,
                is_over=lambda: _status(api, job).state.is_over,
                poll_s=self._poll_s,
            )
        return logs_so_far(_pods(api, job), read, node=node)

    def exec(self, job: Submission, command: Sequence[str]) -> Iterator[bytes]:
        """Run a command in the newest running pod of a job."""
        api = self._api(job)
        running = [pod for pod in latest_pods(_pods(api, job)) if is_running(pod)]
        if not running:
            raise LostConnectionError(
                f"job {job.name} has no running pod any more (context {api.context!r}, namespace "
                f"{api.namespace!r}): it ended, or its node was lost"
            )
        name, container = running[-1]["metadata"]["name"], container_of(job.details["kind"])
        return api.exec(name, container=container, command=command)

    def resizes(self, job: Submission) -> bool:
        """A PyTorchJob; a JobSet and a TrainJob keep the nodes they started with."""
        return job.details["kind"].lower() in self.capabilities.resizes

    def resize(self, job: Submission, nodes: int) -> None:
        """Change the number of workers of a PyTorchJob.

        Raises:
            RequestError: The job is gone, or may not have so many.
        """
        kind, api = job.details["kind"], self._api(job)
        found = api.get(kind, job.name)
        if found is None or not is_owned(api, found, _entry_of(job), run_id=job.run_id):
            raise RequestError(
                f"PyTorchJob {job.name} is not in context {api.context!r}, namespace "
                f"{api.namespace!r}. Only a job that is there can be scaled. Resume the run with "
                f"cluster.nodes={nodes}."
            )
        policy = found["spec"]["elasticPolicy"]
        fewest, most = policy["minReplicas"], policy["maxReplicas"]
        if not fewest <= nodes <= most:
            raise RequestError(
                f"{nodes} nodes are not between elastic.min_nodes={fewest} and "
                f"elastic.max_nodes={most} of {job.name}. The job was submitted for that range. "
                "Use a number in it, or cancel and resume with another range."
            )
        change = {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": nodes}}}}
        api.patch(kind, job.name, change, uid=job.id)

    def cancel(self, job: Submission) -> None:
        """Delete the job: its pods get SIGTERM and their grace, and drain. Safe to repeat."""
        api, kind = self._api(job), job.details["kind"]
        found = api.get(kind, job.name)
        if found is not None and not is_owned(api, found, _entry_of(job), run_id=job.run_id):
            return  # ours is gone, and another one has its name
        # Before the delete: later nothing tells a cancelled job from one that others deleted.
        _mark_cancelled(api, job.details["config"], str(int(time.time())), run_id=job.run_id)
        api.delete(kind, job.name, uid=job.id)

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """Delete the job, then the ConfigMap its pods read, then a runtime that none uses."""
        removal = Removal()
        mine = {entry.id for entry in ledger.all()}
        for entry in sorted(_entries(ledger, job), key=_removal_order):
            if entry.kind == SHARED and any(one.kind in _TRAINING_KINDS for one in ledger.live()):
                continue  # another training of the run is left, with which it goes
            api = Api(entry.details["context"], entry.details["namespace"], self._kubeconfig)
            found = api.get(entry.kind, entry.name)
            if found is not None and not is_owned(api, found, entry, run_id=job.run_id):
                removal.not_owned.append(f"{entry.kind} {entry.name}")
            elif found is not None and _delete(api, entry, found, own_uids=mine):
                removal.removed.append(f"{entry.kind} {entry.name}")
            ledger.remove(entry)
        return removal

    def _api_of(self, request: LaunchRequest) -> Api:
        settings = request.recipe.launch.kubernetes
        return Api(settings.context, settings.namespace, self._kubeconfig)

    def _api(self, job: Submission) -> Api:
        return Api(job.details["context"], job.details["namespace"], self._kubeconfig)


def _managed(api: Api, kind: str, *, is_optional: bool) -> list[Object]:
    """Objects of a kind with our label; of one that may not be listed none, which is reported."""
    try:
        return api.in_namespace(kind, pod.MANAGED)
    except ForbiddenError as error:
        if not is_optional:
            raise
        warn(f"{PLURALS[kind][1]} are left out, as you may not list them: {error}")
        return []


def _status(api: Api, job: Submission) -> JobStatus:
    kind = job.details["kind"]
    found = api.get(kind, job.name)
    if found is not None and found["metadata"]["uid"] != job.id:
        found = None  # deleted, and another one made under its name
    config = api.get("ConfigMap", job.details["config"]) if found is None else None
    notes = config["metadata"].get("annotations", {}) if config else {}
    pods = _pods(api, job) if found is not None else []
    status = status_of(kind, found, pods, cancelled=CANCELLED in notes)
    # Before there are pods, only the controller's events tell why, such as a quota.
    if status.state is JobState.WAITING and not pods and (said := api.warnings_about(job.id)):
        return replace(status, reason=f"{status.reason}: {said[-1]}")
    return status


def _objects(api: Api, jobs: Sequence[Submission]) -> dict[str, Object]:
    """Return the existing objects of jobs, by uid; one request per kind."""
    names: dict[str, set[str]] = {}
    for job in jobs:
        names.setdefault(job.details["kind"], set()).add(job.name)
    return {
        str(item["metadata"]["uid"]): item
        for kind, of_kind in names.items()
        for selector in _selectors(pod.INSTANCE, of_kind)
        for item in api.in_namespace(kind, selector)
    }


def _pods_of(api: Api, jobs: Sequence[Submission]) -> dict[str, list[Object]]:
    """Uid of a job -> its pods; one question for all whose controllers use one label."""
    names: dict[str, set[str]] = {}
    for job in jobs:
        names.setdefault(POD_LABELS[job.details["kind"]], set()).add(job.name)
    by_label: dict[tuple[str, str], list[Object]] = {}
    for label, of_label in names.items():
        for selector in _selectors(label, of_label):
            for item in api.pods(selector):
                by_label.setdefault((label, item["metadata"]["labels"][label]), []).append(item)
    return {job.id: by_label.get((POD_LABELS[job.details["kind"]], job.name), []) for job in jobs}


def _cancelled(api: Api, names: Collection[str]) -> set[str]:
    """Return the ConfigMaps of jobs that are noted as cancelled."""
    return {
        name
        for selector in _selectors(pod.INSTANCE, names)
        for name, notes in api.annotations("ConfigMap", selector).items()
        if CANCELLED in notes
    }


def _selectors(label: str, values: Collection[str]) -> Iterator[str]:
    """Selectors of what has one of these values; several, as a request's line has an end."""
    ordered = sorted(values)
    for start in range(0, len(ordered), _MOST_NAMES):
        yield f"{label} in ({','.join(ordered[start : start + _MOST_NAMES])})"


def _pods(api: Api, job: Submission) -> list[Object]:
    return api.pods(f"{POD_LABELS[job.details['kind']]}={job.name}")


def _submission(kind: str, item: Object) -> Submission:
    """An object of ours as if it were read from a ledger."""
    meta = item["metadata"]
    return Submission(
        launcher=KubernetesLauncher.name, id=meta["uid"], name=meta["name"],
        run_id=meta.get("annotations", {}).get(RUN_ID, meta["name"]), details={"kind": kind},
    )  # fmt: skip


def _entry_of(job: Submission) -> LedgerEntry:
    """The line of the job's object."""
    return LedgerEntry(
        kind=job.details["kind"], name=job.name, launcher=job.launcher, id=job.id,
        details=job.details, is_confirmed=True,
    )  # fmt: skip


def _mark_cancelled(api: Api, config: str, value: str | None, *, run_id: str) -> None:
    """Note in the run's own ConfigMap that the job was cancelled, or that it no longer is."""
    found = api.get("ConfigMap", config)
    if found is None or found["metadata"].get("annotations", {}).get(RUN_ID) != run_id:
        return
    change = {"metadata": {"annotations": {CANCELLED: value}}}
    api.patch("ConfigMap", config, change, uid=found["metadata"]["uid"])


def _create(api: Api, item: Object, ledger: Ledger, ledger_details: dict[str, str]) -> str:
    """Create one object between its two lines in the ledger; returns its uid."""
    kind, name = item["kind"], item["metadata"]["name"]
    origin = item["metadata"].get("annotations", {}).get(ORIGIN)
    details = {**ledger_details, **({ORIGIN_DETAIL: origin} if origin else {})}
    return create_in_ledger(
        api, item, ledger, launcher=KubernetesLauncher.name, details=details,
        explain=lambda _error: (
            f"{kind} {name} exists already in context {api.context!r}, namespace "
            f"{api.namespace!r}. The run was submitted before, or somebody else has that name. If "
            "it is yours, follow it with shardyard status, or end it with shardyard cancel and "
            "resume the run; else give another run.id."
        ),
    )  # fmt: skip


def _create_config(
    api: Api, item: Object, ledger: Ledger, ledger_details: dict[str, str]
) -> LedgerEntry | None:
    """Create the ConfigMap; None: the run's own was there, as its name says what it holds."""
    name, run_id = item["metadata"]["name"], item["metadata"]["annotations"][RUN_ID]
    found = _owned_object(api, item, ledger)
    # The name has only 8 digits of the digest, so the content is compared as well.
    if found and all(found.get(key) == item.get(key) for key in _CONTENT):
        # A resume with the same recipe finds this ConfigMap with the mark of the earlier job.
        _mark_cancelled(api, name, None, run_id=run_id)
        return None
    return _created(api, item, ledger, ledger_details)


def _owned_object(api: Api, item: Object, ledger: Ledger) -> Object | None:
    """Return the object under an object's name, if this run made it."""
    meta = item["metadata"]
    mine = [e for e in ledger.live() if (e.kind, e.name) == (item["kind"], meta["name"])]
    found = api.get(item["kind"], meta["name"]) if mine else None
    run_id = meta["annotations"][RUN_ID]
    is_mine = found and any(is_owned(api, found, entry, run_id=run_id) for entry in mine)
    return found if is_mine else None


def _created(api: Api, item: Object, ledger: Ledger, ledger_details: dict[str, str]) -> LedgerEntry:
    """Create one object; its line."""
    uid = _create(api, item, ledger, ledger_details)
    return LedgerEntry(
        kind=item["kind"], name=item["metadata"]["name"], launcher=KubernetesLauncher.name, id=uid,
        details=ledger_details, is_confirmed=True,
    )  # fmt: skip


def _created_if_allowed(
    api: Api, item: Object, ledger: Ledger, ledger_details: dict[str, str]
) -> list[LedgerEntry]:
    """A policy's line; none where it is there, or, with a warning, may not be created."""
    try:
        if _owned_object(api, item, ledger):
            return []
        return [_created(api, item, ledger, ledger_details)]
    except AccessError:
        warn(NO_NETWORK_POLICY)
        return []


def _ensure_runtime(api: Api, item: Object, ledger: Ledger, ledger_details: dict[str, str]) -> None:
    """Create the runtime unless an equal one is there; it is shared and outlives a job."""
    name = item["metadata"]["name"]
    try:
        found = api.get(item["kind"], name)
    except ForbiddenError as error:
        raise AccessError(
            f"{error} A TrainJob takes restarts, grace and rights from {item['kind']} {name}, an "
            f"object of the whole cluster, so that its content is read first. {RUNTIME_RIGHT}",
            page=RBAC_PAGE,
        ) from error
    if found is None:
        try:
            _create(api, item, ledger, ledger_details)
        except AccessError as error:
            raise AccessError(
                f"{error} {item['kind']} {name} is not there, and you may not create it: have an "
                "administrator apply it once, as shardyard launch --dry-run prints it.",
                page=RBAC_PAGE,
            ) from error
        return
    if not has_content_of(found, item):
        raise RequestError(
            f"ClusterTrainingRuntime {name} is there with other content. Restarts, grace, rights "
            "and priority of a TrainJob's pods come from it, and other runs may use it. Give "
            "launch.kubernetes.runtime another name, or have it replaced by the one that "
            "shardyard launch --dry-run prints."
        )


def _entries(ledger: Ledger, job: Submission) -> list[LedgerEntry]:
    """Return the ledger's live entries of this job."""
    config = job.details.get("config")  # an interrupted submission has none
    return [
        entry
        for entry in ledger.live()
        if entry.launcher == KubernetesLauncher.name
        and (entry.name in (job.name, config) or entry.kind == SHARED)
    ]


def _removal_order(entry: LedgerEntry) -> int:
    return {GROUP_KIND: 1, NETWORK_POLICY_KIND: 1, "ConfigMap": 1, SHARED: 2}.get(entry.kind, 0)


def _delete(api: Api, entry: LedgerEntry, item: Object, *, own_uids: Container[str | None]) -> bool:
    """Delete the entry's object; False: it is gone, or a runtime that others use by now."""
    if entry.kind == SHARED and _is_used(api, entry.name, besides=own_uids):
        return False
    return api.delete(entry.kind, entry.name, uid=item["metadata"]["uid"])


def _is_used(api: Api, runtime: str, *, besides: Container[str | None]) -> bool:
    """Return whether a TrainJob of any namespace, except these uids, refers to a runtime."""
    try:
        jobs = api.everywhere("TrainJob")
    except AccessError:
        return True  # it cannot be known: it stays
    others = [other for other in jobs if other["metadata"]["uid"] not in besides]
    return any(other["spec"]["runtimeRef"]["name"] == runtime for other in others)

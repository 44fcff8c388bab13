"""Installs a cluster's missing parts: releases by kubectl or helm, our own by the API.

The context is always named on the command line, no shell reads it, no kubeconfig is
written.
"""

import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardyard.config.endpoints import service_name
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.launchers.base import InstallablePart, LaunchRequest
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.checks import drivers_missing
from shardyard.launchers.kubernetes.etcd import empty_secret, filled, render_etcd
from shardyard.launchers.kubernetes.node_checks import allocatable_count, matching_nodes
from shardyard.launchers.kubernetes.objects import to_yaml
from shardyard.launchers.kubernetes.ownership import create_in_ledger, is_owned
from shardyard.launchers.kubernetes.prerequisites import (
    ALL,
    ETCD,
    JOBSET,
    MONITORS,
    TRAINER,
    Prerequisite,
    Release,
    needed,
)
from shardyard.launchers.ledger import EntryForm, Ledger, LedgerEntry, form

RELEASE = "release"
"""Kind of the ledger's line of a part that a program installed."""

RELEASE_FORM = EntryForm(
    name=form(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}"),
    id=form(r"\S+"),
    details={
        "context": form(".+"), "how": form("manifest|kustomize|chart|addon"), "url": form(r"\S+"),
        "chart": form(r"[a-z0-9-]*"), "chart_namespace": form(r"[a-z0-9-]*"),
        "version": form(r"\d[\d.]{0,20}(-eksbuild\.\d+)?"),
        "provides": form(r"[A-Za-z0-9./,-]*"),
    },
)  # fmt: skip

_LAUNCHER = "kubernetes"
_SECRET_NOTE = "# Secret {}: made at the installation with a new certificate, which is not shown.\n"
_LIMIT_S = 600.0
"""Limit on one command; a chart of some megabytes and its objects take seconds."""
_GONE = "could not find addon"
"""eksctl's error if an add-on is already removed; kubectl and helm have an option for it."""


def missing(request: LaunchRequest, api: Api) -> list[InstallablePart]:
    """Return the missing parts of the cluster that we can install, in the order of installation."""
    parts = [part for part in needed(request) if _is_missing(part, request, api)]
    parts += drivers_missing(request, api)
    has_jobset = api.serves("JobSet") or bool(api.versions_of("JobSet"))
    return _parts(parts, request, has_jobset=has_jobset)


def needed_parts(request: LaunchRequest) -> list[InstallablePart]:
    """Return the parts that an empty cluster would lack, from the recipe; no cluster is queried."""
    return _parts(needed(request), request, has_jobset=False)


def install(part: InstallablePart, api: Api, ledger: Ledger, kubeconfig: Path | None) -> None:
    """Install one part.

    Raises:
        RequestError: kubectl or helm is not installed here, or fails.
        AccessError: These credentials may not.
        CapacityError: The cluster does not answer; the ledger has what was begun.
    """
    place = {"context": str(api.context), "namespace": api.namespace}
    if not part.command:
        for item in part.objects:
            _create(item, api, ledger, place)
        return
    # Before the ledger's line, so that a missing program leaves nothing to look for.
    _require_program(part.command[0])
    entry = ledger.intend(RELEASE, part.name, launcher=_LAUNCHER, **place, **part.details)
    _run(_with_kubeconfig(part.command, kubeconfig))  # half applied, it stands as intended
    ledger.confirm(entry, part.details["url"])


def uninstall(api: Api, ledger: Ledger, kubeconfig: Path | None) -> list[str]:
    """Remove all that the ledger names, the last first.

    Raises:
        RequestError: Somebody's jobs need it.
    """
    entries = [entry for entry in reversed(ledger.live()) if entry.launcher == _LAUNCHER]
    # All are checked before the first one is removed, so that an error leaves all in place.
    for entry in entries:
        if entry.kind == RELEASE:
            _release(entry, api)
        _check_unused(entry, api)
    removed = []
    for entry in entries:
        if entry.kind == RELEASE:
            release = _release(entry, api)
            argv = release.remove(entry.details["context"])
            _require_program(argv[0])
            _run(_with_kubeconfig(argv, kubeconfig), gone=_GONE)
            removed.append(entry.name)
        elif _delete(api, entry):
            removed.append(f"{entry.kind} {entry.name}")
        ledger.remove(entry)
    return removed


def _delete(api: Api, entry: LedgerEntry) -> bool:
    if entry.kind in MONITORS and not api.serves(entry.kind):
        return False  # went with its kind
    found = api.get(entry.kind, entry.name)
    if found is None or not is_owned(api, found, entry, run_id=None):
        return False
    return api.delete(entry.kind, entry.name, uid=found["metadata"]["uid"])


def _is_missing(part: Prerequisite, request: LaunchRequest, api: Api) -> bool:
    if part.provides in PLURALS:
        # Other users share a controller of another version, so Shardyard does not replace it.
        return not api.serves(part.provides) and not api.versions_of(part.provides)
    if part is ETCD:
        name = service_name(request.recipe.launch.kubernetes)
        return name is not None and api.get("Service", name) is None
    nodes = matching_nodes(request, api)
    # Some plugin offers these devices already, under whatever name it was installed.
    if any(allocatable_count(node, part.provides) for node in nodes):
        return False
    return not runs(part, api, "DaemonSet")


def runs(part: Prerequisite, api: Api, kind: str) -> bool:
    """Return whether a workload of its image runs: a second one would break both."""
    images = [
        container["image"]
        for found in api.everywhere(kind)
        for container in found["spec"]["template"]["spec"]["containers"]
    ]
    return any(part.image in image for image in images)


def _parts(
    prerequisites: Iterable[Prerequisite], request: LaunchRequest, *, has_jobset: bool
) -> list[InstallablePart]:
    found = [_part(part, request, has_jobset=has_jobset) for part in prerequisites]
    return [part for part in found if part is not None]


def _part(
    part: Prerequisite, request: LaunchRequest, *, has_jobset: bool
) -> InstallablePart | None:
    """Return the part to install; None: only its vendor's way installs it."""
    settings = request.recipe.launch.kubernetes
    if part is ETCD:
        objects, secret = render_etcd(settings), empty_secret(settings)
        text = to_yaml(objects)
        if secret is not None:
            text = _SECRET_NOTE.format(secret["metadata"]["name"]) + text
            objects = (secret, *objects)
        return InstallablePart(name=part.label, purpose=part.purpose, text=text, objects=objects)
    if part.release is None:
        return None
    found = released_part(part, part.release, settings.context)
    if part is TRAINER and has_jobset:
        # a second one would fight with the first
        command = (*found.command, "--set", "jobset.install=false")
        return replace(found, command=command, text=shlex.join(command) + "\n")
    if part is TRAINER:
        return replace(found, details={**found.details, "provides": _with_jobset(part)})
    return found


def released_part(part: Prerequisite, release: Release, context: str | None) -> InstallablePart:
    """A part that a program installs.

    Args:
        release: The part's, or the same with other values.

    Raises:
        RequestError: It is an add-on of EKS, and the context does not say of which cluster.
    """
    command = tuple(release.install(context or "CONTEXT"))
    details = {
        "provides": part.provides, "how": release.method, "url": release.url,
        "read_on": release.read_on, "chart": release.chart, "chart_namespace": release.namespace,
        "version": part.version,
    }  # fmt: skip
    text = shlex.join(command) + "\n"
    return InstallablePart(
        name=part.label, purpose=part.purpose, text=text, command=command, details=details
    )


def _with_jobset(part: Prerequisite) -> str:
    """Return what a part serves: Trainer's chart brings JobSet if the cluster has none."""
    return f"{part.provides},{JOBSET.provides}" if part is TRAINER else part.provides


def _release(entry: LedgerEntry, api: Api) -> Release:
    """Return the release of one of our parts, at the version at which it was installed.

    Raises:
        AccessError: The ledger says otherwise than any version of this program installs it.
    """
    details = entry.details
    # A line of another cluster must not remove anything from this one.
    for part in ALL if details["context"] == str(api.context) else ():
        release = part.release
        if release is None or entry.name != f"{part.name} {details['version']}":
            continue
        then = replace(
            release,
            url=release.url.replace(part.version, details["version"]),
            version=release.version and details["version"],
        )
        wanted = (then.method, then.url, then.chart, then.namespace)
        said = tuple(details[key] for key in ("how", "url", "chart", "chart_namespace"))
        # What it provides is asked for before it is removed, as jobs of others may need it.
        if said == wanted and details["provides"] in (part.provides, _with_jobset(part)):
            return then
    raise AccessError(
        f"release {entry.name} from {details['url']} in context {details['context']!r}, which the "
        f"ledger says serves {details['provides']!r}, is not one that Shardyard installs, so it is "
        "not removed: a changed ledger could have any release deleted. If it is yours, remove it "
        "by hand with kubectl or helm."
    )


def _check_unused(entry: LedgerEntry, api: Api) -> None:
    """A controller's kind goes with it, and all objects of the kind with that."""
    for kind in entry.details.get("provides", "").split(","):
        found = api.everywhere(kind) if kind in PLURALS and api.serves(kind) else []
        if not found:
            continue
        metas = [item["metadata"] for item in found[:5]]
        names = [f"{meta.get('namespace', '')}/{meta['name']}".lstrip("/") for meta in metas]
        raise RequestError(
            f"context {api.context!r}: {entry.name} is not removed: the cluster has {len(found)} "
            f"{kind} ({', '.join(names)}), which would be deleted with it. All of it was kept. End "
            "those runs first (`shardyard cancel`, `shardyard teardown`), or ask their owners."
        )


def _create(item: dict[str, Any], api: Api, ledger: Ledger, ledger_details: dict[str, str]) -> None:
    kind, name = str(item["kind"]), str(item["metadata"]["name"])
    if kind == "Secret":
        # Only now, so that neither a dry run nor the printed YAML can hold the key.
        item = filled(item)
    create_in_ledger(
        api, item, ledger, launcher=_LAUNCHER, details=ledger_details,
        explain=lambda error: (
            f"{error} It was not made by us, so it is left as it is. Look at it with kubectl "
            f"--context {api.context} -n {api.namespace} get {PLURALS[kind][1]} {name}, and remove "
            "it; an etcd may have another name (launch.kubernetes.etcd)."
        ),
    )  # fmt: skip


def _require_program(name: str) -> None:
    if shutil.which(name) is None:
        raise RequestError(
            f"{name} is not installed here, and the release is applied with it. Install it, or "
            "run the command that --install --dry-run prints where it is."
        )


def _with_kubeconfig(argv: Sequence[str], kubeconfig: Path | None) -> list[str]:
    # eksctl asks EKS, and takes no kubeconfig for add-ons.
    asks_aws = argv[0] == "eksctl"
    return [*argv, *(["--kubeconfig", str(kubeconfig)] if kubeconfig and not asks_aws else [])]


_REFUSALS: tuple[tuple[tuple[str, ...], type[ShardyardError], str], ...] = (
    (
        ("forbidden", "Unauthorized", "must be logged in", "AccessDenied", "not authorized"),
        AccessError,
        "Installing needs an administrator of the cluster. Have one run it.",
    ),
    (
        ("Unable to connect", "unreachable", "no such host", "timed out", "timeout",
         "connection refused", "could not resolve", "TLS handshake"),
        CapacityError,
        "Check that this machine reaches the cluster and the Internet, then try again.",
    ),
)  # fmt: skip


def _run(argv: Sequence[str], *, gone: str = "") -> None:
    """Run a program.

    Args:
        gone: Words of a failure that means that what is to be removed is not there any more.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CapacityError(
            f"`{shlex.join(argv)}` has not ended after {error.timeout:g} s. Its effect is not "
            "known, and the ledger lists it. Look with `shardyard doctor`, then try again."
        ) from error
    if done.returncode == 0:
        return
    said = " ".join(done.stderr.split()) or f"no output, exit code {done.returncode}"
    if gone and gone in said:
        return
    where = f"`{shlex.join(argv)}` failed: {said.rstrip('.')}."
    for words, kind, remedy in _REFUSALS:
        if any(word.lower() in said.lower() for word in words):
            raise kind(f"{where} {remedy}")
    raise ShardyardError(
        f"{where} Part of it may be installed. Fix what it names and install again: parts that are "
        "there are kept."
    )

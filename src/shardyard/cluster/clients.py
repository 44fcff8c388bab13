"""Access to a cluster: its programs and AWS calls, its kubeconfig, and dry runs of both."""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.errors import AccessError, CapacityError, JsonFileError, RequestError, ShardyardError
from shardyard.io.aws import (
    UncertainError,
    aws_client,
    aws_session,
    error_code,
    translate_aws_errors,
)
from shardyard.io.files import make_folder, parse_json, read_json_object, write_json
from shardyard.io.yaml import read_yaml
from shardyard.launchers.ledger import Ledger
from shardyard.log import info

# What a cluster is made with and looked at: AWS, eksctl, kubectl and helm, and its folder here.

LIMIT_S = 3600.0
"""Most seconds of one program; a control plane takes 15 minutes, a group of nodes ten."""

_DESCRIPTION = "cluster.json"
_LAST_LINES = 5
_GONE = frozenset(
    {"ResourceNotFoundException", "FileSystemNotFound", "InvalidGroup.NotFound", "NoSuchEntity",
     "InvalidSubnetID.NotFound", "InvalidCapacityReservationId.NotFound",
     "ClusterNotFoundException"}
)  # fmt: skip
_GONE_IN_WORDS = frozenset({"ValidationError", "ClientException"})
"""Codes of CloudFormation and Batch for much, of which "does not exist" is one. A refusal that says
so too ("... or it does not exist") is no such code."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A cluster's folder, and what acts for it."""

    folder: Path
    spec: ClusterSpec
    owner: str
    """Id of this making: the tag of all that it made."""

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of what was made, and may still exist."""
        return Ledger(self.folder / "ledger.jsonl")

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of only this cluster; the user's own is never written."""
        return self.folder / "kubeconfig"

    @property
    def log(self) -> Path:
        """Log of the programs' output."""
        return self.folder / "programs.log"

    @cached_property
    def session(self) -> Any:
        """AWS session of the cluster's region."""
        return aws_session(self.spec.region)

    @cached_property
    def _clients(self) -> dict[str, Any]:
        return {}

    def client(self, service: str) -> Any:
        """A client of a service in the cluster's region; made once, as that reads megabytes."""
        if service not in self._clients:
            self._clients[service] = aws_client(self.session, service)
        return self._clients[service]

    def ask(self, service: str, call: str, **params: Any) -> dict[str, Any] | None:
        """The answer of AWS; None: it was asked for something that there is not.

        Raises:
            AccessError: These credentials may not ask.
            CapacityError: AWS cannot be reached, or is too busy.
            RequestError: AWS does not accept the call.
        """
        import botocore.exceptions

        method = getattr(self.client(service), call)
        with translate_aws_errors(f"ask {service} ({call})", self.spec.region):
            try:
                answer: dict[str, Any] = method(**params)
            except botocore.exceptions.ClientError as error:
                said = str(error.response.get("Error", {}).get("Message", ""))
                code, is_said = error_code(error), "does not exist" in said
                is_question = call.startswith(("describe_", "list_", "get_"))
                if is_question and (code in _GONE or (code in _GONE_IN_WORDS and is_said)):
                    return None
                raise
        return answer

    def pages(self, service: str, call: str, **params: Any) -> Iterator[dict[str, Any]]:
        """Each page of an answer, to the last.

        Raises:
            AccessError: These credentials may not ask.
            CapacityError: AWS cannot be reached, or is too busy.
            RequestError: AWS does not accept the call, or names a page as the one behind itself.
        """
        client = self.client(service)
        with translate_aws_errors(f"ask {service} ({call})", self.spec.region):
            if client.can_paginate(call):
                yield from client.get_paginator(call).paginate(**params)
            else:
                yield from _pages(getattr(client, call), params)

    def listed(self, service: str, call: str, at: str, **params: Any) -> Iterator[Any]:
        """Yield the entries of a list, from all its pages.

        Args:
            at: Where the list is in the answer, such as ``Reservations.Instances``.

        Raises:
            UncertainError: An answer has no list, which is not the same as an empty one.
            ShardyardError: It was not answered: what ``pages`` raises.
        """
        for page in self.pages(service, call, **params):
            if at.partition(".")[0] not in page:
                raise UncertainError(
                    f"{service} ({call}) in {self.spec.region} answered without a list of "
                    f"{at.partition('.')[0]}, so it is not known what is there. Look at your proxy "
                    "and AWS_ENDPOINT_URL, and run the same command again."
                )
            yield from _items_at(page, at)

    def run(self, argv: list[str]) -> str:
        """Run a program to its end; what it printed on stdout.

        Raises:
            RequestError: It is not installed here.
            AccessError: It says that these credentials may not.
            CapacityError: It says that there is no capacity, or has not ended.
            ShardyardError: It failed otherwise.
        """
        if shutil.which(argv[0]) is None:
            raise RequestError(
                f"{argv[0]} is not installed here, and the cluster is made with it. Install it, "
                "or look at what would be run with --dry-run."
            )
        info(f"running: {shlex.join(argv)}")
        # helm's variables would name another cluster than its kubeconfig.
        ours = {key: value for key, value in os.environ.items() if not key.startswith("HELM_KUBE")}
        environment = {**ours, "KUBECONFIG": str(self.kubeconfig)}
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(argv)}\n".encode())
            log.flush()
            try:
                done = subprocess.run(
                    argv, stdin=subprocess.DEVNULL, capture_output=True,
                    env=environment, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise CapacityError(
                    f"`{shlex.join(argv)}` has not ended after {LIMIT_S / 60:.0f} minutes. Look at "
                    f"{self.log} and at `shardyard cluster show`; the same command continues."
                ) from error
            log.write(done.stdout + done.stderr)
        if done.returncode:
            raise _failed(argv, done.stdout + b"\n" + done.stderr, self.log)
        return done.stdout.decode(errors="replace")


def _pages(method: Any, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pages of a call whose pages botocore does not know."""
    token: dict[str, Any] = {}
    while True:
        answer: dict[str, Any] = method(**params, **token)
        yield answer
        behind = {key: answer[key] for key in ("NextToken", "nextToken") if answer.get(key)}
        if not behind:
            return
        if behind == token:
            raise RequestError(
                f"a page of {method.__name__} names itself as the page behind it, so the list has "
                "no end. Look at your proxy and AWS_ENDPOINT_URL, and run the same command again."
            )
        token = behind


def _items_at(answer: dict[str, Any], path: str) -> Iterator[Any]:
    first, _, rest = path.partition(".")
    for item in answer.get(first, []):
        if rest:
            yield from _items_at(item, rest)
        else:
            yield item


def _failed(argv: list[str], output: bytes, log: Path) -> ShardyardError:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    said = " ".join(lines[-_LAST_LINES:]) or "nothing"
    where = f"`{shlex.join(argv)}` failed: {said} ({log})."
    words = said.lower()
    if any(
        word in words for word in ("accessdenied", "unauthorized", "forbidden", "not authorized")
    ):
        return AccessError(
            f"{where} Your credentials lack a permission. Ask the administrator of the account to "
            "add it."
        )
    if any(word in words for word in ("insufficientinstancecapacity", "limitexceeded", "quota")):
        return CapacityError(
            f"{where} Wait, take another zone, reserve capacity, or have the account's quota "
            "raised; then run the same command again: what is there is kept."
        )
    return ShardyardError(
        f"{where} Fix what it names and run the same command again: what exists already is kept."
    )


def folder_of(spec: ClusterSpec, clusters: Path) -> Path:
    """Return the folder of a cluster's files; each region may have one of the name."""
    return clusters / f"{spec.name}.{spec.region}"


def spec_file(folder: Path) -> Path:
    """The file that says what a cluster's folder is of."""
    return folder / _DESCRIPTION


def new_world(spec: ClusterSpec, clusters: Path) -> World:
    """The folder of a cluster that is to be made, or of the one that was begun here.

    Raises:
        RequestError: Another cluster of this name was made from here, by another description.
    """
    folder = folder_of(spec, clusters)
    owner = secrets.token_hex(8)
    if (folder / _DESCRIPTION).exists():
        world = world_at(folder)
        if world.spec == spec:
            return world
        if world.ledger.live():
            raise RequestError(
                f"{folder} belongs to a cluster with another description. Give the description "
                f"that it was made with, {folder / _DESCRIPTION}. To change the number of nodes "
                "use `shardyard cluster scale`; for anything else delete it first."
            )
        owner = world.owner  # nothing of it is there, so it may be described anew
    make_folder(folder)
    content = {
        "owner": owner,
        "is_adopted": isinstance(spec, AdoptedCluster),
        "cluster": spec.model_dump(mode="json"),
    }
    write_json(folder / _DESCRIPTION, content)
    return World(folder=folder, spec=spec, owner=owner)


def world_named(name: str, clusters: Path) -> World:
    """The cluster of this name that was made from here.

    Args:
        name: ``trainers``, or ``trainers.us-east-1`` where there are several.

    Raises:
        RequestError: There is none, or there are several.
    """
    folders = sorted(path.parent for path in clusters.glob(f"*/{_DESCRIPTION}"))
    found = [folder for folder in folders if name in (folder.name, folder.name.partition(".")[0])]
    if len(found) == 1:
        return world_at(found[0])
    names = ", ".join(folder.name for folder in found or folders)
    if found:
        raise RequestError(f"{clusters} has several clusters {name}. Name one of {names}.")
    hint = f"There are {names}." if names else "None exists."
    raise RequestError(
        f"no cluster {name} was made from here, says the folder {clusters}. {hint} Give another "
        "folder with --dir."
    )


def _reason(error: Exception) -> str:
    return f"it {error.reason}" if isinstance(error, JsonFileError) else str(error)


def world_at(folder: Path) -> World:
    """A cluster that was begun here.

    Raises:
        RequestError: Its file is none that was written here.
    """
    path = folder / _DESCRIPTION
    try:
        content = read_json_object(path)
        kind = AdoptedCluster if content.get("is_adopted") else ClusterSpec
        spec = kind.model_validate(content["cluster"])
        owner = content["owner"]
        if not (isinstance(owner, str) and len(bytes.fromhex(owner)) == 8):
            raise ValueError(f"owner={owner!r}")
        if folder.name != f"{spec.name}.{spec.region}":
            raise ValueError(f"it describes {spec.name} in {spec.region}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} is not a description of a cluster: {_reason(error)}. Shardyard removes only "
            "what this file names, and does not guess. Restore it from a copy; all that was made "
            "has the tag shardyard-cluster."
        ) from error
    return World(folder=folder, spec=spec, owner=owner)


# How kubectl and helm reach a cluster: by a kubeconfig of this very cluster, or not at all.
#
# A kubeconfig of another cluster would show no pods where some run, and change what is not ours. So
# before each program EKS is asked where the cluster answers, and the file has to say the same.

_NOT_ANSWERING = ("CREATING", "DELETING")


def kubectl_json(world: World, *words: str) -> dict[str, Any] | None:
    """Return what kubectl gets; None: there is no such object, or no cluster.

    Raises:
        RequestError: The kubeconfig names another cluster.
    """
    cluster = reachable_cluster(world)
    if cluster is None:
        return None
    text = _run(world, cluster, ("kubectl", "get", *words, "--ignore-not-found", "-o", "json"))
    result: dict[str, Any] | None = parse_json(text) if text.strip() else None
    return result


def in_cluster(world: World, argv: tuple[str, ...]) -> str:
    """Run kubectl or helm against only this cluster, and return its output.

    Raises:
        RequestError: The kubeconfig names another cluster.
        ShardyardError: There is no cluster, or the program failed.
    """
    spec = world.spec
    cluster = reachable_cluster(world)
    if cluster is None:
        raise ShardyardError(
            f"EKS finds no active cluster {spec.name} in {spec.region}, so `{argv[0]}` was not "
            f"run. Look with `shardyard cluster show {spec.name}`."
        )
    return _run(world, cluster, argv)


def _run(world: World, cluster: dict[str, Any], argv: tuple[str, ...]) -> str:
    spec = world.spec
    if not world.kubeconfig.exists():
        info(f"{world.kubeconfig} is missing; it is written again")
        world.run(
            ["eksctl", "utils", "write-kubeconfig", "--cluster", spec.name,
             "--region", spec.region, "--kubeconfig", str(world.kubeconfig)]
        )  # fmt: skip
    _check_same_cluster(world, cluster)
    return world.run([*argv, "--kubeconfig", str(world.kubeconfig)])


def reachable_cluster(world: World) -> dict[str, Any] | None:
    """Ask EKS for the cluster of this name; None: it is missing, or does not answer yet."""
    answer = world.ask("eks", "describe_cluster", name=world.spec.name)
    if answer is None or answer["cluster"]["status"] in _NOT_ANSWERING:
        return None
    cluster: dict[str, Any] = answer["cluster"]
    return cluster if cluster.get("endpoint") else None


def _check_same_cluster(world: World, cluster: dict[str, Any]) -> None:
    named, wanted = _server(world), str(cluster["endpoint"])
    if named.rstrip("/").lower() == wanted.rstrip("/").lower():
        return
    account = account_of(str(cluster.get("arn", "")))
    raise RequestError(
        f"{world.kubeconfig} names {named or 'no cluster'}, but {world.spec.name} of account "
        f"{account} in {world.spec.region} answers at {wanted}: the file belongs to another "
        "cluster, or to one that was deleted. No request was sent there. Move the file away and "
        "run the same command again, which writes a new one."
    )


def _server(world: World) -> str:
    """The server that the file's current context names; empty: none."""
    try:
        config = _kubeconfig(world)
        contexts = {one["name"]: one["context"] for one in config["contexts"]}
        clusters = {one["name"]: one["cluster"] for one in config["clusters"]}
        server = clusters[contexts[config["current-context"]]["cluster"]]["server"]
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return ""
    return str(server)


def context_of(world: World) -> str:
    """The current context of the cluster's kubeconfig; empty: there is none."""
    try:
        return str(_kubeconfig(world)["current-context"])
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return ""


def _kubeconfig(world: World) -> Any:
    text = world.kubeconfig.read_text(encoding="utf-8")
    return read_yaml(text, source=str(world.kubeconfig))


def account_of(arn: str) -> str:
    """The account that an ARN names; empty: none."""
    parts = arn.split(":")
    return parts[4] if len(parts) > 5 else ""


def check_same_account(world: World) -> None:
    """Check the account, so that a cluster in another account does not count as gone.

    Raises:
        AccessError: The credentials are of another account than the cluster was made with.
    """
    made = {entry.details["account"] for entry in world.ledger.all() if "account" in entry.details}
    if not made:
        return
    answer = world.ask("sts", "get_caller_identity") or {}
    account = str(answer.get("Account", ""))
    if made == {account}:
        return
    raise AccessError(
        f"{world.spec.name} was made in account {', '.join(sorted(made))}, says "
        f"{world.ledger.path}, and these credentials are of account {account}, which do not see "
        "it. No change was made. Use credentials of that account (AWS_PROFILE), and check with "
        "`aws sts get-caller-identity`."
    )


_INSIDE = ("kubectl", "helm")
"""Programs that speak to the cluster of a kubeconfig."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Either a program or a call."""

    argv: tuple[str, ...] = ()
    """Arguments of kubectl and helm, without ``--kubeconfig``."""
    service: str = ""
    call: str = ""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def words(self, world: World) -> str:
        """The command that does it; of a call, that of AWS's command line."""
        if self.argv:
            return shlex.join(self._whole(world))
        words = ["aws", self.service, self.call.replace("_", "-"), "--region", world.spec.region]
        for name, value in self.params.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{_with_hyphens(name)}", text]
        return shlex.join(words)

    def do(self, world: World) -> None:
        """Do it, in the cluster itself only where the kubeconfig is this cluster's."""
        if not self.argv:
            world.ask(self.service, self.call, **self.params)
        elif self.argv[0] in _INSIDE:
            in_cluster(world, self.argv)
        else:
            world.run(self._whole(world))

    def _whole(self, world: World) -> list[str]:
        kubeconfig = str(world.kubeconfig)
        return [*self.argv, *(("--kubeconfig", kubeconfig) if self.argv[0] in _INSIDE else ())]


def program(*argv: str) -> Act:
    """A program and its arguments."""
    return Act(argv=argv)


def _with_hyphens(name: str) -> str:
    """``stack-name`` of ``StackName``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()

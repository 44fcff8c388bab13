"""Requests to AWS Batch for a run: its job definition and the submission, as plain values.

A multi-node parallel job has one container on each of its instances; all are described by
one node range, ``0:``. Numbers of devices come from the catalogue of instances, never from
the recipe. A side job is a job of one container, on whatever instance its queue has.
"""

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.errors import LostNodeError, RequestError
from shardyard.hardware import nvidia
from shardyard.hardware.catalogue import Instance, instance
from shardyard.image.dockerfile import USER_ID
from shardyard.launchers.base import LaunchRequest
from shardyard.own_processes import ISOLATED
from shardyard.units import format_seconds

LOG_GROUP = "/aws/batch/job"
"""Default log group to which Batch sends what containers print."""

RUN_TAG = "shardyard-run"
ORIGIN_TAG = "shardyard-origin"
"""Tag with the submission, and its run, that made the object."""

RECIPE_VARIABLE = "SHARDYARD_RECIPE"
"""Carries the recipe as it is, for node/env_entry.py."""

MAX_DEFINITION_BYTES = 24 * 1024
"""Limit on RegisterJobDefinition. Source: AWS Batch User Guide, Service quotas."""

MEMORY_SHARE = 0.9
"""Share of an instance's memory for the job; the rest is the kernel's and the ECS agent's.

EKS can allocate 91.8 % of a p4d.24xlarge and 92.4 % of a p5.48xlarge; a job that asks for
more never starts.
"""

MIN_TIME_LIMIT_S = 60
"""Shortest time limit of a job attempt. Source: RegisterJobDefinition, JobTimeout."""

# Batch reads at most five rules, from the top. It retries a job that none of them names, so the
# last two name everything. It never retries jobs that were terminated or ran out of time.
RETRY_RULES: tuple[dict[str, str], ...] = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the instance is gone
    {"onExitCode": "143", "action": "RETRY"},  # drained by the host's shutdown
    # Batch starts a job again only when its main node fails; that is how it says: a child is lost.
    {"onExitCode": str(LostNodeError.exit_code), "action": "RETRY"},
    {"onStatusReason": "*", "action": "EXIT"},
    {"onReason": "*", "action": "EXIT"},
)

_DEVICE_RIGHTS = ["READ", "WRITE", "MKNOD"]
"""All that a device has where none are given, and what AWS's own samples for EFA give."""


NAME_BEGINS = "shardyard-"
"""Begins all names, so that a policy and a search can mean those of this program."""
_LONGEST_NAME = 128


def job_name(run_id: str, submission: int = 1, *, side_suffix: str = "") -> str:
    """Return the name of job and job definition.

    It has letters, digits, hyphens and underscores, at most 128. It starts with ``shardyard-``,
    so that a policy can name the job definitions of this program. From the second submission of
    a run on it ends with its number. A side job's ends with a unique suffix, so that the
    beginning of a long run's name is enough.
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "_", run_id)
    if name != run_id:  # two ids must not become one name
        name += "-" + hashlib.sha256(run_id.encode()).hexdigest()[:8]
    if side_suffix:
        return f"{NAME_BEGINS}{name}"[: _LONGEST_NAME - len(side_suffix)] + side_suffix
    suffix = "" if submission == 1 else f"-s{submission}"
    return f"{NAME_BEGINS}{name}{suffix}"


def job_definition(request: LaunchRequest) -> dict[str, Any]:
    """Parameters of RegisterJobDefinition.

    Raises:
        RequestError: The recipe asks for something that Batch cannot do.
    """
    recipe = request.recipe
    _check(request)
    params: dict[str, Any] = {
        "jobDefinitionName": _name(request),
        **_nodes(request),
        "retryStrategy": {
            "attempts": recipe.launch.aws_batch.attempts,
            "evaluateOnExit": [dict(rule) for rule in RETRY_RULES],
        },
        "propagateTags": True,
        "tags": _tags(request),
    }
    if request.time_limit_s is not None:
        params["timeout"] = {"attemptDurationSeconds": _checked_limit_s(request.time_limit_s)}
    _check_size(params)
    return params


def _nodes(request: LaunchRequest) -> dict[str, Any]:
    if request.side is not None:
        return {"type": "container", "containerProperties": _container(request)}
    return {
        "type": "multinode",
        "nodeProperties": {
            "numNodes": request.nodes,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:", "container": _container(request)}],
        },
    }


def job_submission(request: LaunchRequest) -> dict[str, Any]:
    """Parameters of SubmitJob.

    Raises:
        RequestError: No queue is named.
    """
    aws_batch = request.recipe.launch.aws_batch
    queue = aws_batch.queue if request.side is None else aws_batch.side_queue or aws_batch.queue
    if queue is None:
        raise RequestError(
            "launch.aws_batch.queue is not given. A job waits in a queue, which brings it to "
            "instances. Name one: `aws batch describe-job-queues` lists yours, and "
            "docs/launch-aws-batch.md shows how to make one."
        )
    name = _name(request)
    share = {
        "shareIdentifier": aws_batch.share_identifier,
        "schedulingPriorityOverride": aws_batch.scheduling_priority,
    }
    return {
        "jobName": name,
        "jobQueue": queue,
        "jobDefinition": name,
        **{key: value for key, value in share.items() if value is not None},
        "propagateTags": True,
        "tags": _tags(request),
    }


def _tags(request: LaunchRequest) -> dict[str, str]:
    origin = {ORIGIN_TAG: request.origin} if request.origin else {}
    given = {**request.recipe.run.tags, **request.recipe.launch.aws_batch.tags}
    return {**given, RUN_TAG: request.run_id, **origin}


_HOW_ACCESS_POINT = (
    "Make one, `aws efs create-access-point --file-system-id {efs} --posix-user "
    f"Uid={USER_ID},Gid={USER_ID} --root-directory "
    f"'Path=/shardyard,CreationInfo={{{{OwnerUid={USER_ID},OwnerGid={USER_ID},"
    "Permissions=0755}}'`, "
    "and give its access_point: fsap-... together with efs."
)


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return warnings about settings that you may regret."""
    launch, run_dir = request.recipe.launch, PurePosixPath(request.run_dir)
    whole = tuple(
        f"launch.volumes[{number}] mounts all of EFS {volume.efs} without an access point, as the "
        "user of the container: in an image that names none that is root, who may change what "
        f"everybody keeps there; the user {USER_ID} of our own images may write nowhere unless it "
        f"was given a folder. {_HOW_ACCESS_POINT.format(efs=volume.efs)}"
        for number, volume in enumerate(launch.volumes)
        if volume.efs is not None and volume.access_point is None
    )
    if any(run_dir.is_relative_to(volume.path) for volume in launch.volumes):
        return whole
    return (
        *whole,
        f"{request.run_dir} is on none of launch.volumes. A container's own files end with it, and "
        "its checkpoints with them. Mount a file system that all nodes share, such as "
        "launch.volumes=[{path: /runs, efs: fs-0123456789abcdef0}], and set launch.run_dir to a "
        "folder on it.",
    )


def _name(request: LaunchRequest) -> str:
    return job_name(request.run_id, request.submission, side_suffix=request.side_suffix)


def chosen_instance(recipe: Recipe) -> Instance | None:
    """The instance type that the recipe names; None: any that the queue has."""
    name = recipe.cluster.instance
    return None if name is None else instance(name)


def has_gpus(machine: Instance) -> bool:
    """Whether its devices are what Batch counts as GPUs: NVIDIA's."""
    return machine.accelerator in nvidia.ROWS


def has_gaudi(machine: Instance) -> bool:
    """Whether its devices are Intel's Gaudi."""
    return machine.accelerator.device == "hpu"


def container_vcpus(recipe: Recipe) -> int:
    """VCPUs of one container.

    Raises:
        RequestError: Neither the recipe nor the catalogue says it.
    """
    asked, machine = recipe.launch.aws_batch.vcpus, chosen_instance(recipe)
    if asked is not None:
        return asked
    if machine is None:
        raise RequestError(_UNSIZED.format(what="vcpus"))
    return machine.vcpus


_UNSIZED = (
    "launch.aws_batch.{what} is not given, nor is cluster.instance. Batch places a container by "
    "the VCPUs and memory that it asks for. Name an EC2 type with cluster.instance, or for a run "
    "on CPUs give launch.aws_batch.vcpus and launch.aws_batch.memory_gib."
)


def _container(request: LaunchRequest) -> dict[str, Any]:
    recipe, machine = request.recipe, _machine(request)
    aws_batch = recipe.launch.aws_batch
    memory_mib = _memory_mib(request)
    container: dict[str, Any] = {
        "image": recipe.launch.image,
        "command": _command(request),
        "environment": _environment(request),
        "secrets": _secrets(recipe),
        "resourceRequirements": _resources(request, memory_mib),
        "linuxParameters": {
            # A larger /dev/shm could not be filled: its pages count as the container's memory.
            "sharedMemorySize": min(aws_batch.shared_memory_gib * 1024, memory_mib),
            # Python as process 1 would not reap orphans of its workers, which stay as zombies.
            "initProcessEnabled": True,
            "devices": _devices(machine),
        },
        # EFA pins the memory that it sends from, beyond any usual limit.
        "ulimits": [{"name": "memlock", "softLimit": -1, "hardLimit": -1}],
        **_volumes(recipe),
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": aws_batch.log_group,
                "awslogs-stream-prefix": _name(request),
            },
        },
    }
    if aws_batch.job_role is not None:
        container["jobRoleArn"] = aws_batch.job_role
    if aws_batch.execution_role is not None:
        container["executionRoleArn"] = aws_batch.execution_role
    if machine is not None:
        # Batch takes one type for all nodes of a multi-node job.
        container["instanceType"] = machine.name
    return container


def _machine(request: LaunchRequest) -> Instance | None:
    """The type that the container must be on; a side job may be on any."""
    return None if request.side is not None else chosen_instance(request.recipe)


def _command(request: LaunchRequest) -> list[str]:
    words = ["python", *ISOLATED, "shardyard.node.env_entry"]
    if request.side is not None:
        return [*words, "--side", request.side.to_text(), "--run-dir", request.run_dir]
    return [*words, "--place", "aws-batch", "--run-dir", request.run_dir]


def _environment(request: LaunchRequest) -> list[dict[str, str]]:
    values = request.environment
    values[RECIPE_VARIABLE] = request.recipe_text
    machine = _machine(request)
    if machine is not None and has_gaudi(machine):
        # Habana's container runtime reads it. A value in launch.env counts more.
        values.setdefault("HABANA_VISIBLE_DEVICES", "all")
    return [{"name": name, "value": values[name]} for name in sorted(values)]


def _secrets(recipe: Recipe) -> list[dict[str, str]]:
    """Names and places of secrets; Batch reads the values when it starts a container."""
    found, wrong = [], []
    for name, reference in parse_references(recipe.secrets).items():
        place = reference.name or name
        if reference.kind == "ssm":  # a name means the job's own region
            found.append({"name": name, "valueFrom": place})
        elif reference.kind == "aws-sm" and place.startswith("arn:"):
            # After the key come a version's stage and id; empty means the current one.
            suffix = f":{reference.key}::" if reference.key else ""
            found.append({"name": name, "valueFrom": place + suffix})
        elif reference.kind == "aws-sm":
            wrong.append(
                f"secrets.{name}=aws-sm:{place} is a name. Batch would look for an SSM parameter "
                "of that name. Give the secret's ARN; `aws secretsmanager describe-secret "
                "--secret-id NAME` prints it."
            )
        else:
            wrong.append(
                f"secrets.{name} is kept in {reference.kind}, which a Batch job cannot read. Put "
                "it into Secrets Manager (aws-sm:ARN) or the SSM Parameter Store (ssm:NAME)."
            )
    if found and recipe.launch.aws_batch.execution_role is None:
        wrong.append(
            f"secrets.{found[0]['name']}: launch.aws_batch.execution_role is not given. Batch "
            "reads secrets as that role. Name a role that may read these secrets and no others."
        )
    if wrong:
        raise RequestError("\n".join(wrong))
    return found


def _resources(request: LaunchRequest, memory_mib: int) -> list[dict[str, str]]:
    machine, side = _machine(request), request.recipe.launch.side
    vcpus = container_vcpus(request.recipe) if request.side is None else side.cpus
    resources = [
        {"type": "VCPU", "value": str(vcpus)},
        {"type": "MEMORY", "value": str(memory_mib)},
    ]
    if machine is not None and has_gpus(machine):
        resources.append({"type": "GPU", "value": str(machine.count)})
    return resources


def _memory_mib(request: LaunchRequest) -> int:
    if request.side is not None:
        return request.recipe.launch.side.memory_gib * 1024
    asked, machine = request.recipe.launch.aws_batch.memory_gib, chosen_instance(request.recipe)
    if asked is not None:
        return asked * 1024
    if machine is None:
        raise RequestError(_UNSIZED.format(what="memory_gib"))
    return int(machine.host_memory_bytes * MEMORY_SHARE) // 2**20


def _devices(machine: Instance | None) -> list[dict[str, Any]]:
    """Return the device files other than the GPUs, which Batch maps itself."""
    if machine is None:
        return []
    paths = [f"/dev/infiniband/uverbs{number}" for number in range(machine.efa_count)]
    if has_gaudi(machine):
        for number in range(machine.count):
            paths += [f"/dev/accel/accel{number}", f"/dev/accel/accel_controlD{number}"]
    return [
        {"hostPath": path, "containerPath": path, "permissions": list(_DEVICE_RIGHTS)}
        for path in paths
    ]


def _volumes(recipe: Recipe) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, volume in enumerate(recipe.launch.volumes):
        where, name = f"launch.volumes[{number}]", f"volume-{number}"
        kinds = [kind for kind in ("claim", "efs", "host") if getattr(volume, kind) is not None]
        if kinds == ["efs"]:
            efs: dict[str, Any] = {"fileSystemId": volume.efs, "transitEncryption": "ENABLED"}
            if volume.access_point is not None:
                # ECS accepts an access point only with encryption in transit.
                efs["authorizationConfig"] = {"accessPointId": volume.access_point}
            volumes.append({"name": name, "efsVolumeConfiguration": efs})
        elif kinds == ["host"]:
            volumes.append({"name": name, "host": {"sourcePath": volume.host}})
        else:
            said = " and ".join(kinds) if kinds else "no file system"
            raise RequestError(
                f"{where} names {said}. A Batch job mounts one EFS file system or one folder of "
                "its instances. Give efs: fs-..., or host: /path for what the launch template "
                "mounts there (FSx for Lustre, local disks)."
            )
        mounts.append({"sourceVolume": name, "containerPath": volume.path, "readOnly": False})
    return {"volumes": volumes, "mountPoints": mounts}


def _checked_limit_s(limit_s: float) -> int:
    # Rounded down: the rest of a capacity block must not become longer.
    seconds = int(limit_s)
    if seconds < MIN_TIME_LIMIT_S:
        raise RequestError(
            f"launch.time_limit={format_seconds(seconds)} is less than {MIN_TIME_LIMIT_S} s, the "
            "least that Batch accepts. Give a longer one."
        )
    return seconds


def _check(request: LaunchRequest) -> None:
    recipe, machine = request.recipe, _machine(request)
    if recipe.launch.image is None:
        raise RequestError(
            "launch.image is not given. Batch runs containers. Name an image that holds Shardyard "
            "and your requirements, best by digest (name@sha256:...)."
        )
    if recipe.launch.code:
        raise RequestError(
            f"launch.code={list(recipe.launch.code)}: a Batch job carries no files. Put the code "
            "into the image (FROM the one that `shardyard image build` makes, COPY it, set "
            "PYTHONPATH)."
        )
    if request.side is not None:
        return
    if recipe.cluster.file is not None:
        raise RequestError(
            f"cluster.file={recipe.cluster.file!r} describes machines of your own, and Batch rents "
            "EC2 instances. Name their type with cluster.instance."
        )
    if recipe.cluster.capacity == "spot":
        raise RequestError(
            "cluster.capacity=spot: Batch runs no multi-node job on Spot instances. Use on-demand, "
            "a reservation or a capacity block, or launch on Kubernetes."
        )
    if machine is not None and request.devices_per_node > machine.count:
        raise RequestError(
            f"cluster.devices={request.devices_per_node}, but {machine.name} has {machine.count}. "
            f"Use {machine.count} or fewer."
        )
    most = recipe.elastic.max_nodes
    if isinstance(most, int) and most > request.nodes:
        raise RequestError(
            f"elastic.max_nodes={most}, but a Batch job keeps the {request.nodes} nodes that it "
            "starts with. Leave max_nodes out, or give cluster.nodes their final number."
        )


def _check_size(params: dict[str, Any]) -> None:
    size_bytes = len(json.dumps(params, separators=(",", ":")).encode())
    if size_bytes > MAX_DEFINITION_BYTES:
        raise RequestError(
            f"the job definition takes {size_bytes:,} bytes, and Batch accepts "
            f"{MAX_DEFINITION_BYTES:,}. The recipe and launch.env travel in it. Shorten them: put "
            "long lists into files of the image, or on a volume."
        )

"""Whether a queue can run a job: asked before anything is created."""

from collections.abc import Mapping
from typing import Any

from shardyard.errors import CapacityError, RequestError
from shardyard.io.aws import translate_aws_errors


def check_queue(batch: Any, name: str, definition: Mapping[str, Any]) -> None:
    """Reject a queue in which the job would wait for ever.

    Args:
        batch: A client of AWS Batch.
        definition: Parameters of RegisterJobDefinition.

    Raises:
        RequestError: The queue is missing, disabled, or of a kind without such jobs.
        CapacityError: Its compute environments are too small.
    """
    setting = _setting(definition)
    queue = queue_named(batch, name, setting=setting)
    if queue.get("state") == "DISABLED":
        raise RequestError(
            f"{setting}={name!r} is disabled and takes no jobs. Enable it (`aws batch "
            "update-job-queue --state ENABLED`), or name another."
        )
    if queue.get("status") in ("DELETING", "DELETED", "INVALID"):
        raise RequestError(
            f"{setting}={name!r} is {queue['status']}: "
            f"{queue.get('statusReason', 'Batch gives no reason')}. Fix it, or name another."
        )
    environments = environments_of(batch, queue)
    reasons = [reason for one in environments if (reason := _mismatch_reason(one, definition))]
    # One environment that fits is enough, since Batch tries them in order.
    if environments and len(reasons) == len(environments):
        raise RequestError(
            f"{setting}={name!r} cannot run this job. {' '.join(reasons)} "
            "docs/launch-aws-batch.md shows how to make one that can."
        )
    _check_size(name, environments, definition)


def queue_named(
    batch: Any, name: str, *, setting: str = "launch.aws_batch.queue"
) -> dict[str, Any]:
    """Return DescribeJobQueues' answer on a queue.

    Args:
        setting: The setting that gives the name.

    Raises:
        RequestError: There is none of that name.
    """
    region = batch.meta.region_name
    with translate_aws_errors("look for the job queue", region):
        queues: list[dict[str, Any]] = batch.describe_job_queues(jobQueues=[name])["jobQueues"]
        if queues:
            return queues[0]
        others = [queue["jobQueueName"] for queue in batch.describe_job_queues()["jobQueues"]]
    raise RequestError(
        f"{setting}={name!r} does not exist in {region}. "
        + (f"There is {', '.join(sorted(others)[:10])}." if others else "No queue does.")
        + " Name another, set launch.aws_batch.region, or make it: docs/launch-aws-batch.md."
    )


def environments_of(batch: Any, queue: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return DescribeComputeEnvironments' answer on a queue's own environments."""
    names = [row["computeEnvironment"] for row in queue.get("computeEnvironmentOrder", [])]
    if not names:
        return []
    with translate_aws_errors("look at the compute environments", batch.meta.region_name):
        answer = batch.describe_compute_environments(computeEnvironments=names)
    environments: list[dict[str, Any]] = answer["computeEnvironments"]
    return environments


def _mismatch_reason(environment: Mapping[str, Any], definition: Mapping[str, Any]) -> str | None:
    """Why a compute environment cannot run the job; None if it can."""
    name = environment["computeEnvironmentName"]
    resources = environment.get("computeResources") or {}
    if environment.get("state") == "DISABLED":
        return f"Its compute environment {name} is disabled."
    if environment.get("status") == "INVALID":
        return f"Its compute environment {name} is INVALID: {environment.get('statusReason', '')}."
    kind = resources.get("type", "EC2")
    if "nodeProperties" not in definition:  # a side job
        return _container_mismatch(name, kind)
    if environment.get("type") == "UNMANAGED":
        return f"Its compute environment {name} is unmanaged; multi-node jobs need a managed one."
    if kind != "EC2":
        return (
            f"Its compute environment {name} is of type {kind}; multi-node jobs need EC2 on demand."
        )
    wanted = container_of(definition).get("instanceType")
    types = resources.get("instanceTypes") or []
    if wanted and types and not _includes_type(types, wanted):
        return f"Its compute environment {name} has {', '.join(types)}, not {wanted}."
    return None


def _container_mismatch(name: str, kind: str) -> str | None:
    if kind in ("EC2", "SPOT"):
        return None
    return (
        f"Its compute environment {name} is of type {kind}; a side job needs EC2, whose containers "
        "mount what the training's do. Name such a queue with launch.aws_batch.side_queue."
    )


def _includes_type(types: list[str], requested: str) -> bool:
    """Return whether types include one: a family has all its sizes, ``optimal`` AWS's choice."""
    return bool({requested, requested.partition(".")[0], "optimal"} & set(types))


def _check_size(
    name: str, environments: list[dict[str, Any]], definition: Mapping[str, Any]
) -> None:
    setting = _setting(definition)
    nodes = definition.get("nodeProperties", {}).get("numNodes", 1)
    wanted = int(nodes) * _vcpus(definition)
    most = [
        int(size)
        for environment in environments
        # Unmanaged environments have no maxvCpus.
        if (size := (environment.get("computeResources") or {}).get("maxvCpus")) is not None
    ]
    if most and max(most) < wanted:
        raise CapacityError(
            f"{setting}={name!r} has at most {max(most)} vCPUs (maxvCpus), and the "
            f"job needs {wanted}. It would wait for ever. Raise maxvCpus of the compute "
            "environment, or use fewer nodes."
        )


def container_of(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one description of its containers."""
    if "containerProperties" in definition:
        properties: Mapping[str, Any] = definition["containerProperties"]
        return properties
    container: Mapping[str, Any] = definition["nodeProperties"]["nodeRangeProperties"][0][
        "container"
    ]
    return container


def _setting(definition: Mapping[str, Any]) -> str:
    """Return the setting that can name another queue."""
    is_side = "containerProperties" in definition
    return "launch.aws_batch.side_queue" if is_side else "launch.aws_batch.queue"


def _vcpus(definition: Mapping[str, Any]) -> int:
    for row in container_of(definition)["resourceRequirements"]:
        if row["type"] == "VCPU":
            return int(row["value"])
    return 1

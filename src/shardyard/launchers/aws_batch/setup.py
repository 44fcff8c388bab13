"""What a queue for multi-node jobs needs: placement group, launch template, environment, queue.

Never made by a launch: it belongs to the account, not to a run. Run as a program, prints the
commands that make it, in their order, to read and to run; remove it the other way round.
"""

import base64
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardyard.config.check import load_checked_recipe
from shardyard.config.load import is_override
from shardyard.config.schema import Recipe
from shardyard.errors import RequestError, ShardyardError
from shardyard.hardware.catalogue import Instance
from shardyard.launchers.aws_batch.objects import (
    chosen_instance,
    container_vcpus,
    has_gaudi,
    has_gpus,
)

IMAGE_TYPE = "ECS_AL2023_NVIDIA"
CPU_IMAGE_TYPE = "ECS_AL2023"
"""Of compute environments. Source: CreateComputeEnvironment, Ec2Configuration."""

WITHOUT_DRIVERS = ("p3", "g3", "dl1")
"""Families that IMAGE_TYPE has no drivers for."""

DISK_GIB = 200
"""Root disk of an instance: the image, and what a run writes outside its volumes."""

STOP_MARGIN_S = 30
"""Seconds between the end of a drain and the kill."""

# After so many seconds at the head of the queue a job that cannot start is cancelled, where it
# would wait for ever. 600 and 86,400 are the least and the most that Batch accepts.
_LONGEST_WAITS_S = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": 86400,
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": 600,
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": 600,
}


def prerequisites(recipe: Recipe) -> list[dict[str, Any]]:
    """Calls that make a queue for this run and others like it, in their order.

    Raises:
        RequestError: Settings are missing, or Batch cannot do it.
    """
    machine = _checked_instance(recipe)
    queue = recipe.launch.aws_batch.queue
    return [
        {"service": "ec2", "call": "CreatePlacementGroup",
         "params": {"GroupName": f"{queue}-group", "Strategy": "cluster"}},
        {"service": "ec2", "call": "CreateLaunchTemplate",
         "params": _launch_template(recipe, machine, name=f"{queue}-template")},
        {"service": "batch", "call": "CreateComputeEnvironment",
         "params": _compute_environment(recipe, machine)},
        {"service": "batch", "call": "CreateJobQueue", "params": _job_queue(str(queue))},
    ]  # fmt: skip


def commands(calls: Sequence[dict[str, Any]], region: str | None) -> str:
    """The calls as commands of the AWS CLI, one a line."""
    place = [] if region is None else ["--region", region]
    lines = []
    for call in calls:
        verb = re.sub(r"(?<!^)(?=[A-Z])", "-", call["call"]).lower()
        words = ["aws", call["service"], verb, *place, "--cli-input-json"]
        lines.append(shlex.join([*words, json.dumps(call["params"])]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """`python -m shardyard.launchers.aws_batch.setup RECIPE...`: files and section.key=value."""
    files = [Path(word) for word in arguments if not is_override(word)]
    overrides = [word for word in arguments if is_override(word)]
    try:
        recipe = load_checked_recipe(files, overrides)
        print(commands(prerequisites(recipe), recipe.launch.aws_batch.region), end="")
    except ShardyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _checked_instance(recipe: Recipe) -> Instance:
    aws_batch, machine = recipe.launch.aws_batch, chosen_instance(recipe)
    missing = [
        f"launch.aws_batch.{name}"
        for name in ("queue", "subnets", "security_groups", "instance_role")
        if not getattr(aws_batch, name)
    ]
    if machine is None:
        missing.insert(0, "cluster.instance")
    if machine is None or missing:
        raise RequestError(
            f"{', '.join(missing)} not given. A compute environment starts instances of one type, "
            "in a subnet, with a role and security groups of yours. Give them."
        )
    if len(aws_batch.subnets) > 1:
        raise RequestError(
            f"launch.aws_batch.subnets has {len(aws_batch.subnets)}. A cluster placement group "
            "lies in one zone, and nodes in several would be slow to reach. Name one subnet."
        )
    if machine.name.partition(".")[0] in WITHOUT_DRIVERS and aws_batch.ami is None:
        raise RequestError(
            f"cluster.instance={machine.name!r}: Batch's own image {IMAGE_TYPE} has no drivers for "
            f"{machine.accelerator.name}. Name an ECS image that has, with launch.aws_batch.ami"
            + ("; its Docker must have habana as default runtime." if has_gaudi(machine) else ".")
        )
    return machine


def _launch_template(recipe: Recipe, machine: Instance, *, name: str) -> dict[str, Any]:
    groups = list(recipe.launch.aws_batch.security_groups)
    data: dict[str, Any] = {
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {
                    "VolumeSize": DISK_GIB,
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        # One hop: the instance's role is the agent's, and containers cannot take it.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "UserData": _user_data(recipe),
    }
    if machine.efa_count:
        data["NetworkInterfaces"] = [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 0 if card == 0 else 1,  # as eksctl does
                "InterfaceType": "efa",
                "Groups": groups,
                "DeleteOnTermination": True,
            }
            for card in range(machine.efa_count)
        ]
    return {"LaunchTemplateName": name, "LaunchTemplateData": data}


def _user_data(recipe: Recipe) -> str:
    """ECS gives a container 30 s to end, which is short for a step and its checkpoint."""
    stop_s = int(recipe.elastic.drain_timeout_s) + STOP_MARGIN_S
    text = (
        "MIME-Version: 1.0\n"
        'Content-Type: multipart/mixed; boundary="==SHARDYARD=="\n'
        "\n"
        "--==SHARDYARD==\n"
        'Content-Type: text/x-shellscript; charset="us-ascii"\n'
        "\n"
        "#!/bin/sh\n"
        f"echo ECS_CONTAINER_STOP_TIMEOUT={stop_s}s >> /etc/ecs/ecs.config\n"
        "\n"
        "--==SHARDYARD==--\n"
    )
    return base64.b64encode(text.encode()).decode()


def _compute_environment(recipe: Recipe, machine: Instance) -> dict[str, Any]:
    aws_batch = recipe.launch.aws_batch
    image = {"imageType": IMAGE_TYPE}
    if aws_batch.ami is not None:
        # An image of the user's own: its kind only says how the agent is set up.
        kind = IMAGE_TYPE if has_gpus(machine) else CPU_IMAGE_TYPE
        image = {"imageType": kind, "imageIdOverride": aws_batch.ami}
    resources: dict[str, Any] = {
        "type": "EC2",  # multi-node jobs do not run on Spot
        "allocationStrategy": "BEST_FIT_PROGRESSIVE",
        "minvCpus": 0,  # no instance, and no bill, while no job waits
        "maxvCpus": recipe.cluster.nodes * max(machine.vcpus, container_vcpus(recipe)),
        "instanceTypes": [machine.name],
        "subnets": list(aws_batch.subnets),
        "instanceRole": aws_batch.instance_role,
        "placementGroup": f"{aws_batch.queue}-group",
        "launchTemplate": {
            "launchTemplateName": f"{aws_batch.queue}-template",
            "version": "$Default",
        },
        "ec2Configuration": [image],
        "tags": {"shardyard-queue": str(aws_batch.queue)},
    }
    # Batch refuses groups here and network interfaces in the template: with EFA they stand there
    # alone, and the tasks' own interfaces take the VPC's default group, which doctor looks at.
    if not machine.efa_count:
        resources["securityGroupIds"] = list(aws_batch.security_groups)
    return {
        "computeEnvironmentName": f"{aws_batch.queue}-environment",
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": resources,
    }


def _job_queue(name: str) -> dict[str, Any]:
    return {
        "jobQueueName": name,
        "state": "ENABLED",
        "priority": 1,
        "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": f"{name}-environment"}],
        "jobStateTimeLimitActions": [
            {
                "reason": reason,
                "state": "RUNNABLE",
                "maxTimeSeconds": seconds,
                "action": "CANCEL",
            }
            for reason, seconds in _LONGEST_WAITS_S.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

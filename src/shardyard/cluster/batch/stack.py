"""Queues of AWS Batch and all that they need: one CloudFormation stack.

Roles with the rights that are needed and no others, a log group, a security group, a placement
group, and twice a launch template, a compute environment and a queue: for multi-node jobs on
accelerators, and for side jobs without, such as `shardyard prepare`.
"""

from typing import Any

from shardyard.cluster.eksctl import tags_of
from shardyard.cluster.fsx import Made
from shardyard.cluster.network import Place
from shardyard.cluster.spec import Description
from shardyard.hardware import nvidia
from shardyard.image.dockerfile import USER_ID

IMAGE_TYPE = "ECS_AL2023_NVIDIA"
CPU_IMAGE_TYPE = "ECS_AL2023"
"""Of compute environments. Source: CreateComputeEnvironment, Ec2Configuration."""

SHARED = "/shared"
"""Where instances and containers have the file system."""

LOGS_KEPT_DAYS = 90

SIDE_INSTANCE = "m5.8xlarge"
"""Of side jobs: 32 vCPUs and 128 GiB, which hold a side job as recipes ask for it by default."""
SIDE_VCPUS = 32
MOST_SIDE_INSTANCES = 4

# After so many seconds at the head of the queue a job that cannot start is cancelled, where it
# would wait for ever. 600 and 86,400 are the least and the most that Batch accepts.
_LONGEST_WAITS_S = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": 86400,
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": 600,
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": 600,
}

_BUCKET_RIGHTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
"""What `export`, `fetch` and checkpoints do with objects; docs/verbs/export.md."""

_PULL = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")


def stack_name(given: Description) -> str:
    """Of the stack in CloudFormation."""
    return f"shardyard-{given.name}-batch"


def environment_name(given: Description) -> str:
    """Of the compute environment with accelerators."""
    return f"shardyard-{given.name}"


def side_queue_name(given: Description) -> str:
    """Of the queue of side jobs, on instances without accelerators."""
    return f"{given.name}-side"


def environments(given: Description) -> dict[str, str]:
    """Queue -> its compute environment; that of multi-node jobs is the first."""
    return {
        given.name: environment_name(given),
        side_queue_name(given): f"{environment_name(given)}-side",
    }


def log_group(given: Description) -> str:
    """Where the containers of its jobs write."""
    return f"/shardyard/{given.name}"


def render_environment(
    given: Description, owner: str, made: Made | None, place: Place
) -> dict[str, Any]:
    """The template.

    Args:
        made: The file system that instances mount; None: they have none.
        place: Where the instances lie.
    """
    tags = tags_of(given, owner)
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Queue {given.name} of AWS Batch and what it needs",
        "Resources": {
            **_network(given, listed, place),
            **_roles(given, listed),
            "LogGroup": {
                "Type": "AWS::Logs::LogGroup",
                "Properties": {
                    "LogGroupName": log_group(given),
                    "RetentionInDays": LOGS_KEPT_DAYS,
                    "Tags": listed,
                },
            },
            "Template": _launch_template(given, listed, made),
            "Environment": _compute_environment(given, tags, made, place),
            "Queue": _queue(given.name, "Environment", tags),
            "SideTemplate": _side_template(given, listed, made),
            "SideEnvironment": _side_environment(given, tags, made, place),
            "SideQueue": _queue(side_queue_name(given), "SideEnvironment", tags),
        },
        "Outputs": _outputs(given),
    }


def _outputs(given: Description) -> dict[str, Any]:
    found = {"ExecutionRole": _arn("ExecutionRole")}
    if given.jobs.bucket is not None:
        found["JobRole"] = _arn("JobRole")
    return {name: {"Value": value} for name, value in found.items()}


def _arn(resource: str) -> dict[str, Any]:
    return {"Fn::GetAtt": [resource, "Arn"]}


def _is_placed(given: Description) -> bool:
    """Whether the instances lie where somebody has reserved them: a group of ours has no room."""
    return given.capacity.reservation is not None


def _network(given: Description, tags: list[dict[str, str]], place: Place) -> dict[str, Any]:
    """EFA takes all traffic within the group, and asks for a rule of its own for each direction."""
    itself = {"Fn::GetAtt": ["Group", "GroupId"]}
    found: dict[str, Any] = {
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": f"instances of {given.name} reach each other",
                "VpcId": place.vpc,
                "SecurityGroupEgress": [{"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}],
                "Tags": tags,
            },
        },
        "FromItself": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {
                "GroupId": itself, "IpProtocol": "-1", "SourceSecurityGroupId": itself,
            },
        },
        "ToItself": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {
                "GroupId": itself, "IpProtocol": "-1", "DestinationSecurityGroupId": itself,
            },
        },
    }  # fmt: skip
    if not _is_placed(given):
        found["Placement"] = {
            "Type": "AWS::EC2::PlacementGroup",
            "Properties": {"Strategy": "cluster", "Tags": tags},
        }
    return found


def _roles(given: Description, tags: list[dict[str, str]]) -> dict[str, Any]:
    """Of the instances, of who starts containers, and of the containers where they need one.

    Names are CloudFormation's: roles are of all regions, and there may be a queue of this name in
    each. The instances' role is AWS's own policy, which follows the ECS agent's needs.
    """
    agent = "service-role/AmazonEC2ContainerServiceforEC2Role"
    found: dict[str, Any] = {
        "InstanceRole": _role("ec2.amazonaws.com", tags),
        "Profile": {
            "Type": "AWS::IAM::InstanceProfile",
            "Properties": {"Roles": [{"Ref": "InstanceRole"}]},
        },
        "ExecutionRole": _role("ecs-tasks.amazonaws.com", tags, start=_start_rights(given)),
    }
    found["InstanceRole"]["Properties"]["ManagedPolicyArns"] = [
        {"Fn::Sub": f"arn:${{AWS::Partition}}:iam::aws:policy/{agent}"}
    ]
    if given.jobs.bucket is not None:
        rights = _bucket_rights(given.jobs.bucket)
        found["JobRole"] = _role("ecs-tasks.amazonaws.com", tags, bucket=rights)
    return found


def _role(
    service: str, tags: list[dict[str, str]], **policies: list[dict[str, Any]]
) -> dict[str, Any]:
    """A role that a service may assume, with policies by name."""
    trust = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    properties: dict[str, Any] = {"AssumeRolePolicyDocument": _policy([trust]), "Tags": tags}
    if policies:
        properties["Policies"] = [
            {"PolicyName": name, "PolicyDocument": _policy(statements)}
            for name, statements in policies.items()
        ]
    return {"Type": "AWS::IAM::Role", "Properties": properties}


def _policy(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _may(actions: tuple[str, ...], *resources: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def _start_rights(given: Description) -> list[dict[str, Any]]:
    """Pull images, which may be another account's, write the log, read the secrets named."""
    found = [
        _may(("ecr:GetAuthorizationToken",), "*"),
        _may(_PULL, {"Fn::Sub": "arn:${AWS::Partition}:ecr:*:*:repository/*"}),
        _may(("logs:CreateLogStream", "logs:PutLogEvents"), _arn("LogGroup")),
    ]
    secrets = given.jobs.secrets or ()
    kept = [secret for secret in secrets if ":secretsmanager:" in secret]
    parameters = [_parameter(secret) for secret in secrets if secret not in kept]
    if kept:
        found.append(_may(("secretsmanager:GetSecretValue",), *kept))
    if parameters:
        found.append(_may(("ssm:GetParameters",), *parameters))
    return found


def _parameter(name: str) -> Any:
    if name.startswith("arn:"):
        return name
    place = "arn:${AWS::Partition}:ssm:${AWS::Region}:${AWS::AccountId}:parameter/"
    return {"Fn::Sub": place + name.removeprefix("/")}


def _bucket_rights(address: str) -> list[dict[str, Any]]:
    """Objects below the prefix, and the names of what the bucket holds."""
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    below = "/".join(part for part in (bucket, prefix.strip("/"), "*") if part)
    place = "arn:${AWS::Partition}:s3:::"
    return [
        _may(("s3:ListBucket",), {"Fn::Sub": place + bucket}),
        _may(_BUCKET_RIGHTS, {"Fn::Sub": place + below}),
    ]


def _groups(made: Made | None) -> list[Any]:
    """Of the instances: ours, and the file system's."""
    return [{"Fn::GetAtt": ["Group", "GroupId"]}, *([made.group] if made else [])]


def _launch_template(
    given: Description, tags: list[dict[str, str]], made: Made | None
) -> dict[str, Any]:
    data = {**_instance(given, made, own=given.nodes.user_data), **_renting(given)}
    if given.has_efa:
        data["NetworkInterfaces"] = [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 0 if card == 0 else 1,  # as eksctl does
                "InterfaceType": "efa",
                "Groups": _groups(made),
                "DeleteOnTermination": True,
            }
            for card in range(given.instance.efa_count)
        ]
    return _template(stack_name(given), data, tags)


def _side_template(
    given: Description, tags: list[dict[str, str]], made: Made | None
) -> dict[str, Any]:
    return _template(f"{stack_name(given)}-side", _instance(given, made, own=None), tags)


def _template(name: str, data: dict[str, Any], tags: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "Type": "AWS::EC2::LaunchTemplate",
        "Properties": {
            "LaunchTemplateName": name,
            "LaunchTemplateData": data,
            "TagSpecifications": [{"ResourceType": "launch-template", "Tags": tags}],
        },
    }


def _instance(given: Description, made: Made | None, *, own: str | None) -> dict[str, Any]:
    """What instances with and without accelerators have alike."""
    return {
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {
                    "VolumeSize": given.nodes.disk_gib,
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        # One hop: the instance's role is the agent's, and containers cannot take it.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "UserData": {"Fn::Base64": user_data(given, made, own=own)},
    }


def _renting(given: Description) -> dict[str, Any]:
    """Source: CreateLaunchTemplate; EC2 User Guide, Launch instances using Capacity Blocks."""
    capacity = given.capacity
    match capacity.kind:
        case "on-demand":
            return {"CapacityReservationSpecification": {"CapacityReservationPreference": "none"}}
        case "reservation" | "block":
            target = {"CapacityReservationId": capacity.reservation}
            market = {"InstanceMarketOptions": {"MarketType": "capacity-block"}}
            return {
                "CapacityReservationSpecification": {"CapacityReservationTarget": target},
                **(market if capacity.kind == "block" else {}),
            }
        case kind:
            raise AssertionError(f"capacity {kind!r} is refused before")


def user_data(given: Description, made: Made | None, *, own: str | None) -> str:
    """What instances run as they start: ours, the mount, and the user's own behind them."""
    # ECS gives a container 30 s to end, which is short for a step and its checkpoint.
    stop = f"ECS_CONTAINER_STOP_TIMEOUT={given.nodes.stop_s}s"
    ours = f"#!/bin/sh\necho {stop} >> /etc/ecs/ecs.config"
    parts = [("x-shellscript", ours)]
    if made is not None and made.mount_name:
        parts.append(("x-shellscript", _mount(given, made)))
    if own is not None:
        parts.append(("x-shellscript" if own.startswith("#!") else "cloud-config", own.rstrip()))
    return (
        'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="==SHARDYARD=="\n\n'
        + "".join(
            f'--==SHARDYARD==\nContent-Type: text/{kind}; charset="utf-8"\n'
            f"Content-Transfer-Encoding: 8bit\n\n{content}\n\n"
            for kind, content in parts
        )
        + "--==SHARDYARD==--\n"
    )


def _mount(given: Description, made: Made) -> str:
    """FSx for Lustre. Without it the instance takes no job: what a container wrote would stay on
    the instance's own disk and end with it. ECS's agent starts behind all of this."""
    server = f"{made.file_system}.fsx.{given.region}.amazonaws.com@tcp:/{made.mount_name}"
    return "\n".join(
        [
            "#!/bin/sh",
            f"mkdir -p {SHARED} && dnf install -y lustre-client &&",
            f"  mount -t lustre -o relatime,flock {server} {SHARED} &&",
            f"  install -d -o {USER_ID} -g {USER_ID} {SHARED}/runs ||",
            "  { systemctl mask ecs; poweroff; }",
        ]
    )


def _compute_environment(
    given: Description, tags: dict[str, str], made: Made | None, place: Place
) -> dict[str, Any]:
    machine = given.instance
    image = {"ImageType": IMAGE_TYPE}
    if given.nodes.ami is not None:
        # An image of the user's own: its kind only says how the agent is set up.
        kind = IMAGE_TYPE if machine.accelerator in nvidia.ROWS else CPU_IMAGE_TYPE
        image = {"ImageType": kind, "ImageIdOverride": given.nodes.ami}
    resources = _instances(
        machine.name, "Template", place, tags,
        least=given.nodes.count * machine.vcpus, most=(given.nodes.max or 0) * machine.vcpus,
    )  # fmt: skip
    resources["Ec2Configuration"] = [image]
    if not _is_placed(given):
        resources["PlacementGroup"] = {"Ref": "Placement"}
    # Batch refuses groups here and network interfaces in the template: with EFA they stand there
    # alone, and the containers' own interfaces take the VPC's default group (batch_place.py).
    if not given.has_efa:
        resources["SecurityGroupIds"] = _groups(made)
    return _environment(environment_name(given), resources, tags)


def _side_environment(
    given: Description, tags: dict[str, str], made: Made | None, place: Place
) -> dict[str, Any]:
    resources = _instances(
        SIDE_INSTANCE, "SideTemplate", place, tags,
        least=0, most=MOST_SIDE_INSTANCES * SIDE_VCPUS,
    )  # fmt: skip
    resources["Ec2Configuration"] = [{"ImageType": CPU_IMAGE_TYPE}]
    resources["SecurityGroupIds"] = _groups(made)
    return _environment(environments(given)[side_queue_name(given)], resources, tags)


def _instances(
    type_name: str, template: str, place: Place, tags: dict[str, str], *, least: int, most: int
) -> dict[str, Any]:
    """Instances of one type.

    Args:
        template: The launch template's name in the stack.
        least: vCPUs that stand without a job.
        most: vCPUs.
    """
    return {
        "Type": "EC2",  # multi-node jobs do not run on Spot
        "AllocationStrategy": "BEST_FIT_PROGRESSIVE",
        "MinvCpus": least,
        "MaxvCpus": most,
        "InstanceTypes": [type_name],
        "Subnets": [place.subnet],
        "InstanceRole": _arn("Profile"),
        "LaunchTemplate": {
            "LaunchTemplateId": {"Ref": template},
            "Version": {"Fn::GetAtt": [template, "LatestVersionNumber"]},
        },
        "Tags": tags,
    }


def _environment(name: str, resources: dict[str, Any], tags: dict[str, str]) -> dict[str, Any]:
    return {
        "Type": "AWS::Batch::ComputeEnvironment",
        "DependsOn": ["FromItself", "ToItself"],  # an instance that starts at once needs them
        "Properties": {
            "ComputeEnvironmentName": name,
            "Type": "MANAGED",
            "State": "ENABLED",
            "ComputeResources": resources,
            "Tags": tags,
        },
    }


def _queue(name: str, environment: str, tags: dict[str, str]) -> dict[str, Any]:
    return {
        "Type": "AWS::Batch::JobQueue",
        "Properties": {
            "JobQueueName": name,
            "State": "ENABLED",
            "Priority": 1,
            "ComputeEnvironmentOrder": [{"Order": 1, "ComputeEnvironment": {"Ref": environment}}],
            "JobStateTimeLimitActions": [
                {
                    "Reason": reason,
                    "State": "RUNNABLE",
                    "MaxTimeSeconds": seconds,
                    "Action": "CANCEL",
                }
                for reason, seconds in _LONGEST_WAITS_S.items()
            ],
            "Tags": tags,
        },
    }

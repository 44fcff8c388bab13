"""Queues of AWS Batch and all that they need: one CloudFormation stack.

Roles with the rights that are needed and no others, a log group, a security group, a placement
group, and twice a launch template, a compute environment and a queue: for multi-node jobs on
accelerators, and for side jobs without, such as `shardyard prepare`.
"""

from typing import Any

from shardyard.cluster.eksctl import tags_of
from shardyard.cluster.fsx import FileSystemOutputs
from shardyard.cluster.network import NetworkLocation
from shardyard.cluster.spec import ClusterSpec
from shardyard.hardware import nvidia
from shardyard.image.dockerfile import USER_ID

IMAGE_TYPE = "ECS_AL2023_NVIDIA"
CPU_IMAGE_TYPE = "ECS_AL2023"
"""Image types of compute environments. Source: CreateComputeEnvironment, Ec2Configuration."""

SHARED = "/shared"
"""Folder of the file system on instances and in containers."""

LOGS_KEPT_DAYS = 90

SIDE_INSTANCE = "m5.8xlarge"
"""Instance of side jobs: its 32 vCPUs and 128 GiB hold a side job of recipes' defaults."""
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
"""Rights on objects that `export`, `fetch` and checkpoints need; docs/verbs/export.md."""

_PULL = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")


def stack_name(spec: ClusterSpec) -> str:
    """Return the name of the stack in CloudFormation."""
    return f"shardyard-{spec.name}-batch"


def environment_name(spec: ClusterSpec) -> str:
    """Return the name of the compute environment with accelerators."""
    return f"shardyard-{spec.name}"


def side_queue_name(spec: ClusterSpec) -> str:
    """Return the name of the queue of side jobs, on instances without accelerators."""
    return f"{spec.name}-side"


def environments(spec: ClusterSpec) -> dict[str, str]:
    """Queue -> its compute environment; that of multi-node jobs is the first."""
    return {
        spec.name: environment_name(spec),
        side_queue_name(spec): f"{environment_name(spec)}-side",
    }


def log_group(spec: ClusterSpec) -> str:
    """Return the log group that the containers of its jobs write to."""
    return f"/shardyard/{spec.name}"


def render_environment(
    spec: ClusterSpec, owner: str, fs: FileSystemOutputs | None, location: NetworkLocation
) -> dict[str, Any]:
    """The template.

    Args:
        fs: The file system that instances mount; None: they have none.
        location: Where the instances lie.
    """
    tags = tags_of(spec, owner)
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Queue {spec.name} of AWS Batch and what it needs",
        "Resources": {
            **_network(spec, listed, location),
            **_roles(spec, listed),
            "LogGroup": {
                "Type": "AWS::Logs::LogGroup",
                "Properties": {
                    "LogGroupName": log_group(spec),
                    "RetentionInDays": LOGS_KEPT_DAYS,
                    "Tags": listed,
                },
            },
            "Template": _launch_template(spec, listed, fs),
            "Environment": _compute_environment(spec, tags, fs, location),
            "Queue": _queue(spec.name, "Environment", tags),
            "SideTemplate": _side_template(spec, listed, fs),
            "SideEnvironment": _side_environment(spec, tags, fs, location),
            "SideQueue": _queue(side_queue_name(spec), "SideEnvironment", tags),
        },
        "Outputs": _outputs(spec),
    }


def _outputs(spec: ClusterSpec) -> dict[str, Any]:
    found = {"ExecutionRole": _arn("ExecutionRole")}
    if spec.jobs.bucket is not None:
        found["JobRole"] = _arn("JobRole")
    return {name: {"Value": value} for name, value in found.items()}


def _arn(resource: str) -> dict[str, Any]:
    return {"Fn::GetAtt": [resource, "Arn"]}


def _is_placed(spec: ClusterSpec) -> bool:
    """Whether the instances lie where somebody has reserved them: a group of ours has no room."""
    return spec.capacity.reservation is not None


def _network(
    spec: ClusterSpec, tags: list[dict[str, str]], location: NetworkLocation
) -> dict[str, Any]:
    """EFA takes all traffic within the group, and asks for a rule of its own for each direction."""
    itself = {"Fn::GetAtt": ["Group", "GroupId"]}
    resources: dict[str, Any] = {
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": f"instances of {spec.name} reach each other",
                "VpcId": location.vpc,
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
    if not _is_placed(spec):
        resources["Placement"] = {
            "Type": "AWS::EC2::PlacementGroup",
            "Properties": {"Strategy": "cluster", "Tags": tags},
        }
    return resources


def _roles(spec: ClusterSpec, tags: list[dict[str, str]]) -> dict[str, Any]:
    """Return the roles of instances, of container starts, and of containers that need one.

    CloudFormation names them: roles span all regions, and each may have a queue of this name. The
    instances' role is AWS's own policy, which follows the ECS agent's needs.
    """
    agent = "service-role/AmazonEC2ContainerServiceforEC2Role"
    resources: dict[str, Any] = {
        "InstanceRole": _role("ec2.amazonaws.com", tags),
        "Profile": {
            "Type": "AWS::IAM::InstanceProfile",
            "Properties": {"Roles": [{"Ref": "InstanceRole"}]},
        },
        "ExecutionRole": _role("ecs-tasks.amazonaws.com", tags, start=_start_rights(spec)),
    }
    resources["InstanceRole"]["Properties"]["ManagedPolicyArns"] = [
        {"Fn::Sub": f"arn:${{AWS::Partition}}:iam::aws:policy/{agent}"}
    ]
    if spec.jobs.bucket is not None:
        rights = _bucket_rights(spec.jobs.bucket)
        resources["JobRole"] = _role("ecs-tasks.amazonaws.com", tags, bucket=rights)
    return resources


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


def _allow(actions: tuple[str, ...], *resources: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def _start_rights(spec: ClusterSpec) -> list[dict[str, Any]]:
    """Pull images, which may be another account's, write the log, read the secrets named."""
    found = [
        _allow(("ecr:GetAuthorizationToken",), "*"),
        _allow(_PULL, {"Fn::Sub": "arn:${AWS::Partition}:ecr:*:*:repository/*"}),
        _allow(("logs:CreateLogStream", "logs:PutLogEvents"), _arn("LogGroup")),
    ]
    secrets = spec.jobs.secrets or ()
    kept = [secret for secret in secrets if ":secretsmanager:" in secret]
    parameters = [_parameter(secret) for secret in secrets if secret not in kept]
    if kept:
        found.append(_allow(("secretsmanager:GetSecretValue",), *kept))
    if parameters:
        found.append(_allow(("ssm:GetParameters",), *parameters))
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
        _allow(("s3:ListBucket",), {"Fn::Sub": place + bucket}),
        _allow(_BUCKET_RIGHTS, {"Fn::Sub": place + below}),
    ]


def _groups(fs: FileSystemOutputs | None) -> list[Any]:
    """Return the security groups of the instances: ours, and the file system's."""
    return [{"Fn::GetAtt": ["Group", "GroupId"]}, *([fs.group] if fs else [])]


def _launch_template(
    spec: ClusterSpec, tags: list[dict[str, str]], fs: FileSystemOutputs | None
) -> dict[str, Any]:
    data = {**_instance(spec, fs, own=spec.nodes.user_data), **_capacity_options(spec)}
    if spec.has_efa:
        data["NetworkInterfaces"] = [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 0 if card == 0 else 1,  # as eksctl does
                "InterfaceType": "efa",
                "Groups": _groups(fs),
                "DeleteOnTermination": True,
            }
            for card in range(spec.instance.efa_count)
        ]
    return _template(stack_name(spec), data, tags)


def _side_template(
    spec: ClusterSpec, tags: list[dict[str, str]], fs: FileSystemOutputs | None
) -> dict[str, Any]:
    return _template(f"{stack_name(spec)}-side", _instance(spec, fs, own=None), tags)


def _template(name: str, data: dict[str, Any], tags: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "Type": "AWS::EC2::LaunchTemplate",
        "Properties": {
            "LaunchTemplateName": name,
            "LaunchTemplateData": data,
            "TagSpecifications": [{"ResourceType": "launch-template", "Tags": tags}],
        },
    }


def _instance(
    spec: ClusterSpec, fs: FileSystemOutputs | None, *, own: str | None
) -> dict[str, Any]:
    """Return the settings that instances with and without accelerators share."""
    return {
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {
                    "VolumeSize": spec.nodes.disk_gib,
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        # One hop: the instance's role is the agent's, and containers cannot take it.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "UserData": {"Fn::Base64": user_data(spec, fs, own=own)},
    }


def _capacity_options(spec: ClusterSpec) -> dict[str, Any]:
    """Source: CreateLaunchTemplate; EC2 User Guide, Launch instances using Capacity Blocks."""
    capacity = spec.capacity
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
            raise AssertionError(f"capacity {kind!r} is rejected before")


def user_data(spec: ClusterSpec, fs: FileSystemOutputs | None, *, own: str | None) -> str:
    """Return what instances run at start: our script, the mount, then the user's own."""
    # ECS gives a container 30 s to end, which is short for a step and its checkpoint.
    stop = f"ECS_CONTAINER_STOP_TIMEOUT={spec.nodes.stop_s}s"
    ours = f"#!/bin/sh\necho {stop} >> /etc/ecs/ecs.config"
    parts = [("x-shellscript", ours)]
    if fs is not None and fs.mount_name:
        parts.append(("x-shellscript", _mount(spec, fs)))
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


def _mount(spec: ClusterSpec, fs: FileSystemOutputs) -> str:
    """FSx for Lustre. Without it the instance takes no job: what a container wrote would stay on
    the instance's own disk and end with it. ECS's agent starts behind all of this."""
    server = f"{fs.file_system}.fsx.{spec.region}.amazonaws.com@tcp:/{fs.mount_name}"
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
    spec: ClusterSpec, tags: dict[str, str], fs: FileSystemOutputs | None, location: NetworkLocation
) -> dict[str, Any]:
    machine = spec.instance
    image = {"ImageType": IMAGE_TYPE}
    if spec.nodes.ami is not None:
        # An image of the user's own: its kind only says how the agent is set up.
        kind = IMAGE_TYPE if machine.accelerator in nvidia.ROWS else CPU_IMAGE_TYPE
        image = {"ImageType": kind, "ImageIdOverride": spec.nodes.ami}
    resources = _instances(
        machine.name, "Template", location, tags,
        least=spec.nodes.count * machine.vcpus, most=(spec.nodes.max or 0) * machine.vcpus,
    )  # fmt: skip
    resources["Ec2Configuration"] = [image]
    if not _is_placed(spec):
        resources["PlacementGroup"] = {"Ref": "Placement"}
    # Batch refuses groups here and network interfaces in the template: with EFA they stand there
    # alone, and the containers' own interfaces take the VPC's default group (queue.py).
    if not spec.has_efa:
        resources["SecurityGroupIds"] = _groups(fs)
    return _environment(environment_name(spec), resources, tags)


def _side_environment(
    spec: ClusterSpec, tags: dict[str, str], fs: FileSystemOutputs | None, location: NetworkLocation
) -> dict[str, Any]:
    resources = _instances(
        SIDE_INSTANCE, "SideTemplate", location, tags,
        least=0, most=MOST_SIDE_INSTANCES * SIDE_VCPUS,
    )  # fmt: skip
    resources["Ec2Configuration"] = [{"ImageType": CPU_IMAGE_TYPE}]
    resources["SecurityGroupIds"] = _groups(fs)
    return _environment(environments(spec)[side_queue_name(spec)], resources, tags)


def _instances(
    type_name: str,
    template: str,
    location: NetworkLocation,
    tags: dict[str, str],
    *,
    least: int,
    most: int,
) -> dict[str, Any]:
    """Return the instances of one type.

    Args:
        template: The launch template's name in the stack.
        least: vCPUs that run without a job.
        most: Most vCPUs.
    """
    return {
        "Type": "EC2",  # multi-node jobs do not run on Spot
        "AllocationStrategy": "BEST_FIT_PROGRESSIVE",
        "MinvCpus": least,
        "MaxvCpus": most,
        "InstanceTypes": [type_name],
        "Subnets": [location.subnet],
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

"""Terraform's version of the cluster: one ``main.tf.json`` of the AWS provider's resources.

It is for users who keep all of an account in Terraform. The values are those that eksctl and
CloudFormation get (``eksctl.py``, ``storage.py``), in an existing network. The parts inside the
cluster (device plugins, drivers) are left out; the claim is an output. Terraform keeps its own
state and removes what it made; our ledger does not record it.
"""

from typing import Any

from shardyard.cluster.api_access import for_terraform
from shardyard.cluster.eksctl import GROUP, SYSTEM_GROUP, render_cluster, render_nodes, tags_of
from shardyard.cluster.fsx import (
    DATA,
    EFS_ROOT,
    LUSTRE_PORTS,
    NFS_PORTS,
    FileSystemOutputs,
    as_json,
    claim_objects,
)
from shardyard.cluster.spec import ClusterSpec
from shardyard.errors import RequestError
from shardyard.hardware import nvidia
from shardyard.image.dockerfile import USER_ID
from shardyard.launchers.kubernetes.objects import to_yaml

# The file system of a cluster for Terraform, with the values of its CloudFormation stack.

_GROUP = "${aws_security_group.storage.id}"
_EVENTS = {"events": ["NEW", "CHANGED", "DELETED"]}


def storage_of(spec: ClusterSpec, clients: str) -> dict[str, dict[str, Any]]:
    """Type of resource -> name -> arguments; none without a file system.

    Args:
        clients: The security group of the nodes, which may mount it.
    """
    match spec.storage.kind:
        case "none":
            return {}
        case "fsx":
            return _storage_security_group(spec, LUSTRE_PORTS, clients) | _lustre(spec)
        case _:
            return _storage_security_group(spec, NFS_PORTS, clients) | _efs(spec)


def _storage_security_group(
    spec: ClusterSpec, ports: tuple[tuple[int, int], ...], clients: str
) -> dict[str, dict[str, Any]]:
    """Return the file system's rules: only these groups in, and all out.

    Terraform does not open the outward side by itself.
    """
    rules = {f"from_{first}": _rule(first, last, clients) for first, last in ports}
    if ports == LUSTRE_PORTS:  # a file server needs the same ports between servers
        rules["servers"] = _rule(ports[0][0], ports[-1][1], _GROUP)
    outward = {"security_group_id": _GROUP, "ip_protocol": "-1", "cidr_ipv4": "0.0.0.0/0"}
    group = {
        "name_prefix": f"{spec.name}-storage-",
        "description": f"nodes of {spec.name} reach its file system",
        "vpc_id": spec.vpc.id,
    }
    return {
        "aws_security_group": {"storage": group},
        "aws_vpc_security_group_ingress_rule": rules,
        "aws_vpc_security_group_egress_rule": {"storage": outward},
    }


def _rule(first: int, last: int, source: str) -> dict[str, Any]:
    return {
        "security_group_id": _GROUP,
        "referenced_security_group_id": source,
        "ip_protocol": "tcp",
        "from_port": first,
        "to_port": last,
    }


def _lustre(spec: ClusterSpec) -> dict[str, dict[str, Any]]:
    storage = spec.storage
    system = {
        "file_system_type_version": "2.15",
        "storage_capacity": storage.size_gib,
        "storage_type": "SSD",
        "subnet_ids": [spec.vpc.subnets[spec.zone]],
        "security_group_ids": [_GROUP],
        "deployment_type": "PERSISTENT_2",
        "per_unit_storage_throughput": storage.mb_per_s_per_tib,
        "data_compression_type": "LZ4",
        "depends_on": ["aws_vpc_security_group_ingress_rule.servers"],
    }
    resources: dict[str, dict[str, Any]] = {"aws_fsx_lustre_file_system": {"this": system}}
    if storage.bucket is not None:
        link = {
            "file_system_id": "${aws_fsx_lustre_file_system.this.id}",
            "file_system_path": f"/{DATA}",
            "data_repository_path": storage.bucket,
            "batch_import_meta_data_on_create": True,
            "s3": {"auto_import_policy": _EVENTS, "auto_export_policy": _EVENTS},
        }
        resources["aws_fsx_data_repository_association"] = {"this": link}
    return resources


def _efs(spec: ClusterSpec) -> dict[str, dict[str, Any]]:
    target = {
        "file_system_id": "${aws_efs_file_system.this.id}",
        "subnet_id": spec.vpc.subnets[spec.zone],
        "security_groups": [_GROUP],
    }
    user = USER_ID
    point = {
        "file_system_id": "${aws_efs_file_system.this.id}",
        "posix_user": {"uid": user, "gid": user},
        "root_directory": {
            "path": EFS_ROOT,
            "creation_info": {"owner_uid": user, "owner_gid": user, "permissions": "0755"},
        },
    }
    return {
        "aws_efs_file_system": {"this": {"encrypted": True}},
        "aws_efs_mount_target": {"this": target},
        "aws_efs_access_point": {"this": point},
    }


PROVIDER = "6.66.0"
"""Version of hashicorp/aws; the arguments are from its documents of this version."""

OWNER = "terraform"
"""In the place of a making's id: `cluster create` takes what has it for somebody else's."""

_CLUSTER = "aws_eks_cluster.this"
_CLUSTER_GROUP = f"${{{_CLUSTER}.vpc_config[0].cluster_security_group_id}}"
_USER_DATA = "accelerators_user_data"

_ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cluster": ("eks.amazonaws.com", ("AmazonEKSClusterPolicy",)),
    "nodes": (
        "ec2.amazonaws.com",
        ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"),
    ),
}
"""Role -> the service that takes it, and AWS's policies with no more than it needs."""

_BEFORE_NODES = ("aws_eks_addon.vpc-cni", "aws_eks_addon.eks-pod-identity-agent")
"""Without them a node does not become ready."""

_POD_ROLES: dict[str, tuple[str, str]] = {
    "vpc-cni": ("aws-node", "AmazonEKS_CNI_Policy"),
    "aws-efs-csi-driver": ("efs-csi-controller-sa", "service-role/AmazonEFSCSIDriverPolicy"),
}
"""Add-on that calls AWS -> its service account, and the policy that EKS documents for it."""

Resources = dict[str, dict[str, Any]]
"""Type of resource -> name -> arguments."""


def render_terraform(spec: ClusterSpec) -> dict[str, Any]:
    """Return the content of ``main.tf.json``.

    Raises:
        RequestError: It is described in a way that only eksctl or CloudFormation can make.
    """
    _check_renderable(spec)
    config, nodes = render_cluster(spec, OWNER), render_nodes(spec, OWNER)
    resources: Resources = {}
    for part in (_control_plane(spec, config), _system(spec, config), _accelerators(spec, nodes),
                 storage_of(spec, _CLUSTER_GROUP)):  # fmt: skip
        for kind, named in part.items():
            resources.setdefault(kind, {}).update(named)
    document: dict[str, Any] = {
        "terraform": {
            "required_version": ">= 1.9",
            "required_providers": {"aws": {"source": "hashicorp/aws", "version": PROVIDER}},
        },
        "provider": {
            "aws": {"region": spec.region, "default_tags": {"tags": tags_of(spec, OWNER)}}
        },
        "data": {"aws_partition": {"here": {}}},
        "resource": resources,
        "output": _outputs(spec),
    }
    if _has_own_user_data(spec):
        document["locals"] = {_USER_DATA: _user_data(spec)}
    if _has_own_group(spec) and spec.nodes.ami is None:
        document["data"]["aws_ssm_parameter"] = {"image": {"name": _image_parameter(spec)}}
    return document


def _check_renderable(spec: ClusterSpec) -> None:
    if spec.kind != "eks":
        raise RequestError(
            "--terraform renders an EKS cluster, but this is kind=batch, which is two stacks of "
            "CloudFormation. Print them with --dry-run and no --terraform; Terraform takes them "
            "as they are (aws_cloudformation_stack)."
        )
    if spec.vpc.id is None:
        raise RequestError(
            "--terraform renders a cluster in a network that is there, and vpc.id is not given. "
            "Give vpc={id: vpc-..., subnets: {...}}, or leave --terraform out: eksctl makes a "
            "network of its own."
        )


def _control_plane(spec: ClusterSpec, config: dict[str, Any]) -> Resources:
    resources: Resources = {
        "aws_eks_cluster": {
            "this": {
                "name": spec.name,
                "version": spec.version,
                "role_arn": "${aws_iam_role.cluster.arn}",
                "access_config": {"authentication_mode": "API_AND_CONFIG_MAP"},
                "vpc_config": {
                    "subnet_ids": list(spec.vpc.subnets.values()),
                    **for_terraform(spec),
                },
                # Roles have to outlive what they remove.
                "depends_on": _attached("cluster"),
            }
        },
        "aws_iam_openid_connect_provider": {
            "this": {
                "url": f"${{{_CLUSTER}.identity[0].oidc[0].issuer}}",
                "client_id_list": ["sts.amazonaws.com"],
            }
        },
        "aws_eks_addon": {
            addon["name"]: _addon(addon) for addon in config["addons"]
        },
        **_roles(spec, config),
    }  # fmt: skip
    return resources


def _addon(addon: dict[str, Any]) -> dict[str, Any]:
    name = addon["name"]
    arguments: dict[str, Any] = {
        "cluster_name": f"${{{_CLUSTER}.name}}",
        "addon_name": name,
        "resolve_conflicts_on_create": "OVERWRITE",
    }
    if "configurationValues" in addon:
        arguments["configuration_values"] = addon["configurationValues"]
    if name in _POD_ROLES:
        arguments["depends_on"] = [f"aws_eks_pod_identity_association.{name}"]
    if name in ("coredns", "aws-efs-csi-driver"):  # their pods need a node to become ready
        arguments["depends_on"] = [
            *arguments.get("depends_on", []),
            f"aws_eks_node_group.{SYSTEM_GROUP}",
        ]
    return arguments


def _roles(spec: ClusterSpec, config: dict[str, Any]) -> Resources:
    roles = {name: _role(service) for name, (service, _) in _ROLES.items()}
    attached = {
        f"{name}_{policy}": _attachment(name, policy)
        for name, (_, policies) in _ROLES.items()
        for policy in policies
    }
    links = {}
    for addon in config["addons"]:
        if not addon.get("useDefaultPodIdentityAssociations"):
            continue
        name = addon["name"]
        account, policy = _POD_ROLES[name]
        roles[name] = _role("pods.eks.amazonaws.com", "sts:AssumeRole", "sts:TagSession")
        attached[f"{name}_{policy.rpartition('/')[2]}"] = _attachment(name, policy)
        links[name] = {
            "cluster_name": f"${{{_CLUSTER}.name}}",
            "namespace": "kube-system",
            "service_account": account,
            "role_arn": f"${{aws_iam_role.{name}.arn}}",
        }
    if _has_own_group(spec):  # EKS lets only the role of its own groups in by itself
        service, policies = _ROLES["nodes"]
        roles[GROUP] = _role(service)
        attached |= {f"{GROUP}_{policy}": _attachment(GROUP, policy) for policy in policies}
    return {
        "aws_iam_role": roles,
        "aws_iam_role_policy_attachment": attached,
        "aws_eks_pod_identity_association": links,
    }


def _role(service: str, *actions: str) -> dict[str, Any]:
    """Names are Terraform's: roles are of all regions."""
    trust = {"Effect": "Allow", "Principal": {"Service": service},
             "Action": list(actions or ("sts:AssumeRole",))}  # fmt: skip
    policy = {"Version": "2012-10-17", "Statement": [trust]}
    return {"assume_role_policy": as_json(policy)}


def _attachment(role: str, policy: str) -> dict[str, Any]:
    return {
        "role": f"${{aws_iam_role.{role}.name}}",
        "policy_arn": f"arn:${{data.aws_partition.here.partition}}:iam::aws:policy/{policy}",
    }


def _attached(role: str, policies_of: str = "") -> list[str]:
    _, policies = _ROLES[policies_of or role]
    return [f"aws_iam_role_policy_attachment.{role}_{policy}" for policy in policies]


def _system(spec: ClusterSpec, config: dict[str, Any]) -> Resources:
    (group,) = config["managedNodeGroups"]
    return {
        "aws_launch_template": {SYSTEM_GROUP: _plain_template(spec, group)},
        "aws_eks_node_group": {
            SYSTEM_GROUP: {
                **_group(group),
                "subnet_ids": list(spec.vpc.subnets.values()),
                "ami_type": "AL2023_x86_64_STANDARD",
                "capacity_type": "ON_DEMAND",
                "depends_on": [*_attached("nodes"), *_BEFORE_NODES],
            }
        },
    }


def _plain_template(spec: ClusterSpec, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_device_mappings": _disk(group),
        "tag_specifications": _tagged(spec),
        # Two hops: pods without the host's network may ask, as EKS's own templates let them.
        "metadata_options": {"http_tokens": "required", "http_put_response_hop_limit": 2},
    }


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of every group that EKS manages, from eksctl's values."""
    name = group["name"]
    arguments: dict[str, Any] = {
        "cluster_name": f"${{{_CLUSTER}.name}}",
        "node_group_name": name,
        "node_role_arn": "${aws_iam_role.nodes.arn}",
        "instance_types": [group["instanceType"]],
        "scaling_config": {
            "min_size": group["minSize"],
            "desired_size": group["desiredCapacity"],
            "max_size": group["maxSize"],
        },
        "launch_template": {
            "id": f"${{aws_launch_template.{name}.id}}",
            "version": f"${{aws_launch_template.{name}.latest_version}}",
        },
    }
    return arguments | ({"labels": group["labels"]} if "labels" in group else {})


def _disk(group: dict[str, Any]) -> dict[str, Any]:
    ebs = {
        "volume_size": group["volumeSize"],
        "volume_type": "gp3",
        "encrypted": group["volumeEncrypted"],
        "delete_on_termination": True,
    }
    return {"device_name": "/dev/xvda", "ebs": ebs}


def _tagged(spec: ClusterSpec) -> list[dict[str, Any]]:
    """The provider's own tags do not reach what a template starts."""
    tags = tags_of(spec, OWNER)
    kinds = ("instance", "volume", "network-interface")
    return [{"resource_type": kind, "tags": tags} for kind in kinds]


def _has_own_group(spec: ClusterSpec) -> bool:
    """Whether the nodes are no group that EKS manages, as eksctl's of a capacity block."""
    return spec.capacity.kind == "block"


def _has_own_user_data(spec: ClusterSpec) -> bool:
    """Check whether we must name the cluster to its nodes: EKS does so only for its own images."""
    return _has_own_group(spec) or spec.nodes.ami is not None


def _accelerators(spec: ClusterSpec, config: dict[str, Any]) -> Resources:
    (group,) = config.get("managedNodeGroups", []) + config.get("nodeGroups", [])
    resources: Resources = {"aws_launch_template": {GROUP: _template(spec, group)}}
    if group.get("efaEnabled"):
        resources |= _efa_group(spec)
    if _is_placed(spec):
        strategy = {"name": f"{spec.name}-{GROUP}", "strategy": "cluster"}
        resources["aws_placement_group"] = {GROUP: strategy}
    if _has_own_group(spec):
        return resources | _own_group(spec, group)
    nodes: dict[str, Any] = {
        **_group(group),
        "subnet_ids": group["subnets"],
        "capacity_type": "SPOT" if group.get("spot") else "ON_DEMAND",
        "depends_on": [*_attached("nodes"), *_BEFORE_NODES],
    }
    if spec.nodes.ami is None:
        nodes["ami_type"] = f"AL2023_x86_64_{_image_kind(spec).upper()}"
    resources["aws_eks_node_group"] = {GROUP: nodes}
    return resources


def _is_placed(spec: ClusterSpec) -> bool:
    """eksctl places nodes with EFA together; what is reserved lies where it was reserved."""
    return spec.has_efa and spec.capacity.reservation is None


def _image_kind(spec: ClusterSpec) -> str:
    accelerator = spec.instance.accelerator
    if accelerator in nvidia.ROWS:
        return "nvidia"
    return "neuron" if accelerator.device == "xla" else "standard"


def _image_parameter(spec: ClusterSpec) -> str:
    """Return the parameter in which AWS publishes the newest image of a version."""
    kind = f"amazon-linux-2023/x86_64/{_image_kind(spec)}"
    return f"/aws/service/eks/optimized-ami/{spec.version}/{kind}/recommended/image_id"


def _template(spec: ClusterSpec, group: dict[str, Any]) -> dict[str, Any]:
    found = _plain_template(spec, group)
    if _has_own_user_data(spec):
        newest = "${data.aws_ssm_parameter.image.value}"
        found["image_id"] = spec.nodes.ami or newest
        found["user_data"] = f"${{base64encode(local.{_USER_DATA})}}"
    if group.get("efaEnabled"):
        found["network_interfaces"] = [
            {
                "network_card_index": card,
                "device_index": 0 if card == 0 else 1,  # as eksctl does
                "interface_type": "efa",
                "security_groups": [_CLUSTER_GROUP, "${aws_security_group.efa.id}"],
                "delete_on_termination": True,
            }
            for card in range(spec.instance.efa_count)
        ]
    elif _has_own_user_data(spec):  # EKS adds the cluster's group only where it starts the nodes
        found["vpc_security_group_ids"] = [_CLUSTER_GROUP]
    if _is_placed(spec):
        found["placement"] = {"group_name": f"${{aws_placement_group.{GROUP}.name}}"}
    if "capacityReservation" in group:
        target = group["capacityReservation"]["capacityReservationTarget"]
        id = {"capacity_reservation_id": target["capacityReservationID"]}
        found["capacity_reservation_specification"] = {"capacity_reservation_target": id}
    if "instanceMarketOptions" in group:
        market = group["instanceMarketOptions"]["marketType"]
        found["instance_market_options"] = {"market_type": market}
    if _has_own_group(spec):
        found["instance_type"] = group["instanceType"]
        profile = {"arn": f"${{aws_iam_instance_profile.{GROUP}.arn}}"}
        found["iam_instance_profile"] = profile
    return found


def _efa_group(spec: ClusterSpec) -> Resources:
    """EFA takes all traffic within a group, and asks for a rule of its own for each direction."""
    itself = {
        "security_group_id": "${aws_security_group.efa.id}",
        "referenced_security_group_id": "${aws_security_group.efa.id}",
        "ip_protocol": "-1",
    }
    group = {
        "name_prefix": f"{spec.name}-efa-",
        "description": f"accelerator nodes of {spec.name} reach each other",
        "vpc_id": spec.vpc.id,
    }
    return {
        "aws_security_group": {"efa": group},
        "aws_vpc_security_group_ingress_rule": {"efa": itself},
        "aws_vpc_security_group_egress_rule": {"efa": dict(itself)},
    }


def _own_group(spec: ClusterSpec, group: dict[str, Any]) -> Resources:
    """An Auto Scaling group whose nodes join by themselves, as eksctl's ``nodeGroups`` do."""
    tags = {**tags_of(spec, OWNER), f"kubernetes.io/cluster/{spec.name}": "owned",
            "Name": f"{spec.name}-{GROUP}"}  # fmt: skip
    scaling = {
        "name": f"{spec.name}-{GROUP}",
        "min_size": group["minSize"],
        "desired_capacity": group["desiredCapacity"],
        "max_size": group["maxSize"],
        "vpc_zone_identifier": group["subnets"],
        "launch_template": {
            "id": f"${{aws_launch_template.{GROUP}.id}}",
            "version": f"${{aws_launch_template.{GROUP}.latest_version}}",
        },
        "tag": [
            {"key": key, "value": value, "propagate_at_launch": True}
            for key, value in tags.items()
        ],
        "depends_on": [
            *_attached(GROUP, "nodes"),
            f"aws_eks_access_entry.{GROUP}",
            *_BEFORE_NODES,
        ],
    }  # fmt: skip
    entry = {
        "cluster_name": f"${{{_CLUSTER}.name}}",
        "principal_arn": f"${{aws_iam_role.{GROUP}.arn}}",
        "type": "EC2_LINUX",
    }
    profile = {"role": f"${{aws_iam_role.{GROUP}.name}}"}
    return {
        "aws_autoscaling_group": {GROUP: scaling},
        "aws_eks_access_entry": {GROUP: entry},
        "aws_iam_instance_profile": {GROUP: profile},
    }


def _user_data(spec: ClusterSpec) -> str:
    """Return user data with which nodeadm of Amazon Linux 2023 finds the cluster and labels."""
    (group,) = [
        group
        for kind in ("managedNodeGroups", "nodeGroups")
        for group in render_nodes(spec, OWNER).get(kind, [])
    ]
    labels = ",".join(f"{key}={value}" for key, value in group["labels"].items())
    return (
        'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="==SHARDYARD=="\n\n'
        "--==SHARDYARD==\nContent-Type: application/node.eks.aws\n\n"
        "apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\nspec:\n"
        f"  cluster:\n    name: {spec.name}\n"
        f"    apiServerEndpoint: ${{{_CLUSTER}.endpoint}}\n"
        f"    certificateAuthority: ${{{_CLUSTER}.certificate_authority[0].data}}\n"
        f"    cidr: ${{{_CLUSTER}.kubernetes_network_config[0].service_ipv4_cidr}}\n"
        f'  kubelet:\n    flags: ["--node-labels={labels}"]\n'
        "\n--==SHARDYARD==--\n"
    )


def _outputs(spec: ClusterSpec) -> dict[str, Any]:
    """Return the outputs: the next command, and what a claim names."""
    told = f"aws eks update-kubeconfig --region {spec.region} --name {spec.name}"
    found = {"kubeconfig": {"value": told}}
    if spec.storage.kind == "fsx":
        found["mount_name"] = {"value": "${aws_fsx_lustre_file_system.this.mount_name}"}
    if spec.storage.kind == "efs":
        found["access_point"] = {"value": "${aws_efs_access_point.this.id}"}
    if spec.storage.kind != "none":
        kind = "fsx_lustre" if spec.storage.kind == "fsx" else "efs"
        system = f"${{aws_{kind}_file_system.this.id}}"
        found["file_system"] = {"value": system}
        made = FileSystemOutputs(
            file_system=system,
            mount_name="${aws_fsx_lustre_file_system.this.mount_name}",
            access_point="${aws_efs_access_point.this.id}",
        )
        found["claim"] = {"value": to_yaml(claim_objects(spec, made, OWNER))}
    return found

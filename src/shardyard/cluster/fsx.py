"""The file system of a cluster: a CloudFormation stack, and a claim on it.

FSx for Lustre and its link to a bucket, or EFS, with the security group that lets nodes in, are one
stack: CloudFormation makes them and removes them together. The claim is static: the volume it is on
is made by the stack, so that no pod's end can delete data. Instances of Batch are members of the
group themselves, as their own is made behind the file system.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardyard.cluster.eksctl import tags_of
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.image.dockerfile import USER_ID

LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""TCP ports between a Lustre client and its servers (FSx for Lustre, security groups)."""
NFS_PORTS = ((2049, 2049),)

_WITH_THE_STACK = {"DeletionPolicy": "Delete", "UpdateReplacePolicy": "Retain"}
"""Policies: removing the stack removes the data, by its name; changing it never does."""

EFS_ROOT = "/shardyard"
"""Folder of EFS that pods and containers see."""
ROOT_IMAGE = "public.ecr.aws/docker/library/busybox:1.37"
"""Image of the job that gives the root of FSx to the group of the pods."""
DATA = "data"
"""Folder of FSx that holds the bucket."""


@dataclass(frozen=True, kw_only=True)
class FileSystemOutputs:
    """File system in a stack's outputs."""

    file_system: str
    mount_name: str
    """FSx: name of the file system that its servers serve; empty: EFS."""
    group: str = ""
    """Batch: security group of which instances are members."""
    access_point: str = ""
    """EFS: what pods and containers mount, as a user of theirs."""


def stack_name(spec: ClusterSpec) -> str:
    """Return the name of the stack in CloudFormation."""
    return f"shardyard-{spec.name}-storage"


def render_stack(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    """Return the template; what is known only once the cluster exists are its parameters."""
    is_fsx, clients = spec.storage.kind == "fsx", clients_of(spec)
    ports = LUSTRE_PORTS if is_fsx else NFS_PORTS
    tags = [{"Key": key, "Value": value} for key, value in tags_of(spec, owner).items()]
    resources: dict[str, Any] = {
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": f"nodes of {spec.name} reach its file system",
                "VpcId": {"Ref": "Vpc"},
                "SecurityGroupIngress": _ingress(ports, clients),
                "Tags": tags,
            },
        }
    }
    resources |= _lustre(spec, tags) if is_fsx else _efs(tags)
    if spec.kind == "batch" and not is_fsx:
        resources |= _efs_clients()
    if not is_fsx:
        resources["AccessPoint"] = _access_point(USER_ID, tags)
    outputs: dict[str, Any] = {"FileSystem": {"Value": {"Ref": "FileSystem"}}}
    if is_fsx:
        outputs["MountName"] = {"Value": {"Fn::GetAtt": ["FileSystem", "LustreMountName"]}}
    if spec.kind == "batch":
        outputs["Group"] = {"Value": {"Fn::GetAtt": ["Group", "GroupId"]}}
    if not is_fsx:
        outputs["AccessPoint"] = {"Value": {"Ref": "AccessPoint"}}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"File system of the cluster {spec.name}",
        "Parameters": {
            "Vpc": {"Type": "AWS::EC2::VPC::Id"},
            "Subnet": {"Type": "AWS::EC2::Subnet::Id"},
            **{client: {"Type": "AWS::EC2::SecurityGroup::Id"} for client in clients},
        },
        "Resources": resources,
        "Outputs": outputs,
    }


def clients_of(spec: ClusterSpec) -> tuple[str, ...]:
    """Parameters that name the groups of what mounts it and is no member of its own group.

    Nodes that EKS manages are in one group, eksctl's own in another. ECS mounts EFS through the
    container's interface, which has the VPC's default group where the template has interfaces.
    """
    if isinstance(spec, AdoptedCluster):
        return ("NodeGroup",)  # eksctl gives its own groups that of EKS where there is no other
    if spec.kind == "eks":
        return ("NodeGroup", "SharedNodeGroup")
    return ("DefaultGroup",) if spec.storage.kind == "efs" and spec.has_efa else ()


def _ingress(ports: tuple[tuple[int, int], ...], clients: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rules that let only these groups in."""
    return [
        {"IpProtocol": "tcp", "FromPort": first, "ToPort": last,
         "SourceSecurityGroupId": {"Ref": group}}
        for first, last in ports
        for group in clients
    ]  # fmt: skip


def _lustre(spec: ClusterSpec, tags: list[dict[str, str]]) -> dict[str, Any]:
    storage = spec.storage
    resources: dict[str, Any] = {
        # A file server needs the same ports between servers, and from members of its group.
        "Servers": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {
                "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                "IpProtocol": "tcp",
                "FromPort": LUSTRE_PORTS[0][0],
                "ToPort": LUSTRE_PORTS[-1][1],
                "SourceSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            },
        },
        "FileSystem": {
            "Type": "AWS::FSx::FileSystem",
            "DependsOn": "Servers",
            **_WITH_THE_STACK,
            "Properties": {
                "FileSystemType": "LUSTRE",
                "FileSystemTypeVersion": "2.15",
                "StorageCapacity": storage.size_gib,
                "StorageType": "SSD",
                "SubnetIds": [{"Ref": "Subnet"}],
                "SecurityGroupIds": [{"Fn::GetAtt": ["Group", "GroupId"]}],
                "LustreConfiguration": {
                    "DeploymentType": "PERSISTENT_2",
                    "PerUnitStorageThroughput": storage.mb_per_s_per_tib,
                    "DataCompressionType": "LZ4",
                },
                "Tags": tags,
            },
        },
    }
    if storage.bucket is not None:
        events = {"Events": ["NEW", "CHANGED", "DELETED"]}
        resources["Link"] = {
            "Type": "AWS::FSx::DataRepositoryAssociation",
            "Properties": {
                "FileSystemId": {"Ref": "FileSystem"},
                "FileSystemPath": f"/{DATA}",
                "DataRepositoryPath": storage.bucket,
                "BatchImportMetaDataOnCreate": True,
                "S3": {"AutoImportPolicy": events, "AutoExportPolicy": events},
                "Tags": tags,
            },
        }
    return resources


def _efs(tags: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "FileSystem": {
            "Type": "AWS::EFS::FileSystem",
            **_WITH_THE_STACK,
            "Properties": {"Encrypted": True, "FileSystemTags": tags},
        },
        "Target": {
            "Type": "AWS::EFS::MountTarget",
            "Properties": {
                "FileSystemId": {"Ref": "FileSystem"},
                "SubnetId": {"Ref": "Subnet"},
                "SecurityGroups": [{"Fn::GetAtt": ["Group", "GroupId"]}],
            },
        },
    }


def _access_point(user: int, tags: list[dict[str, str]]) -> dict[str, Any]:
    """Return the folder of EFS that containers see, and write as their user.

    The root of EFS belongs to root, and its driver does not change a pod's fsGroup.
    """
    whose = str(user)
    return {
        "Type": "AWS::EFS::AccessPoint",
        "Properties": {
            "FileSystemId": {"Ref": "FileSystem"},
            "PosixUser": {"Uid": whose, "Gid": whose},
            "RootDirectory": {
                "Path": EFS_ROOT,
                "CreationInfo": {"OwnerUid": whose, "OwnerGid": whose, "Permissions": "0755"},
            },
            "AccessPointTags": tags,
        },
    }


def _efs_clients() -> dict[str, Any]:
    """Members of the group reach it: instances of Batch."""
    return {
        "Clients": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {
                "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                "IpProtocol": "tcp",
                "FromPort": NFS_PORTS[0][0],
                "ToPort": NFS_PORTS[0][1],
                "SourceSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            },
        },
    }


def file_system_outputs(outputs: Mapping[str, str]) -> FileSystemOutputs:
    """Read the file system from the stack's outputs."""
    return FileSystemOutputs(
        file_system=outputs["FileSystem"],
        mount_name=outputs.get("MountName", ""),
        group=outputs.get("Group", ""),
        access_point=outputs.get("AccessPoint", ""),
    )


def volume_name(spec: ClusterSpec) -> str:
    """Return the name of the volume that the claim is on."""
    return f"shardyard-{spec.name}-{spec.storage.claim}"


def root_job_name(spec: ClusterSpec) -> str:
    """Return the name of the job that gives the root of FSx to the group of the pods."""
    return f"{volume_name(spec)}-root"


def render_root_job(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    """Return the job that runs once, before any other pod mounts FSx.

    The driver's fsGroupPolicy is File. Where the root is not the group's, the first pod with an
    fsGroup changes the owner of every file. That includes files that represent objects of the
    bucket, and AutoExport sends that back. With OnRootMismatch, a root of the group ends it.
    Source: kubernetes/pkg/volume/volume_linux.go (group, rwx for it, setgid).
    """
    storage, group = spec.storage, USER_ID
    container = {
        "name": "root",
        "image": ROOT_IMAGE,
        "command": ["sh", "-c", f"chgrp {group} /shared && chmod 2775 /shared"],
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER", "FSETID"]},
        },
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    claim = {"claimName": storage.claim}
    pod = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": claim}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": root_job_name(spec), "namespace": storage.namespace,
            "labels": tags_of(spec, owner),
        },
        "spec": {"backoffLimit": 6, "template": {"spec": pod}},
    }  # fmt: skip


def claim_objects(
    spec: ClusterSpec, fs: FileSystemOutputs, owner: str
) -> tuple[dict[str, Any], ...]:
    """The volume, the claim on it, and with FSx the job that gives its root to the pods."""
    jobs = (render_root_job(spec, owner),) if spec.storage.kind == "fsx" else ()
    return (*render_claim(spec, fs, owner), *jobs)


def render_claim(
    cluster_spec: ClusterSpec, fs: FileSystemOutputs, owner: str
) -> tuple[dict[str, Any], ...]:
    """The volume and the claim on it; deleting the claim deletes no data."""
    storage = cluster_spec.storage
    volume = volume_name(cluster_spec)
    size = f"{storage.size_gib if storage.kind == 'fsx' else 1}Gi"  # EFS has none; one is required
    labels = tags_of(cluster_spec, owner)
    spec = {
        "capacity": {"storage": size},
        "volumeMode": "Filesystem",
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"name": storage.claim, "namespace": storage.namespace},
        "csi": _csi(cluster_spec, fs),
    }
    if storage.kind == "fsx":
        spec["mountOptions"] = ["flock"]
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": labels},
            "spec": spec,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": storage.claim, "namespace": storage.namespace, "labels": labels
            },
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": {"storage": size}},
            },
        },
    )  # fmt: skip


def _csi(spec: ClusterSpec, fs: FileSystemOutputs) -> dict[str, Any]:
    if spec.storage.kind == "efs":
        point = f"::{fs.access_point}" if fs.access_point else ""  # of stacks from before
        return {"driver": "efs.csi.aws.com", "volumeHandle": f"{fs.file_system}{point}"}
    return {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": fs.file_system,
        "volumeAttributes": {
            "dnsname": f"{fs.file_system}.fsx.{spec.region}.amazonaws.com",
            "mountname": fs.mount_name,
        },
    }


def as_json(template: dict[str, Any]) -> str:
    """The template as CloudFormation is given it."""
    return json.dumps(template, indent=1) + "\n"

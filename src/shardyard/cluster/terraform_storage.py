"""The file system of a cluster for Terraform, with the values of its CloudFormation stack."""

from typing import Any

from shardyard.cluster.fsx import DATA, EFS_ROOT, LUSTRE_PORTS, NFS_PORTS
from shardyard.cluster.spec import Description
from shardyard.image.dockerfile import USER_ID

_GROUP = "${aws_security_group.storage.id}"
_EVENTS = {"events": ["NEW", "CHANGED", "DELETED"]}


def storage_of(given: Description, clients: str) -> dict[str, dict[str, Any]]:
    """Type of resource -> name -> arguments; none without a file system.

    Args:
        clients: The security group of the nodes, which may mount it.
    """
    match given.storage.kind:
        case "none":
            return {}
        case "fsx":
            return _group(given, LUSTRE_PORTS, clients) | _lustre(given)
        case _:
            return _group(given, NFS_PORTS, clients) | _efs(given)


def _group(
    given: Description, ports: tuple[tuple[int, int], ...], clients: str
) -> dict[str, dict[str, Any]]:
    """From these groups alone; outward all, which Terraform does not let by itself."""
    rules = {f"from_{first}": _rule(first, last, clients) for first, last in ports}
    if ports == LUSTRE_PORTS:  # a file server needs the same ports between servers
        rules["servers"] = _rule(ports[0][0], ports[-1][1], _GROUP)
    outward = {"security_group_id": _GROUP, "ip_protocol": "-1", "cidr_ipv4": "0.0.0.0/0"}
    group = {
        "name_prefix": f"{given.name}-storage-",
        "description": f"nodes of {given.name} reach its file system",
        "vpc_id": given.vpc.id,
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


def _lustre(given: Description) -> dict[str, dict[str, Any]]:
    storage = given.storage
    system = {
        "file_system_type_version": "2.15",
        "storage_capacity": storage.size_gib,
        "storage_type": "SSD",
        "subnet_ids": [given.vpc.subnets[given.zone]],
        "security_group_ids": [_GROUP],
        "deployment_type": "PERSISTENT_2",
        "per_unit_storage_throughput": storage.mb_per_s_per_tib,
        "data_compression_type": "LZ4",
        "depends_on": ["aws_vpc_security_group_ingress_rule.servers"],
    }
    found: dict[str, dict[str, Any]] = {"aws_fsx_lustre_file_system": {"this": system}}
    if storage.bucket is not None:
        link = {
            "file_system_id": "${aws_fsx_lustre_file_system.this.id}",
            "file_system_path": f"/{DATA}",
            "data_repository_path": storage.bucket,
            "batch_import_meta_data_on_create": True,
            "s3": {"auto_import_policy": _EVENTS, "auto_export_policy": _EVENTS},
        }
        found["aws_fsx_data_repository_association"] = {"this": link}
    return found


def _efs(given: Description) -> dict[str, dict[str, Any]]:
    target = {
        "file_system_id": "${aws_efs_file_system.this.id}",
        "subnet_id": given.vpc.subnets[given.zone],
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

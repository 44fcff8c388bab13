"""The etcd of launch.kubernetes.etcd: one pod behind a service, without a disk of its own.

A rendezvous lives in it for minutes, so a restart recreates all that is lost with it.
"""

from typing import Any

from shardyard.config.endpoints import secret_name, service_name
from shardyard.config.schema.launch import Kubernetes
from shardyard.launchers.kubernetes.etcd_certificate import (
    FILES,
    FOLDER,
    MOUNT,
    SECRET_TYPE,
    new_certificate,
    volume,
)
from shardyard.launchers.kubernetes.ownership import MANAGED_BY
from shardyard.launchers.kubernetes.pod import INSTANCE, container_security, labels, pod_security
from shardyard.launchers.kubernetes.policies import ingress_policy
from shardyard.launchers.kubernetes.prerequisites import ETCD
from shardyard.launchers.kubernetes.resources import Demand

IMAGE = f"quay.io/coreos/etcd:v{ETCD.version}"
_DATA = "/data"
_NO_DEVICES = Demand(devices={}, huge_pages_mib=0, cpus=1, memory_mib=256)


def render_etcd(settings: Kubernetes) -> tuple[dict[str, Any], ...]:
    """A policy, a service and a deployment under the name and port of launch.kubernetes.etcd.

    Only pods of runs in its namespace reach it, and only those that show its certificate.

    Args:
        settings: With an address for which ``service_name`` has a name.
    """
    name = service_name(settings)
    assert name is not None
    port = int(str(settings.etcd).rpartition(":")[2])
    meta = {"name": name, "namespace": settings.namespace, "labels": labels(name)}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"selector": labels(name), "ports": [{"name": "client", "port": port}]},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two would be two stores behind one name
            "selector": {"matchLabels": labels(name)},
            "template": {"metadata": {"labels": labels(name)}, "spec": _pod(settings, name, port)},
        },
    }
    runs = {"podSelector": {"matchLabels": dict([MANAGED_BY])}}
    allowed = {"from": [runs], "ports": [{"protocol": "TCP", "port": port}]}
    return ingress_policy(meta, {"matchLabels": labels(name)}, [allowed]), service, deployment


def empty_secret(settings: Kubernetes) -> dict[str, Any] | None:
    """The Secret that is filled where it is created; None: it is there already, or none is used."""
    name, secret = service_name(settings), secret_name(settings)
    if name is None or secret is None or settings.etcd_secret != "auto":
        return None
    meta = {"name": secret, "namespace": settings.namespace, "labels": labels(name)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": SECRET_TYPE}


def filled(secret: dict[str, Any]) -> dict[str, Any]:
    """The Secret with a new certificate.

    Raises:
        RequestError: openssl is not installed here.
    """
    meta = secret["metadata"]
    return {**secret, "data": new_certificate(meta["labels"][INSTANCE], meta["namespace"])}


def command(
    name: str, port: int, *, data: str = _DATA, certificate: str | None, host: str = "0.0.0.0"
) -> list[str]:
    """Return the command that the container runs.

    Args:
        certificate: Folder with the files of the Secret; None: without TLS.
        host: Address at which it listens.
    """
    scheme = "http" if certificate is None else "https"
    words = [
        "etcd", "--data-dir", data,
        "--listen-client-urls", f"{scheme}://{host}:{port}",
        "--advertise-client-urls", f"{scheme}://{name}:{port}",
        # The kubelet has no certificate, so that it asks here.
        "--listen-metrics-urls", f"http://{host}:{health_port(port)}",
    ]  # fmt: skip
    if certificate is None:
        return words
    authority, public, key = (f"{certificate}/{file}" for file in FILES.values())
    return [
        *words, "--client-cert-auth", "--trusted-ca-file", authority,
        "--cert-file", public, "--key-file", key,
    ]  # fmt: skip


def health_port(port: int) -> int:
    """Port of /health; etcd's own is 2379, and 2380 is that of other members."""
    return 2381 if port != 2381 else 2382


def _pod(settings: Kubernetes, name: str, port: int) -> dict[str, Any]:
    secret = secret_name(settings)
    health = health_port(port)
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # etcd reads ETCD_*, and a service called etcd makes some
        "securityContext": pod_security(),
        "containers": [
            {
                "name": "etcd",
                "image": IMAGE,
                "command": command(name, port, certificate=FOLDER if secret else None),
                "ports": [
                    {"name": "client", "containerPort": port},
                    {"name": "health", "containerPort": health},
                ],
                "readinessProbe": {"httpGet": {"path": "/health", "port": "health"}},
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                "securityContext": {
                    **container_security(_NO_DEVICES),
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [
                    {"name": "data", "mountPath": _DATA},
                    *([MOUNT] if secret else []),
                ],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}, *([volume(secret)] if secret else [])],
    }

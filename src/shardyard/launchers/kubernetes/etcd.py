"""The etcd of launch.kubernetes.etcd: one pod behind a service, without a disk of its own.

A rendezvous lives in it for minutes, so nothing is lost with it that a restart does not make again.
"""

from typing import Any

from shardyard.config.launch_section import Kubernetes
from shardyard.launchers.kubernetes.network_policy import policy
from shardyard.launchers.kubernetes.ownership import MANAGED_BY
from shardyard.launchers.kubernetes.pod import container_security, labels, pod_security
from shardyard.launchers.kubernetes.prerequisites import ETCD
from shardyard.launchers.kubernetes.resources import Demand

IMAGE = f"quay.io/coreos/etcd:v{ETCD.version}"
_DATA = "/data"
_NO_DEVICES = Demand(devices={}, huge_pages_mib=0, cpus=1, memory_mib=256)


def service_name(settings: Kubernetes) -> str | None:
    """Name of the service that we can make for it; None: the address is of somewhere else."""
    host = (settings.etcd or "").rpartition(":")[0]
    name, _, rest = host.partition(".")
    ours = f"{settings.namespace}.svc.cluster.local"
    is_here = rest in ("", settings.namespace, f"{settings.namespace}.svc", ours)
    return name if name and is_here else None


def render_etcd(settings: Kubernetes) -> tuple[dict[str, Any], ...]:
    """A policy, a service and a deployment under the name and port of launch.kubernetes.etcd.

    It has no password: only pods of runs in its namespace reach it.

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
            "template": {"metadata": {"labels": labels(name)}, "spec": _pod(name, port)},
        },
    }
    runs = {"podSelector": {"matchLabels": dict([MANAGED_BY])}}
    allowed = {"from": [runs], "ports": [{"protocol": "TCP", "port": port}]}
    return policy(meta, {"matchLabels": labels(name)}, [allowed]), service, deployment


def command(name: str, port: int, *, data: str = _DATA) -> list[str]:
    """What the container runs."""
    return [
        "etcd", "--data-dir", data,
        "--listen-client-urls", f"http://0.0.0.0:{port}",
        "--advertise-client-urls", f"http://{name}:{port}",
    ]  # fmt: skip


def _pod(name: str, port: int) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # etcd reads ETCD_*, and a service called etcd makes some
        "securityContext": pod_security(),
        "containers": [
            {
                "name": "etcd",
                "image": IMAGE,
                "command": command(name, port),
                "ports": [{"name": "client", "containerPort": port}],
                "readinessProbe": {"httpGet": {"path": "/health", "port": "client"}},
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                "securityContext": {
                    **container_security(_NO_DEVICES),
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [{"name": "data", "mountPath": _DATA}],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }

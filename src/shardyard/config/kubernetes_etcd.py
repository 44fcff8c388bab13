"""The etcd of launch.kubernetes.etcd: whose service it is, and which Secret has its certificate."""

from shardyard.config.schema.launch import Kubernetes


def service_name(settings: Kubernetes) -> str | None:
    """Name of the service that we can make for it; None: the address is of somewhere else."""
    host = (settings.etcd or "").rpartition(":")[0]
    name, _, rest = host.partition(".")
    ours = f"{settings.namespace}.svc.cluster.local"
    is_here = rest in ("", settings.namespace, f"{settings.namespace}.svc", ours)
    return name if name and is_here else None


def secret_name(settings: Kubernetes) -> str | None:
    """Name of the Secret with its certificate; None: pods reach it without TLS."""
    if settings.etcd_secret != "auto":
        return settings.etcd_secret
    name = service_name(settings)
    return None if name is None else f"{name}-tls"


def rendezvous_of(settings: Kubernetes) -> str:
    """Its address as ``elastic.rendezvous`` writes it."""
    scheme = "etcd" if secret_name(settings) is None else "etcds"
    return f"{scheme}://{settings.etcd}"

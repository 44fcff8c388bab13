"""Addresses of rendezvous, Prometheus and etcd on Kubernetes, parsed and checked."""

import os
import re
from dataclasses import dataclass

from shardyard.config.schema.launch import Kubernetes
from shardyard.errors import RequestError

TCP = "tcp"
_SCHEMES = {"etcd": False, "etcds": True}
"""Scheme -> whether it is encrypted. Said in the recipe: a certificate that is missing on one node
must not have that node speak in the clear."""
_PORT = 2379


@dataclass(frozen=True)
class EtcdEndpoint:
    """An etcd cluster."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member, in the order of requests."""
    is_encrypted: bool

    def __str__(self) -> str:
        return f"etcd at {', '.join(f'{host}:{port}' for host, port in self.endpoints)}"


def parse_rendezvous_endpoint(text: str) -> EtcdEndpoint | None:
    """Parse a rendezvous setting; None: a TCP store that an agent serves.

    Raises:
        RequestError: It is neither ``tcp`` nor an address of etcd.
    """
    if text == TCP:
        return None
    scheme, separator, rest = text.partition("://")
    if "@" in rest:
        raise RequestError(
            "names a user before the host, and a recipe is kept and shown as it is. Give "
            "etcd://HOST:PORT, and user and password in the variables ETCDCTL_USER and "
            "ETCDCTL_PASSWORD (`secrets` puts them there)."
        )
    if not separator or scheme not in _SCHEMES:
        raise RequestError(
            f"={text} names no place to meet. Use tcp (a port of node 0), etcd://HOST:PORT[,...], "
            "or etcds://HOST:PORT[,...] with TLS."
        )
    endpoints = tuple(_endpoint(text, each) for each in rest.rstrip("/").split(","))
    return EtcdEndpoint(endpoints, _SCHEMES[scheme])


def _endpoint(text: str, endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):  # no port, or an address of IPv6 alone
        host, port = endpoint, str(_PORT)
    is_bare = ":" in host and not host.startswith("[")
    host = host.strip("[]")
    if not host or is_bare or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RequestError(
            f"={text}: {endpoint!r} is not HOST:PORT. Agents ask etcd there. Give for example "
            f"etcd://etcd-0:{_PORT},etcd-1:{_PORT}; an address of IPv6 in brackets."
        )
    return host, int(port)


# Where a node offers its metrics: ``observe.prometheus``.

ADDRESS_VARIABLE = "SHARDYARD_METRICS_ADDRESS"
"""In a pod: its own address, at which Prometheus reaches it."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MetricsEndpoint:
    """An address to listen at."""

    host: str
    port: int
    """0: any that is free."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def metrics_endpoint(setting: int | str | None) -> MetricsEndpoint | None:
    """Parse ``observe.prometheus``; only a port means loopback, or in a pod the pod's address."""
    if setting is None:
        return None
    if isinstance(setting, int):
        return MetricsEndpoint(os.environ.get(ADDRESS_VARIABLE, LOOPBACK), setting)
    host, _, port = setting.rpartition(":")
    return MetricsEndpoint(re.sub(r"^\[(.*)\]$", r"\1", host), int(port))


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

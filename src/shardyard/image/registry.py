"""Checks whether a registry has an image and gives it to everybody, by HTTP as a node would.

No password is sent: an image behind a password is reported as such. ECR is queried by its
own API, with the user's credentials (`ecr.py`). The requests are those of the OCI
distribution specification 1.1, `Pulling manifests`, and of
distribution.github.io/distribution/spec/auth/token.

No tool is used instead (tried: docker 28.2, podman 4.3, buildah 1.28). Docker ends with 1
and the others with 125 whether an image is missing, closed or the registry silent. Words
differ by tool and version. They send this user's own passwords, which nodes do not have. A
registry that accepts but does not answer holds docker for 20 s. And a user who launches
builds no image, and may have none of them.
"""

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlencode, urlsplit

from shardyard.doctor.finding import Finding
from shardyard.errors import ShardyardError
from shardyard.image.ecr import Registry, ecr_registry
from shardyard.io.files import parse_json
from shardyard.units import format_bytes

_DOCKER_HUB = "docker.io", "registry-1.docker.io"
"""In names, and where it answers."""
_TIMEOUT_S = 5.0
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_PARAMETER = re.compile(r'\b(\w+)="([^"]*)"')

Answer = Literal["there", "missing", "closed", "silent"]
"""``closed``: not without a password; ``silent``: it does not answer this machine."""


@dataclass(frozen=True, kw_only=True)
class ImageName:
    """The parts of an image's name, as Docker reads it."""

    host: str
    repository: str
    version: str
    """A tag or a digest."""

    @staticmethod
    def of(image: str) -> "ImageName":
        """``a/b:1`` is of Docker Hub; a host has a dot or a port, or is localhost."""
        name, _, digest = image.partition("@")
        host, slash, rest = name.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            host, rest = _DOCKER_HUB[0], name
        if host == _DOCKER_HUB[0] and "/" not in rest:
            rest = f"library/{rest}"
        repository, _, tag = rest.partition(":")
        return ImageName(host=host, repository=repository, version=digest or tag or "latest")

    @property
    def url(self) -> str:
        """Return the URL of the manifest: https, but http on this machine's own addresses."""
        host = _DOCKER_HUB[1] if self.host == _DOCKER_HUB[0] else self.host
        scheme = "http" if _is_loopback(urlsplit(f"//{host}").hostname) else "https"
        return f"{scheme}://{host}/v2/{self.repository}/manifests/{self.version}"


def ask_registry(image: str) -> Answer:
    """Whether an image is there for everybody; never raises."""
    name = ImageName.of(image)
    try:
        status, challenge = _probe(name.url, {})
        if status == 401:
            token = _token(challenge)
            if token:
                status, _ = _probe(name.url, {"Authorization": f"Bearer {token}"})
    except (OSError, ValueError, HTTPException):
        return "silent"
    if status == 200:
        return "there"
    if status in (401, 403):
        return "closed"
    return "missing" if status == 404 else "silent"


def find_image(image: str, *, has_password: bool = False) -> Finding:
    """Return `doctor`'s finding on whether a registry has an image.

    Args:
        has_password: Whether the nodes have one for a registry that asks for it.
    """
    registry = ecr_registry(image)
    if registry is not None:
        return _in_ecr(image, registry)
    answer, name = ask_registry(image), ImageName.of(image)
    if answer == "there":
        what = f"{name.host} gives {name.repository} to everybody"
        return Finding(name="image", verdict="ok", what=what)
    if answer == "missing":
        what = f"{name.host} has no {name.repository} with {name.version}: no node could pull it"
        return _missing(what)
    if answer == "silent":
        return Finding(
            name="image", verdict="warning",
            what=f"{name.host} does not answer this machine: whether it has {image} is not known",
            mend="See that launch.image is spelt right and that the nodes reach its registry",
        )  # fmt: skip
    what = f"{name.host} gives {image} only to those with a password, or does not have it"
    if has_password:
        return Finding(name="image", verdict="ok", what=f"{what}; the nodes have one")
    return Finding(
        name="image", verdict="warning", what=what,
        mend="See that launch.image is spelt right and that the nodes are let in",
    )  # fmt: skip


def _in_ecr(image: str, registry: Registry) -> Finding:
    try:
        size_bytes = registry.size_bytes(image)
    except ShardyardError as error:
        return Finding(name="image", verdict="warning", what=f"cannot be asked: {error}")
    if size_bytes is None:
        return _missing(f"{image} does not exist")
    what = f"{image} is there, {format_bytes(size_bytes)} compressed"
    return Finding(name="image", verdict="ok", what=what)


def _missing(what: str) -> Finding:
    return Finding(
        name="image", verdict="problem", what=what,
        mend="Push it with `shardyard image push`, or correct launch.image",
    )  # fmt: skip


def _probe(url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Status, and how to be let in."""
    request = urllib.request.Request(
        url, method="HEAD", headers={"Accept": ", ".join(_MANIFESTS), **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("WWW-Authenticate", "")


def _token(challenge: str) -> str | None:
    """Return the registry's anonymous token; None: it gives none, or not over a safe URL."""
    parts = dict(_PARAMETER.findall(challenge))
    realm = parts.pop("realm", "")
    where = urlsplit(realm)
    is_safe = where.scheme == "https" or (where.scheme == "http" and _is_loopback(where.hostname))
    if not challenge.startswith("Bearer ") or not is_safe:
        return None
    asked = {key: parts[key] for key in ("service", "scope") if key in parts}
    try:
        with urllib.request.urlopen(f"{realm}?{urlencode(asked)}", timeout=_TIMEOUT_S) as answer:
            given = parse_json(answer.read())
    except urllib.error.HTTPError:
        return None
    if not isinstance(given, dict):
        return None
    return str(given.get("token") or given.get("access_token") or "") or None


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False

"""Errors of the API server, in our words."""

import json
from collections.abc import Iterator
from typing import Any

from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.units import format_bytes

RBAC_PAGE = "launch-kubernetes#rbac-permissions"

Object = dict[str, Any]

_TOO_LARGE = ("Too long: must have at most", "request is too large", "Request entity too large")
"""Words of the API server's validation, of etcd, and of the API server's reader of requests."""
_ANONYMOUS = 'User "system:anonymous"'
_MOST_NAMED = 3
"""Parts of an object that is too large; the rest is seldom what makes it so."""


class ExistsError(RequestError):
    """An object of this name is there already."""


class ApiUncertainError(CapacityError):
    """The API server did not answer: what was asked for may have been done.

    Args:
        status: HTTP status of an answer that says no more; None: there was none.
        words: What the answer says.
    """

    def __init__(self, text: str, *, status: int | None = None, words: str = "") -> None:
        super().__init__(text)
        self.status, self.words = status, words


class ForbiddenError(AccessError):
    """The API server knows the user, and the user's roles lack a right.

    Args:
        is_anonymous: There is no user: the request had no credentials.
    """

    def __init__(self, text: str, *, is_anonymous: bool) -> None:
        super().__init__(text, page=RBAC_PAGE)
        self.is_anonymous = is_anonymous


class NodeSilentError(CapacityError):
    """The API server does not reach a node's kubelet."""


class NoSuchObjectError(ShardyardError):
    """A path of the API server, or an object, is not there.

    Args:
        name: Of the object; empty: the path itself is unknown.
    """

    def __init__(self, words: str, *, name: str) -> None:
        super().__init__(words)
        self.name = name
        self.is_kind_unknown = not name


def api_error(error: Any, *, context: str | None, namespace: str) -> ShardyardError:
    """The error for an ``ApiException`` of the official client."""
    words = _status_message(error)
    where = f"context {context!r}, namespace {namespace!r}"
    if error.status == 404:
        return NoSuchObjectError(words, name=_missing_name(error))
    if error.status == 401:
        return AccessError(
            f"{where}: the API server does not accept your credentials. They are missing or "
            "have expired. Log in again (EKS: aws sso login, or new keys), then see that "
            f"kubectl --context {context} auth whoami answers.",
            page=RBAC_PAGE,
        )
    # Webhooks deny with 403 too, where advice on rights would be wrong.
    if "admission webhook" in words and "denied the request" in words:
        return RequestError(
            f"{where}: {words}. A policy of the cluster rejects the object, with any rights "
            "you have. Change what the policy names in the recipe (launch --dry-run prints the "
            "object), or ask the cluster's administrator."
        )
    if error.status == 403 and "exceeded quota" in words:
        return CapacityError(
            f"{where}: {words}. The namespace's quota is used up. Wait for other jobs, use "
            "fewer cluster.nodes, or have the quota raised."
        )
    if error.status == 403 and _ANONYMOUS in words:
        return ForbiddenError(
            f"{where}: {words}. Your kubeconfig sends no credentials for this context. Log in "
            "(EKS: aws eks update-kubeconfig), then see that "
            f"kubectl --context {context} auth whoami answers.",
            is_anonymous=True,
        )
    if error.status == 403:
        return ForbiddenError(
            f"{where}: {words}. Your role lacks this right. Have an administrator grant it; "
            "docs/launch-kubernetes.md lists all that is needed.",
            is_anonymous=False,
        )
    if error.status == 409:
        return ExistsError(f"{where}: {words}.")
    if error.status == 429 or error.status >= 500:
        return ApiUncertainError(
            f"{where}: the API server answered {error.status} ({words}). It is overloaded or "
            "broken now. Try again in a minute.",
            status=error.status,
            words=words,
        )
    return RequestError(
        f"{where}: the API server refuses the request ({error.status}): {words}. Change what "
        "it names in the recipe; launch --dry-run prints what is sent."
    )


def size_error(error: ShardyardError, item: Object) -> RequestError | None:
    """The error for an object that is too large, with its largest parts; None: it is not that.

    Args:
        error: Of the object's creation; the API server's own words do not say what is large.
    """
    if not any(words in str(error) for words in _TOO_LARGE):
        return None
    sizes = sorted(_sizes(item), key=lambda each: -each[1])[:_MOST_NAMED]
    shown = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes)
    # 1.5 MiB is etcd's own limit on a request.
    limit = "1 MiB of data" if item["kind"] == "ConfigMap" else "about 1.5 MiB"
    return RequestError(
        f"{item['kind']} {item['metadata']['name']} has {format_bytes(len(json.dumps(item)))}, and "
        f"the cluster accepts {limit} in one. Its largest parts are {shown}. Move long lists of "
        "the recipe into files on a volume, and code into the image (launch.image)."
    )


def _sizes(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Each text of an object, by its path, in bytes."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _sizes(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            named = each.get("name") if isinstance(each, dict) else None
            yield from _sizes(each, f"{path}[{named or index}]")
    elif isinstance(value, str):
        yield path, len(value.encode())


def _status_message(error: Any) -> str:
    try:
        words = parse_json(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        # A proxy answers with a page of its own and not with a Status.
        words = error.reason or "no reason given"
    return str(words).strip().rstrip(".")


def _missing_name(error: Any) -> str:
    """Name of the object that is missing; empty: a 404 of the path, whose Status names none."""
    try:
        details = parse_json(error.body).get("details") or {}
    except (TypeError, ValueError, AttributeError):
        return ""
    return str(details.get("name") or "")

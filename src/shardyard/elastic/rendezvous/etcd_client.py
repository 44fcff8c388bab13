"""etcd's version 3 API, as far as a rendezvous needs it, through its servers' JSON gateway.

It uses Python's own HTTP. python-etcd3 was last released in 2020. etcd3gw speaks to the same
gateway and brings four packages for what is one POST here. No proxy is used: etcd is next to
the nodes.

Source: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/ (paths, base64, numbers as text)
and etcd's api/v3rpc/rpctypes/error.go (codes and words of errors).
"""

import base64
import json
import os
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from shardyard.config.endpoints import EtcdEndpoint
from shardyard.errors import AccessError, RequestError
from shardyard.io.files import parse_json

_PAGE = "launch#etcd-rendezvous"

_TIMEOUT_S = 3.0
"""For one answer of one server; a reachable one needs milliseconds."""
_UNAVAILABLE = (4, 8, 14)
"""gRPC codes of a server that cannot answer now: too late, out of space, no leader."""
_UNAUTHENTICATED, _DENIED, _NOT_FOUND = 16, 7, 5
_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)
"""A server that restarts ends a connection so, and one that misses a certificate: its alert is
often lost on the way (TLS 1.3 tells the client only after its first words)."""

Operation = dict[str, Any]


class EtcdSilentError(RendezvousConnectionError):
    """No server of an etcd answers now; asking again later may help."""


class LeaseEndedError(Exception):
    """A key was to be put under a lease that is not there."""


class _ErrorResponse(Exception):  # noqa: N818  answered by the caller
    """An answer that is an error."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class _Silent(Exception):  # noqa: N818  the next server is asked
    """One server did not answer, or cannot now."""


@dataclass(frozen=True)
class KeyValue:
    """A key with its value."""

    key: str
    value: bytes
    revision: int
    """Revision of its last change."""


class Etcd:
    """A cluster of etcd; safe to use from several threads."""

    def __init__(self, endpoint: EtcdEndpoint, environ: Mapping[str, str] = os.environ) -> None:
        """Set up the client without a request.

        Args:
            environ: Holds etcdctl's variables too: ``ETCDCTL_USER``, ``ETCDCTL_PASSWORD``, and
                the files ``ETCDCTL_CACERT``, ``ETCDCTL_CERT``, ``ETCDCTL_KEY``.

        Raises:
            RequestError: These contradict the place, or a file cannot be used.
        """
        self._endpoint = endpoint
        self._servers = deque(endpoint.endpoints)
        self._tls = _tls(endpoint, environ)
        self._end_hint = _end_hint(endpoint, environ)
        self._login = _login(environ)
        self._token: str | None = None

    def __str__(self) -> str:
        return str(self._endpoint)

    def transact(
        self,
        then: Sequence[Operation],
        *,
        only_if: Sequence[Operation] = (),
        otherwise: Sequence[Operation] = (),
    ) -> tuple[bool, list[list[KeyValue]]]:
        """Do all of ``then`` at once if all conditions hold, else all of ``otherwise``.

        Returns:
            Whether they held, and for each operation done the entries that it read.

        Raises:
            LeaseEndedError: A key's lease is not there; no operation was done.
        """
        request = {"compare": list(only_if), "success": list(then), "failure": list(otherwise)}
        try:
            answer = self.call("/v3/kv/txn", request)
        except _ErrorResponse as error:
            if error.code == _NOT_FOUND:
                raise LeaseEndedError(str(error)) from error
            raise self._unexpected("/v3/kv/txn", error) from error
        found = [_entries(response) for response in answer.get("responses", [])]
        return bool(answer.get("succeeded")), found

    def grant_lease(self, ttl_s: int, lease: int = 0) -> int:
        """A lease that ends ``ttl_s`` after it was last kept; one that is there already will do.

        Args:
            lease: Its number; 0: any free one.
        """
        try:
            return int(self.call("/v3/lease/grant", {"TTL": ttl_s, "ID": lease})["ID"])
        except _ErrorResponse as error:
            if lease and "already exists" in str(error):
                return lease
            raise self._unexpected("/v3/lease/grant", error) from error

    def keep_lease(self, lease: int) -> bool:
        """Whether it was still there, and now lasts for its whole time again."""
        answer = self.call("/v3/lease/keepalive", {"ID": lease})
        # etcd omits zeros: the answer for a lease that has ended has no TTL.
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def end_lease(self, lease: int) -> None:
        """Remove it with all its keys; one that has ended is no error."""
        try:
            self.call("/v3/lease/revoke", {"ID": lease})
        except _ErrorResponse as error:
            if error.code != _NOT_FOUND:
                raise self._unexpected("/v3/lease/revoke", error) from error

    def call(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the first server that answers.

        Raises:
            EtcdSilentError: None answers now.
            AccessError: User and password, or what they may do, do not suffice.
            RequestError: This is no etcd that speaks version 3, or its certificate is not trusted.
        """
        silent = []
        for server in tuple(self._servers):
            try:
                return self._ask(server, path, request)
            except _Silent as error:
                silent.append(f"{server[0]}:{server[1]}: {error}")
                # Later calls begin with a server that answered, and do not wait for this one.
                self._servers.rotate(-1)
        raise EtcdSilentError(f"{self} does not answer ({'; '.join(silent)})")

    def _ask(
        self, server: tuple[str, int], path: str, request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Call one server, as ``call`` does; retry once if an earlier login's token has ended."""
        is_new = self._token is None
        try:
            return self._post(server, path, request, token=self._token or self._log_in(server))
        except _ErrorResponse as error:
            # After a change of users or roles, etcd rejects older tokens with this text and the
            # code of a wrong password.
            is_stale = error.code == _UNAUTHENTICATED or "revision of auth store" in str(error)
            if not is_stale or is_new:
                raise self._explained(path, error) from error
        self._token = None
        try:
            return self._post(server, path, request, token=self._log_in(server))
        except _ErrorResponse as error:
            raise self._explained(path, error) from error

    def _log_in(self, server: tuple[str, int]) -> str | None:
        if self._login is None:
            return None
        name, password = self._login
        request = {"name": name, "password": password}
        self._token = str(self._post(server, "/v3/auth/authenticate", request, token=None)["token"])
        return self._token

    def _post(
        self, server: tuple[str, int], path: str, request: Mapping[str, Any], *, token: str | None
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = token
        status, body = self._exchange(server, "POST", path, json.dumps(request).encode(), headers)
        # A lease is kept by a stream, which answers with one JSON object a line; one was asked for.
        try:
            answer = parse_json(body.splitlines()[0])
        except (ValueError, IndexError):
            raise self._no_version_3(server, status) from None
        answer = answer if isinstance(answer, dict) else {}
        if status == 200:
            return answer
        code, words = answer.get("code"), str(answer.get("message") or answer.get("error"))
        if not isinstance(code, int):
            raise self._no_version_3(server, status)
        if code in _UNAVAILABLE:
            raise _Silent(words)
        raise _ErrorResponse(code, words)

    def _exchange(
        self, server: tuple[str, int], method: str, path: str, body: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes]:  # fmt: skip
        connection = (
            HTTPConnection(*server, timeout=_TIMEOUT_S)
            if self._tls is None
            else HTTPSConnection(*server, timeout=_TIMEOUT_S, context=self._tls)
        )
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        except _ENDED as error:  # which of them, is a matter of moments
            raise _Silent(f"it ended the connection without an answer{self._end_hint}") from error
        except ssl.SSLError as error:
            raise RequestError(
                f"TLS with etcd at {server[0]}:{server[1]} failed ({error}). Give the file of its "
                "authority in ETCDCTL_CACERT, and a certificate of this client, where it asks for "
                "one, in ETCDCTL_CERT and ETCDCTL_KEY. Without TLS its address is etcd://..."
            ) from error
        except (OSError, HTTPException) as error:
            raise _Silent(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _no_version_3(self, server: tuple[str, int], status: int) -> RequestError:
        """Why an answer is none of version 3's API."""
        where = f"{server[0]}:{server[1]}"
        try:
            _, body = self._exchange(server, "GET", "/version", None, {})
            version = str(parse_json(body)["etcdserver"])
        except (_Silent, ValueError, KeyError, TypeError):
            return RequestError(
                f"what answers at {where} is not etcd (status {status}, and no /version). Nodes "
                "need it for their rendezvous. Check elastic.rendezvous: it names the port for "
                "clients, mostly 2379."
            )
        return RequestError(
            f"etcd {version} at {where} has no API of version 3 as JSON (status {status} for /v3). "
            "Use etcd 3.4 or newer, started without --enable-grpc-gateway=false."
        )

    def _explained(self, path: str, error: _ErrorResponse) -> Exception:
        """Convert a rejection to an error for users; unchanged if only the caller knows why."""
        words = str(error)
        if "authentication is not enabled" in words:
            return AccessError(
                f"{self} asks for no password, but ETCDCTL_USER is set. Unset it, or switch it on "
                "there (`etcdctl auth enable`).",
                page=_PAGE,
            )
        if "authentication failed" in words or "user name is empty" in words:
            who = f"user {self._login[0]}" if self._login else "a client without user"
            return AccessError(
                f"{self} rejected {who} ({words}). Nodes need it for their rendezvous. Give "
                "ETCDCTL_USER and ETCDCTL_PASSWORD by `secrets` of the recipe, and check them "
                "with `etcdctl get x`.",
                page=_PAGE,
            )
        if error.code == _DENIED:
            who = f"user {self._login[0]}" if self._login else "a client without user"
            return AccessError(
                f"{self} lets {who} not do what agents do ({path}: {words}). Give its role "
                "`etcdctl role grant-permission ROLE readwrite --prefix /shardyard/`.",
                page=_PAGE,
            )
        if error.code == _UNAUTHENTICATED:
            return AccessError(
                f"{self} rejected a token that it had just given out ({words}).", page=_PAGE
            )
        return error

    def _unexpected(self, path: str, error: _ErrorResponse) -> RequestError:
        return RequestError(f"{self} rejected {path}: {error} (gRPC code {error.code}).")


def put(key: str, value: bytes, *, lease: int) -> Operation:
    """Set a key that vanishes with its lease."""
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def get(key: str) -> Operation:
    """Read one key."""
    return {"request_range": {"key": _b64(key)}}


def get_all(prefix: str) -> Operation:
    """Read all keys that begin so."""
    return {"request_range": _range(prefix)}


def delete(key: str) -> Operation:
    """Remove one key."""
    return {"request_delete_range": {"key": _b64(key)}}


def delete_all(prefix: str) -> Operation:
    """Remove all keys that begin so."""
    return {"request_delete_range": _range(prefix)}


def is_at(key: str, revision: int) -> Operation:
    """Condition: its last change was this one; 0: there is no such key."""
    return {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def is_empty(prefix: str) -> Operation:
    """Condition: no key begins so."""
    return {**_range(prefix), "target": "VERSION", "result": "EQUAL", "version": "0"}


def _range(prefix: str) -> dict[str, str]:
    # etcd's range_end is exclusive, so it is the first key after all that have the prefix.
    last = prefix.encode()
    return {"key": _b64(prefix), "range_end": _b64(last[:-1] + bytes([last[-1] + 1]))}


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _entries(response: Mapping[str, Any]) -> list[KeyValue]:
    """Return the entries that a transaction's operation has read; etcd leaves zeros out.

    Operations that do not read return none.
    """
    found = response.get("response_range", {}).get("kvs", [])
    return [
        KeyValue(
            key=base64.b64decode(each["key"]).decode(),
            value=base64.b64decode(each.get("value", "")),
            revision=int(each["mod_revision"]),
        )
        for each in found
    ]


def _login(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return user and password, as etcdctl has them: ``ETCDCTL_USER`` may be user:password."""
    user, colon, password = environ.get("ETCDCTL_USER", "").partition(":")
    if not user:
        return None
    if not colon:
        password = environ.get("ETCDCTL_PASSWORD", "")
    if not password:
        raise RequestError(
            f"ETCDCTL_USER={user} but ETCDCTL_PASSWORD is not in the environment. Agents log in to "
            "etcd with both. Add it to `secrets` of the recipe."
        )
    return user, password


def _tls(endpoint: EtcdEndpoint, environ: Mapping[str, str]) -> ssl.SSLContext | None:
    names = ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY")
    authority, certificate, key = (environ.get(name) or None for name in names)
    if not endpoint.is_encrypted:
        if given := [name for name in names if environ.get(name)]:
            raise RequestError(
                f"{' and '.join(given)} in the environment, but elastic.rendezvous says etcd://, "
                "which is without TLS. Write etcds://, or unset them."
            )
        return None
    if bool(certificate) != bool(key):
        raise RequestError(
            "of ETCDCTL_CERT and ETCDCTL_KEY one is set. A client shows a certificate with its "
            "key. Set both or none."
        )
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate and key:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # also ssl.SSLError
        raise RequestError(
            f"a file of ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY cannot be used: {error}. They "
            "name PEM files on every node."
        ) from error
    return context


def _end_hint(endpoint: EtcdEndpoint, environ: Mapping[str, str]) -> str:
    """Why a server may end a connection that it would answer from another client."""
    if not endpoint.is_encrypted:
        return "; one with TLS does so, and its address is etcds://..."
    if environ.get("ETCDCTL_CERT"):
        return ""
    return (
        "; one that asks for a certificate of this client does so: give it in ETCDCTL_CERT and "
        "ETCDCTL_KEY"
    )

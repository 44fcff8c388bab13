"""What etcd's servers answer, also wrongly, and what the user is then told."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shardyard.config.endpoints import EtcdEndpoint
from shardyard.elastic.rendezvous.etcd_client import Etcd, EtcdSilentError, get
from shardyard.errors import AccessError, RequestError

Reply = Callable[[str, dict[str, Any], str | None], tuple[int, Any]]
"""(path, request, token) -> (status, answer)."""


@contextmanager
def server_that(reply: Reply) -> Iterator[int]:
    """The port of an HTTP server on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            self._answer(*reply(self.path, request, self.headers["Authorization"]))

        def do_GET(self) -> None:
            self._answer(*reply(self.path, {}, None))

        def _answer(self, status: int, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def at(*ports: int, environ: Mapping[str, str] | None = None) -> Etcd:
    place = EtcdEndpoint(tuple(("127.0.0.1", port) for port in ports), is_encrypted=False)
    return Etcd(place, environ or {})


def look(etcd: Etcd) -> Any:
    return etcd.transact([get("k")])


def closed_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_port


def empty(_path: str, _request: dict[str, Any], _token: str | None) -> tuple[int, Any]:
    return 200, {"header": {}, "succeeded": True, "responses": [{"response_range": {}}]}


def test_the_next_server_is_asked_where_one_does_not_answer() -> None:
    with server_that(empty) as port:
        etcd = at(closed_port(), port)
        assert look(etcd) == (True, [[]])
        assert look(etcd) == (True, [[]])


def test_if_none_answers_all_are_named() -> None:
    ports = closed_port(), closed_port()
    with pytest.raises(EtcdSilentError, match="does not answer") as silent:
        look(at(*ports))
    assert all(f"127.0.0.1:{port}: [Errno 111]" in str(silent.value) for port in ports)


@pytest.mark.parametrize(
    "error",
    [ssl.SSLEOFError(), ssl.SSLZeroReturnError(), ConnectionResetError(), BrokenPipeError()],
)
def test_a_connection_that_tls_ended_however_asks_for_a_certificate(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def end(*_: Any) -> None:
        raise error

    monkeypatch.setattr(HTTPSConnection, "request", end)
    etcd = Etcd(EtcdEndpoint((("127.0.0.1", 2379),), is_encrypted=True), {})
    with pytest.raises(EtcdSilentError, match="ETCDCTL_CERT and ETCDCTL_KEY"):
        look(etcd)


def test_a_server_without_a_leader_is_silent_for_now() -> None:
    def reply(*_: Any) -> tuple[int, Any]:
        return 503, {"error": "etcdserver: no leader", "code": 14}

    with server_that(reply) as port, pytest.raises(EtcdSilentError, match="no leader"):
        look(at(port))


def test_an_etcd_of_version_2_is_told_as_such() -> None:
    def reply(path: str, *_: Any) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"etcdserver": "2.3.8", "etcdcluster": "2.3.0"}
        return 404, b"404 page not found\n"

    words = r"etcd 2\.3\.8 at 127.* has no API of version 3 .* Use etcd 3\.4 or newer"
    with server_that(reply) as port, pytest.raises(RequestError, match=words):
        look(at(port))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"nothing here", r"is not etcd \(status 404.*mostly 2379"),
        (200, b"<html>", r"is not etcd \(status 200"),
    ],
)
def test_what_is_no_etcd_is_told_as_such(status: int, body: bytes, words: str) -> None:
    with server_that(lambda *_: (status, body)) as port, pytest.raises(RequestError, match=words):
        look(at(port))


LOGIN = {"ETCDCTL_USER": "ann", "ETCDCTL_PASSWORD": "s3cret"}


def test_a_token_that_has_ended_is_taken_anew() -> None:
    given: list[str] = []

    def reply(path: str, request: dict[str, Any], token: str | None) -> tuple[int, Any]:
        if path == "/v3/auth/authenticate":
            assert request == {"name": "ann", "password": "s3cret"}
            given.append(f"token-{len(given)}")
            return 200, {"token": given[-1]}
        if token != given[-1]:
            return 401, {"error": "etcdserver: invalid auth token", "code": 16}
        return empty(path, request, token)

    with server_that(reply) as port:
        etcd = at(port, environ=LOGIN)
        look(etcd)
        look(etcd)
        assert len(given) == 1
        given.append("of a server that was started again")
        look(etcd)
        assert len(given) == 3


@pytest.mark.parametrize(
    ("code", "answer", "words"),
    [
        (3, "etcdserver: authentication failed, invalid user ID or password",
         "rejected user ann .*Give ETCDCTL_USER and ETCDCTL_PASSWORD by `secrets`"),
        (7, "etcdserver: permission denied", "lets user ann not do .* grant-permission ROLE"),
        (9, "etcdserver: authentication is not enabled", "asks for no password, but ETCDCTL_USER"),
        (16, "etcdserver: invalid auth token", "rejected a token that it had just given out"),
    ],
)  # fmt: skip
def test_who_is_not_let_in_is_told_how(code: int, answer: str, words: str) -> None:
    def reply(path: str, *_: Any) -> tuple[int, Any]:
        if path == "/v3/auth/authenticate" and code != 3 and code != 9:
            return 200, {"token": "t"}
        return 400, {"error": answer, "code": code}

    with server_that(reply) as port, pytest.raises(AccessError, match=words) as refused:
        look(at(port, environ=LOGIN))
    assert "s3cret" not in str(refused.value)


def test_a_client_without_user_is_told_to_name_one() -> None:
    def reply(*_: Any) -> tuple[int, Any]:
        return 400, {"error": "etcdserver: user name is empty", "code": 3}

    with server_that(reply) as port, pytest.raises(AccessError, match="rejected a client without"):
        look(at(port))


@pytest.mark.parametrize(
    ("is_encrypted", "environ", "words"),
    [
        (False, {"ETCDCTL_CACERT": "/ca", "ETCDCTL_KEY": "/k"},
         "ETCDCTL_CACERT and ETCDCTL_KEY in the environment, but .* Write etcds://"),
        (False, {"ETCDCTL_USER": "ann"}, "ETCDCTL_USER=ann but ETCDCTL_PASSWORD is not"),
        (True, {"ETCDCTL_CERT": "/c"}, "of ETCDCTL_CERT and ETCDCTL_KEY one is set"),
        (True, {"ETCDCTL_CACERT": "/no/such"}, "cannot be used: .*No such file"),
    ],
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_refused(
    is_encrypted: bool, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        Etcd(EtcdEndpoint((("127.0.0.1", 1),), is_encrypted), environ)


def test_a_password_may_stand_beside_its_user() -> None:
    def reply(path: str, request: dict[str, Any], token: str | None) -> tuple[int, Any]:
        if path == "/v3/auth/authenticate":
            assert request == {"name": "ann", "password": "a:b"}
            return 200, {"token": "t"}
        return empty(path, request, token)

    with server_that(reply) as port:
        look(at(port, environ={"ETCDCTL_USER": "ann:a:b"}))


def test_a_server_without_tls_is_told_as_such() -> None:
    with server_that(empty) as port:
        place = EtcdEndpoint((("127.0.0.1", port),), is_encrypted=True)
        with pytest.raises(RequestError, match=r"TLS with etcd at 127.* Without TLS .* etcd://"):
            look(Etcd(place, {}))

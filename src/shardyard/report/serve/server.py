"""Read-only page of all runs in a folder, on loopback: `shardyard serve`.

It only answers GET. A browser's request is looked up among the existing runs, so no path
comes from outside. A page of another site cannot read the answers, as foreign host names
are rejected and only the page's own scripts run.
"""

import gzip
import json
import socket
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardyard.control.follow import describe_event
from shardyard.errors import RequestError, StorageError
from shardyard.io.sanitize import sanitize
from shardyard.report.serve.index import EVALUATION, KEYS, X_KEYS, Curves, Index
from shardyard.rundir.jsonl import json_value, read_lines_backwards
from shardyard.rundir.layout import RunDir

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_EVENTS = 200
_MOST_RUNS = 1000
_ZIPPED_FROM_BYTES = 1000
_PARTS = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


class HttpError(Exception):
    """Request that the server rejects."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Pages:
    """Responses by path; independent of HTTP."""

    def __init__(self, folder: Path) -> None:
        self.index = Index(folder)
        self._curves = Curves()

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
        """Return the content of a path and its type.

        Raises:
            Refused: The path does not exist.
        """
        if path in _PARTS:
            name, kind = _PARTS[path]
            return _part(name), kind
        match path:
            case "/api/runs":
                content: Any = [vars(row) for row in self.index.rows()]
            case "/api/curves":
                content = self._read_curves(query)
            case "/api/events":
                content = self._events(query)
            case _:
                raise HttpError(404, "there is no such page")
        return json.dumps(json_value(content), allow_nan=False).encode(), "application/json"

    def _read_curves(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        y, x = query.get("y", ["loss"])[0], query.get("x", ["step"])[0]
        if x not in X_KEYS or not (y in KEYS or y.startswith(EVALUATION)):
            raise HttpError(400, "x and y name no number of a step")
        return self._curves.read(self._runs(query), y=y, x=x)

    def _events(self, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for event in read_lines_backwards(self._runs(query)[0].events):
            words = _words(event)
            if words and len(events) < _MOST_EVENTS:
                events.append({"t": event.get("t"), "kind": event["kind"], "words": words})
        return events

    def _runs(self, query: Mapping[str, list[str]]) -> list[RunDir]:
        ids = query.get("run", [])
        if not ids or len(ids) > _MOST_RUNS:
            raise HttpError(400, f"name runs, at most {_MOST_RUNS}")
        known = {row.id for row in self.index.rows()}
        if unknown := [each for each in ids if each not in known]:
            raise HttpError(404, f"there is no run {sanitize(unknown[0])[:100]}")
        return [RunDir(self.index.folder / each) for each in ids]


def _words(event: dict[str, Any]) -> str | None:
    try:
        return describe_event(event)
    except (KeyError, TypeError, ValueError):  # of another version
        return str(event["kind"])


@cache
def _part(name: str) -> bytes:
    return (files("shardyard.report.serve") / name).read_bytes()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        """Answer, or say why not."""
        if not self._is_for_us():
            self._send(403, b"this name is not served here", "text/plain")
            return
        url = urlsplit(self.path)
        try:
            body, kind = self.server.pages.answer(url.path, parse_qs(url.query))
        except HttpError as refused:
            self._send(refused.code, str(refused).encode(), "text/plain; charset=utf-8")
            return
        except (OSError, StorageError) as error:
            text = sanitize(str(error)).encode(errors="replace")
            self._send(500, text, "text/plain; charset=utf-8")
            return
        self._send(200, body, kind)

    def _is_for_us(self) -> bool:
        """Whether the name is ours: one that an attacker's name server points here is not."""
        if not self.server.is_on_loopback:
            return True
        host = self.headers.get("Host", "").lower()
        names = ("127.0.0.1", "localhost", "[::1]", self.server.name)
        return host in {f"{name}:{self.server.server_port}" for name in names}

    def _send(self, code: int, body: bytes, kind: str) -> None:
        tag = f'"{sha256(body).hexdigest()[:20]}"'
        if code == 200 and self.headers.get("If-None-Match") == tag:
            self.send_response(304)
            self.send_header("ETag", tag)
            self.end_headers()
            return
        zips = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > _ZIPPED_FROM_BYTES
        if zips:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if zips:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A page that looks every two seconds would fill a terminal."""


class Server(ThreadingHTTPServer):
    """Listens; its threads end with the process."""

    daemon_threads = True

    def __init__(self, folder: Path, *, host: str, port: int) -> None:
        """Listen.

        Raises:
            RequestError: The address cannot be listened at.
        """
        self.pages = Pages(folder)
        host = host.removeprefix("[").removesuffix("]")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            self.is_on_loopback = ip_address(str(address[0]).partition("%")[0]).is_loopback
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise RequestError(
                f"{host}:{port} cannot be listened at: {error}. Another process has the port, or "
                "the address is not this machine's. Give --port 0 for any free one."
            ) from error
        self.name = f"[{host}]" if ":" in host else host
        """Host as a browser writes it."""

    def server_bind(self) -> None:
        """Bind without HTTPServer's search for this machine's name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        """To be opened in a browser."""
        return f"http://{self.name}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that leaves in the middle of an answer."""
        del request, client_address

"""Read-only page of all runs in a folder, on loopback: `shardyard serve`.

It only answers GET. A browser's request is looked up among the existing runs, so no path
comes from outside. A page of another site cannot read the answers, as foreign host names
are rejected and only the page's own scripts run. Pages in the folders of runs run none.
"""

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from socketserver import TCPServer
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from shardyard.errors import RequestError, StorageError
from shardyard.io.sanitize import sanitize
from shardyard.report.compare.page import write_comparison
from shardyard.report.html import CSS
from shardyard.report.run_data import read_run
from shardyard.report.serve.curves import Curves, can_draw
from shardyard.report.serve.details import (
    PAGES,
    SettingsCache,
    inside,
    read_events,
    read_log,
    read_page,
)
from shardyard.report.serve.index import Index
from shardyard.report.summary import summarize
from shardyard.rundir.jsonl import json_value
from shardyard.rundir.layout import RunDir

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_RUNS, _MOST_METRICS = 1000, 30
_QUIET_S = 0.3
"""Time without a request after which speeds of runs are measured."""
_HTML = "text/html; charset=utf-8"
_ZIPPED_FROM_BYTES = 1000
_PARTS = {
    "/": ("page.html", _HTML),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "api", "charts", "parallel", "table", "run")
    },
}
RUN_PAGES = "/runs/"
"""Begins the addresses of pages in folders of runs."""
COMPARISON, MOST_COMPARED = "/comparison", 12
"""Address of the page that compares runs, and the most runs on it."""
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
_POLICY_OF_A_RUNS_PAGE = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"


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
        self._settings = SettingsCache()

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
        """Return the content of a path and its type.

        Raises:
            HttpError: The path does not exist.
        """
        if path in _PARTS:
            name, kind = _PARTS[path]
            return _part(name), kind
        if path.startswith(RUN_PAGES):
            return self._page_of_a_run(path), _HTML
        if path == COMPARISON:
            return self._comparison(self._runs(query)), _HTML
        match path:
            case "/api/runs":
                content: Any = [
                    {**vars(row), "refined": self._curves.refinements(row.id)}
                    for row in self.index.rows()
                ]
            case "/api/settings":
                runs = [self._run(row.id) for row in self.index.rows()[:_MOST_RUNS]]
                content = self._settings.differing(runs)
            case "/api/curves":
                # its numbers are finite already, and checking them again takes as long as the rest
                curves = self._read_curves(query)
                return json.dumps(curves, allow_nan=False).encode(), "application/json"
            case "/api/events":
                content = read_events(self._runs(query)[0])
            case "/api/findings":
                content = summarize(read_run(self._runs(query)[0])).findings
            case "/api/log":
                run = self._runs(query)[0]
                content = read_log(run, _number(query, "attempt"), _number(query, "rank"))
            case "/api/pages":
                content = self._pages(self._runs(query)[0])
            case _:
                raise HttpError(404, "page not found")
        return json.dumps(json_value(content), allow_nan=False).encode(), "application/json"

    def _read_curves(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        ys, x = query.get("y", ["loss"]), query.get("x", ["step"])[0]
        if len(ys) > _MOST_METRICS or not all(can_draw(y, x) for y in ys):
            raise HttpError(400, "x and y name no number of a step")
        sharing, runs = min(_number(query, "of") or 0, _MOST_RUNS), self._runs(query)
        curves = {y: self._curves.read(runs, y=y, x=x, sharing=sharing) for y in ys}
        empty: dict[str, list[Any]] = {"x": [], "y": []}  # shorter than a gap at each step
        return {
            "metrics": self._curves.keys(runs, sharing=sharing),
            "curves": {
                y: {
                    run_id: curve if any(value is not None for value in curve["y"]) else empty
                    for run_id, curve in of_runs.items()
                }
                for y, of_runs in curves.items()
            },
        }

    def refine(self) -> bool:
        """Read more of a run than a request had time for; return whether there was one."""
        return self._curves.refine() or self.index.measure_speed()

    def _pages(self, run: RunDir) -> list[dict[str, str]]:
        return [
            {"title": title, "address": f"{RUN_PAGES}{quote(run.run_id, safe='')}/{name}"}
            for name, title in PAGES.items()
            if inside(run, run.path / name)
        ]

    def _page_of_a_run(self, path: str) -> bytes:
        run_id, _, name = path.removeprefix(RUN_PAGES).partition("/")
        run = self._runs({"run": [unquote(run_id)]})[0]
        content = read_page(run, name)
        if content is None:
            raise HttpError(404, "the run has no such page")
        return content

    def _comparison(self, runs: list[RunDir]) -> bytes:
        """Return the page of `shardyard compare`, which needs no other file."""
        if not 2 <= len(runs) <= MOST_COMPARED:
            raise HttpError(400, f"name 2 to {MOST_COMPARED} runs")
        with TemporaryDirectory() as folder:
            page = Path(folder) / "page.html"
            try:
                write_comparison([[run] for run in runs], page, target={})
            except RequestError as error:
                raise HttpError(400, sanitize(str(error))) from error
            return page.read_bytes()

    def _runs(self, query: Mapping[str, list[str]]) -> list[RunDir]:
        ids = query.get("run", [])
        if not ids or len(ids) > _MOST_RUNS:
            raise HttpError(400, f"name runs, at most {_MOST_RUNS}")
        known = {row.id for row in self.index.rows()}
        if unknown := [each for each in ids if each not in known]:
            raise HttpError(404, f"run {sanitize(unknown[0])[:100]} does not exist")
        return [self._run(each) for each in ids]

    def _run(self, run_id: str) -> RunDir:
        return RunDir(self.index.folder / run_id)


def _number(query: Mapping[str, list[str]], name: str) -> int | None:
    """A whole number of a query; None: it is not given.

    Raises:
        HttpError: It is no number.
    """
    text = query.get(name, [""])[0]
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise HttpError(400, f"{name} is a whole number")
    return int(text)


@cache
def _part(name: str) -> bytes:
    content = (files("shardyard.report.serve") / name).read_bytes()
    return CSS.encode() + content if name.endswith(".css") else content


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    # head and content in one packet: the second of two would wait 40 ms for an acknowledgement
    wbufsize = 2**16
    disable_nagle_algorithm = True
    server: "Server"

    def do_GET(self) -> None:
        """Answer, or say why not."""
        if not self._is_for_us():
            self._send(403, b"this name is not served here", "text/plain")
            return
        url = urlsplit(self.path)
        try:
            with self.server.answering():
                body, kind = self.server.pages.answer(url.path, parse_qs(url.query))
        except HttpError as refused:
            self._send(refused.code, str(refused).encode(), "text/plain; charset=utf-8")
            return
        except (OSError, StorageError) as error:
            text = sanitize(str(error)).encode(errors="replace")
            self._send(500, text, "text/plain; charset=utf-8")
            return
        is_written = url.path.startswith(RUN_PAGES) or url.path == COMPARISON
        self._send(200, body, kind, policy=_POLICY_OF_A_RUNS_PAGE if is_written else _POLICY)

    def _is_for_us(self) -> bool:
        """Whether the name is ours: one that an attacker's name server points here is not."""
        if not self.server.is_on_loopback:
            return True
        host = self.headers.get("Host", "").lower()
        names = ("127.0.0.1", "localhost", "[::1]", self.server.name)
        return host in {f"{name}:{self.server.server_port}" for name in names}

    def _send(self, code: int, body: bytes, kind: str, *, policy: str = _POLICY) -> None:
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
        self.send_header("Content-Security-Policy", policy)
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
        self._lock = threading.Lock()
        self._requests = 0
        self._last_request_s: float | None = None
        self._is_closed = threading.Event()
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
        threading.Thread(target=self._refine, daemon=True).start()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request: speeds of runs are measured between requests only."""
        with self._lock:
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                self._last_request_s = time.monotonic()

    def _refine(self) -> None:
        while not self._is_closed.is_set():
            if not (self._is_quiet() and self.pages.refine()):
                self._is_closed.wait(_QUIET_S)

    def _is_quiet(self) -> bool:
        last_s = self._last_request_s
        return self._requests == 0 and last_s is not None and time.monotonic() - last_s > _QUIET_S

    def server_close(self) -> None:
        self._is_closed.set()
        super().server_close()

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

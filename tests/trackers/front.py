"""A door in front of a server on loopback, which can be shut, slow or wrong."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Front:
    """What came through, and how each is answered."""

    def __init__(self, behind: str) -> None:
        self.behind = urlsplit(behind)
        self.address = ""
        self.answers: int | float | None = None
        """None: as the server behind does; a status code; or seconds of silence before it."""
        self.keys: list[str] = []
        """Authorization of each request."""
        self.requests: list[tuple[str, bytes]] = []
        """Path and body of each."""


@contextmanager
def front_of(behind: str) -> Iterator[Front]:
    """It listens while the block runs."""
    front = Front(behind)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            front.requests.append((self.path, body))
            front.keys.append(self.headers.get("Authorization") or "")
            if isinstance(front.answers, int):
                self._answer(front.answers, "text/plain", b"so it is")
                return
            if isinstance(front.answers, float):
                is_over.wait(front.answers)
            kept = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "connection", "accept-encoding")
            }
            host = f"{front.behind.hostname}:{front.behind.port}"
            link = http.client.HTTPConnection(host, timeout=30)
            try:
                link.request(self.command, self.path, body, {**kept, "Host": host})
                answer = link.getresponse()
                kind = answer.getheader("Content-Type") or "text/plain"
                self._answer(answer.status, kind, answer.read())
            except OSError:
                self._answer(502, "text/plain", b"nobody is behind")
            finally:
                link.close()

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            try:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # who asked has left

        do_GET = do_POST = do_PUT = do_PATCH = _pass_on

        def log_message(self, *_: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    front.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield front
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def wait_until(is_so: Callable[[], object], within_s: float = 20.0) -> None:
    """Until a callable says so."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError(f"not so within {within_s} s")

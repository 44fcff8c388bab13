"""What stands before a server of S3 in tests: it hands on, or fails as it is told."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HANG_UP = (0, "")


@dataclass
class Front:
    """Requests that came by, and what goes wrong with those to come."""

    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method, path with query."""
    failures: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)
    """(method, part of the path) -> status and code of the next answers; HANG_UP closes."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of a failure."""
    drops: tuple[str, ...] = ()
    """Beginnings of headers that are left out of answers."""
    ignores: tuple[str, ...] = ()
    """Headers of requests that are not handed on, in lower case."""
    cuts_after: list[int] = field(default_factory=list)
    """Bytes of the body of a GET of an object, for one after the other: then it is cut."""

    garbles: bool = False
    """Whether bodies of objects come changed."""

    def forget(self) -> None:
        """Nothing came by, and nothing goes wrong."""
        self.requests, self.failures, self.headers = [], {}, {}
        self.drops, self.ignores, self.cuts_after, self.garbles = (), (), [], False

    def sent(self, method: str, part: str) -> int:
        return sum(1 for m, path in self.requests if m == method and part in path)


@contextmanager
def s3_front(server_url: str) -> Iterator[Front]:
    """Serve on a free port of this machine."""
    front = Front()
    there = urlsplit(server_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            front.requests.append((self.command, self.path))
            for (method, part), left in front.failures.items():
                if method == self.command and part in self.path and left:
                    self._fail(*left.pop(0))
                    return
            connection = http.client.HTTPConnection(there, timeout=20)
            told = {k: v for k, v in self.headers.items() if k.lower() not in front.ignores}
            connection.request(self.command, self.path, body, told)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                is_ours = name.lower() in ("content-length", "connection", "transfer-encoding")
                if not is_ours and not name.lower().startswith(front.drops or ("\0",)):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            is_object = self.command == "GET" and "?" not in self.path and answer.status < 300
            if is_object and front.cuts_after and not self.path.endswith("complete.json"):
                data, self.close_connection = data[: front.cuts_after.pop(0)], True
            if is_object and front.garbles and not self.path.endswith("complete.json"):
                data = bytes(byte ^ 1 for byte in data[:1]) + data[1:]
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def _fail(self, status: int, code: str) -> None:
            self.close_connection = True
            if (status, code) == HANG_UP:
                return
            body = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
            if self.command == "HEAD":
                body = b""
            self.send_response(status)
            for name, value in front.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    front.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield front
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

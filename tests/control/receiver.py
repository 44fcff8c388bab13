"""A real address that alerts are posted to, and does with them what it is told."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What came, and how each is answered: a status code, or seconds to sleep before one."""

    def __init__(self, answers: Sequence[int | float]) -> None:
        self.came: list[dict[str, Any]] = []
        self.tries = 0
        self.address = ""
        self._answers = list(answers)
        self._lock = threading.Lock()

    def answer(self, body: bytes) -> int:
        with self._lock:
            self.tries += 1
            word = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(word, float):
            time.sleep(word)
            word = 200
        if word < 300:
            self.came.append(json.loads(body))
        return word


@contextmanager
def receiver(*answers: int | float) -> Iterator[Receiver]:
    """It listens while the block runs."""
    found = Receiver(answers or (200,))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            code = found.answer(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(code)
            if code in (301, 302, 307):
                self.send_header("Location", found.address + "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_address[1]}/token-that-nobody-sees"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A connection that is cut: hands bytes on to a server of this machine, so many of each answer."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """Where it listens, and which connections break."""

    url: str = ""
    cuts: list[int] = field(default_factory=list)
    """Bytes that come back before a connection is cut, of one after the other; then all come."""
    num_cut: int = 0


@contextmanager
def cutting_proxy(server_url: str) -> Iterator[Proxy]:
    """Serve on a free port until the block ends."""
    proxy, there = Proxy(), urlsplit(server_url)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            left = proxy.cuts.pop(0) if proxy.cuts else None
            with socket.create_connection((there.hostname, there.port)) as server:
                up = threading.Thread(target=_hand_on, args=(self.request, server), daemon=True)
                up.start()
                with suppress(OSError):
                    while part := server.recv(65536):
                        self.request.sendall(part if left is None else part[:left])
                        left = None if left is None else left - len(part)
                        if left is not None and left <= 0:
                            proxy.num_cut += 1
                            break
                with suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def _hand_on(client: Any, server: socket.socket) -> None:
    with suppress(OSError):
        while part := client.recv(65536):
            server.sendall(part)
        server.shutdown(socket.SHUT_WR)

"""Registries of images on this machine: Debian's docker-registry, and ones that say one thing."""

import hashlib
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.debian_packages import need


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running_registry(folder: Path, auth: dict[str, Any] | None = None) -> Iterator[str]:
    """A registry that keeps what it has in the folder; yields its address."""
    need("docker-registry")
    address = f"127.0.0.1:{free_port()}"
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": "0.1", "storage": storage, "http": {"addr": address}}
    file = folder / "config.json"  # JSON is YAML
    file.write_text(json.dumps(config | ({"auth": auth} if auth else {})))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", file], stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as found:
                if found.connect_ex(("127.0.0.1", int(address.split(":")[1]))) == 0:
                    break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


def push(address: str, repository: str, tag: str) -> str:
    """An image without layers; returns its digest."""
    content = b"{}"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    root = f"http://{address}/v2/{repository}"
    with urllib.request.urlopen(
        urllib.request.Request(f"{root}/blobs/uploads/", method="POST")
    ) as answer:
        where = answer.headers["Location"]
    _put(f"{where}&digest={digest}", content, "application/octet-stream")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(content),
                "digest": digest,
            },
            "layers": [],
        }
    ).encode()
    _put(f"{root}/manifests/{tag}", manifest, kind)
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _put(url: str, content: bytes, kind: str) -> None:
    headers = {"Content-Type": kind}
    request = urllib.request.Request(url, data=content, method="PUT", headers=headers)
    with urllib.request.urlopen(request):
        pass


@contextmanager
def answering(status: int, headers: dict[str, str], body: bytes = b"") -> Iterator[str]:
    """A server that says the same to everybody; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A real etcd of one member on the loopback interface, in a folder of its own."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shardyard.config.endpoints import EtcdEndpoint
from shardyard.io.polling import wait_for


class EtcdServer:
    """Started, killed and started again on the same ports and data."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self._folder = folder
        self._options = options
        self.port, peer = _free_ports(2)
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._peer_url = f"http://127.0.0.1:{peer}"
        self.place = EtcdEndpoint((("127.0.0.1", self.port),), scheme == "https")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def setting(self) -> str:
        """Of elastic.rendezvous."""
        return f"etcd://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return once it answers."""
        peer = self._peer_url
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "etcd", "--data-dir", str(self._folder / "data"),
                    "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}", *self._options,
                ],
                stdout=log, stderr=log, env={"GOMAXPROCS": "1", "PATH": "/usr/bin"},
            )  # fmt: skip
        assert wait_for(self._is_up, within_s=60, every_s=0.05), self._log()

    def kill(self) -> None:
        """As a machine that is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def empty(self) -> None:
        """Lose all data."""
        shutil.rmtree(self._folder / "data")

    def etcdctl(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """What Debian's own client answers."""
        return subprocess.run(
            ["etcdctl", "--endpoints", self.url, *words],
            env={"PATH": "/usr/bin", "ETCDCTL_API": "3", **(env or {})},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    def left(self) -> list[str]:
        """All keys of our runs."""
        return self.etcdctl("get", "--prefix", "/shardyard/", "--keys-only").split()

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log()
        if self.url.startswith("https"):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(json.loads(answer.read()).get("health") == "true")
        return False

    def _log(self) -> str:
        return (self._folder / "etcd.log").read_text()


@contextmanager
def running(folder: Path, *options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    """An etcd that has started; ended behind the block."""
    server = EtcdServer(folder, *options, scheme=scheme)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

"""Real hosts for the ssh launcher: a `sshd` of its own for each, on a loopback address.

Both are this machine. What is started on a host carries its number in the environment, so that a
test can end one as if it had lost its power.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.debian_packages import need

_MARK = "SHARDYARD_TEST_HOST"
_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/{name}.pid
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv {environment}
"""
_CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


@dataclass
class SshdHosts:
    """Hosts gpu1, gpu2, ... of a folder."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    _servers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        return self.folder / "ssh_config"

    def add(self, name: str) -> None:
        """Configure a host and start its sshd."""
        number = len(self.names) + 1
        address = f"127.0.0.{number}"
        with socket.create_server((address, 0)) as free:
            self.ports[name] = free.getsockname()[1]
        own = {_MARK: f"{self.folder}-{name}", **self.environment}
        text = _SERVER.format(
            port=self.ports[name], address=address, folder=self.folder, name=name,
            environment=" ".join(f'"{key}={value}"' for key, value in own.items()),
        )  # fmt: skip
        (self.folder / f"{name}.conf").write_text(text)
        key = (self.folder / "host_key.pub").read_text()
        with (self.folder / "known_hosts").open("a") as file:
            file.write(f"[{address}]:{self.ports[name]} {key}")
        client = _CLIENT.format(
            name=name, address=address, port=self.ports[name], folder=self.folder
        )
        with self.config_file.open("a") as file:
            file.write(client)
        self.names.append(name)
        self.start(name)

    def start(self, name: str) -> None:
        """Start the sshd of a host."""
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        log = (self.folder / f"{name}.log").open("ab")
        self._servers[name] = subprocess.Popen(
            [sshd, "-D", "-e", "-f", str(self.folder / f"{name}.conf")], stderr=log
        )
        log.close()
        address = f"127.0.0.{self.names.index(name) + 1}"
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            with suppress(OSError), socket.create_connection((address, self.ports[name])):
                return
            time.sleep(0.02)
        raise AssertionError((self.folder / f"{name}.log").read_text())

    def stop(self, name: str) -> None:
        """End only the sshd of a host: what runs on it goes on."""
        with self._servers.pop(name) as server:
            server.kill()

    def lose(self, name: str) -> None:
        """End all of a host, as a power cut does."""
        self.stop(name)
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, name: str | None = None) -> list[int]:
        """Processes on a host, or on all, but its sshd."""
        marks = [f"{_MARK}={self.folder}-{each}".encode() for each in self.names
                 if name in (None, each)]  # fmt: skip
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    values = (entry / "environ").read_bytes().split(b"\0")
                    if any(mark in values for mark in marks):
                        found.append(int(entry.name))
        return found

    def wait_for_no_process(self, within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while left := self.processes():
            shown = [Path(f"/proc/{pid}/cmdline") for pid in left]
            assert time.monotonic() < deadline_s, [
                path.read_bytes().replace(b"\0", b" ") for path in shown if path.exists()
            ]
            time.sleep(0.1)


@contextmanager
def sshd_hosts(folder: Path, *names: str, **environment: str) -> Iterator[SshdHosts]:
    """Hosts of these names; nothing is left of them."""
    need("openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd demands it of root
    for key in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
        )
    hosts = SshdHosts(folder, environment)
    try:
        for name in names:
            hosts.add(name)
        yield hosts
    finally:
        for name in list(hosts._servers):
            hosts.lose(name)

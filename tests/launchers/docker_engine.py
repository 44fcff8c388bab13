"""A Docker engine of its own: its images, containers and bridge are in one folder and one network.

It writes no iptables rules, which are the machine's and might be others' too; containers reach each
other and this machine, and nothing else.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.debian_packages import need

_PATIENCE_S = 120.0
_BRIDGE = "shardyard{number}"
_SUBNET = "10.197.{number}.1/24"


@dataclass(frozen=True, kw_only=True)
class DockerEngine:
    """A running engine."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What a client needs to speak to it; builds are left to the engine itself."""
        return {"DOCKER_HOST": f"unix://{self.folder}/docker.sock", "DOCKER_BUILDKIT": "0"}

    def run(self, *arguments: str, timeout_s: float = 600) -> str:
        """Output of one docker command; its words if it fails."""
        done = subprocess.run(
            ["docker", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **self.environ},
        )
        if done.returncode:
            raise AssertionError(f"docker {arguments}: {done.stderr}")
        return done.stdout


@contextmanager
def running_docker(environ: Mapping[str, str]) -> Iterator[DockerEngine]:
    """An engine; what it made is removed at the end.

    Args:
        environ: For the engine beside this process's, such as credentials of its log driver.
    """
    need("docker.io", "iproute2")
    if os.geteuid() != 0:
        pytest.skip("a Docker engine needs root")
    folder = Path(tempfile.mkdtemp(prefix="docker-"))
    engine, bridge = DockerEngine(folder=folder), _make_bridge()
    try:
        with (folder / "dockerd.log").open("wb") as log:
            daemon = subprocess.Popen(
                _command(folder, bridge),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
            )
        try:
            _wait_for(engine, daemon)
            yield engine
        finally:
            daemon.terminate()  # ends the containers and its containerd too
            daemon.wait(_PATIENCE_S)
    finally:
        subprocess.run(["ip", "link", "del", bridge], check=True)
        _remove(folder)


def _command(folder: Path, bridge: str) -> list[str]:
    return [
        "dockerd",
        f"--data-root={folder}/root",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/dockerd.pid",
        f"--host=unix://{folder}/docker.sock",
        f"--bridge={bridge}",
        "--iptables=false",
        "--ip-masq=false",
        "--ip-forward=false",
        "--userland-proxy=false",
    ]


def _make_bridge() -> str:
    """A bridge whose name and subnet no other engine of this machine has."""
    for number in range(100, 200):
        bridge = _BRIDGE.format(number=number)
        made = subprocess.run(
            ["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, check=False
        )
        if made.returncode == 0:
            subnet = _SUBNET.format(number=number)
            subprocess.run(["ip", "addr", "add", subnet, "dev", bridge], check=True)
            subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
            return bridge
    raise AssertionError("no name is left for a bridge; `ip link` shows who has them")


def _wait_for(engine: DockerEngine, daemon: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and daemon.poll() is None:
        try:
            engine.run("version", timeout_s=10)
        except (AssertionError, subprocess.TimeoutExpired):
            time.sleep(0.5)
        else:
            return
    raise AssertionError((engine.folder / "dockerd.log").read_text()[-2000:])


def _remove(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", path], check=True)
    shutil.rmtree(folder)

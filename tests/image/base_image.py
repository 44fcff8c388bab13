"""What an image is built on where no registry answers: Debian by debootstrap, wheels by loopback.

`podman import` and `docker import` give the tarball the name that Dockerfile.cpu builds on. The
wheels are downloaded as this machine's pip is configured to, and served as an index of their own:
a build needs its URL and nothing else, and no configuration of this machine comes into an image.
Both are kept in a cache folder, as they take minutes.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardyard.image.dockerfile import STACKS, parse_base, write_context
from tests.debian_packages import need

PYTHON = "3.11"
"""Of Debian 12; Dockerfile.cpu's own base has a newer one."""
_DEBIAN = os.environ.get("SHARDYARD_TEST_DEBIAN", "http://deb.debian.org/debian")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def import_arguments() -> list[str]:
    """What follows `podman import` or `docker import` to make the base image.

    Skips the test where the base cannot be made.
    """
    return ["--change", f"ENV PATH={_PATH}", str(base_tarball()), STACKS["cpu"].base_image]


def base_tarball() -> Path:
    """Root file system of Debian 12 with python3, venv and pip; made once, 300 MB."""
    need("debootstrap")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    return _cached("debian-12.tar", _make_tarball)


@contextmanager
def package_index() -> Iterator[str]:
    """URL of an index, as pip reads it, of all that the cpu image installs; served on loopback."""
    with tempfile.TemporaryDirectory(prefix="context-") as name:
        context = Path(name)
        write_context(context, parse_base("cpu"))
        wanted = _requirements(context)
        pinned = context / "constraints.txt"
        key = hashlib.sha256(f"{wanted}{pinned.read_text()}".encode()).hexdigest()[:8]
        folder = _cached(f"wheels-{key}", partial(_download, wanted=wanted, pinned=pinned))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="package index")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def build_options(index_url: str) -> list[str]:
    """What `shardyard image build` hands to the tool behind ``--``."""
    arguments = {"PIP_INDEX_URL": index_url, "TORCH_INDEX_URL": index_url}
    return ["--network=host", *(f"--build-arg={key}={url}" for key, url in arguments.items())]


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file or folder of this name, made by the first who asks."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "shardyard-tests"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not wanted.exists():
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as scratch:
                made = Path(scratch) / name
                make(made)
                made.rename(wanted)
    return wanted


def _make_tarball(to: Path) -> None:
    root = to.with_name("root")
    packages = "--include=python3,python3-venv,python3-pip"
    made = ("debootstrap", "--variant=minbase", packages, "bookworm", str(root), _DEBIAN)
    _run("unshare", "--mount", *made)  # if it is killed, its /proc in there ends with it
    shutil.rmtree(root / "var/cache/apt/archives")
    # As in a registry's images: what is in /dev is the runtime's, and a /dev/shm here would hand
    # its mode, root's alone, to what is mounted there.
    _run("tar", "-C", str(root), "--exclude=./dev/*", "-cf", str(to), ".")


def _requirements(context: Path) -> list[str]:
    project = tomllib.loads((context / "pyproject.toml").read_text())
    stack = STACKS["cpu"]
    return [
        f"torch=={stack.torch}+{stack.wheel}",
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
    ]


def _download(to: Path, *, wanted: list[str], pinned: Path) -> None:
    """An index: a folder for each project, which a web server lists."""
    loose = to.with_name("loose")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *wanted)
    pinning = ("--python-version", PYTHON, "--constraint", str(pinned))
    _run(*pip, *pinning, "--dest", str(loose))
    for wheel in loose.iterdir():
        project = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        (to / project).mkdir(parents=True, exist_ok=True)
        wheel.rename(to / project / wheel.name)


def _run(*command: str) -> None:
    """Run; a mirror that does not answer is a reason to skip, and its words say which."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        pytest.skip(f"{Path(command[0]).name} failed: {' '.join(said)}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

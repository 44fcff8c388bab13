"""Rendered pods run by podman, which reads Kubernetes' YAML: an isolated podman, two pods, names.

The image is empty: this machine's own interpreter and packages are mounted into it, so that nothing
is downloaded or built. Jobs are not known to podman, so each pod is made from the job's template
with what its controller would add: name, host name, index and the Job's uid.
"""

import copy
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.launch.kubernetes.objects import to_yaml

IMAGE = "localhost/this-machine:1"
SOURCES = {
    "/usr": Path("/usr"),
    "/opt/python": Path(sys.base_prefix),
    "/opt/site": Path(sysconfig.get_paths()["purelib"]),
    "/opt/src": Path(__file__).parents[3] / "src",
}
"""Path in the pod -> what is mounted there."""
_ENVIRONMENT = {
    "PATH": "/opt/python/bin:/usr/bin",
    "PYTHONPATH": "/opt/src:/opt/site",
    "LD_LIBRARY_PATH": "/opt/python/lib",
}
# Limits and cgroups as an unprivileged machine has them; netavark gives containers names.
_CONFIG = """
[containers]
default_ulimits=["nofile=16384:16384", "nproc=16384:16384"]
[engine]
cgroup_manager="cgroupfs"
events_logger="file"
runtime="runc"
[network]
network_backend="netavark"
network_config_dir="{folder}/networks"
"""


class Podman:
    """A podman whose images, containers and networks are in one folder."""

    network = "shardyard-test"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "containers.conf").write_text(_CONFIG.format(folder=folder))

    def run(self, *arguments: str, data: bytes | None = None, timeout_s: float = 120) -> str:
        """Output of one podman command; its words if it fails."""
        folders = [f"--root={self._folder}/root", f"--runroot={self._folder}/run"]
        done = subprocess.run(
            ["podman", *folders, f"--tmpdir={self._folder}/tmp", *arguments],
            input=data,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "CONTAINERS_CONF": str(self._folder / "containers.conf")},
        )
        if done.returncode:
            raise AssertionError(f"podman {arguments}: {done.stderr.decode()}")
        return done.stdout.decode()

    def play(self, config: dict[str, Any], pod: dict[str, Any], *, domain: str = "") -> None:
        """Start a pod; its name is its host's, in the domain that a headless service would make."""
        text = to_yaml((config, pod)).encode()
        alias = ".".join(filter(None, (pod["metadata"]["name"], domain)))
        self.run("play", "kube", f"--network={self.network}:alias={alias}", "-", data=text)

    def wait(self, container: str, *, timeout_s: float) -> int:
        """Exit code of a container."""
        return int(self.run("wait", container, timeout_s=timeout_s))


@contextmanager
def running_podman() -> Iterator[Podman]:
    """A podman with the image and a network; all is removed at the end."""
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or not Path("/usr/lib/podman/aardvark-dns").exists():
        pytest.skip("needs root and Debian's podman, runc, netavark, aardvark-dns, catatonit")
    folder = Path(tempfile.mkdtemp(prefix="pods-"))  # podman takes no path over 50 characters
    podman = Podman(folder)
    try:
        changes = [f"--change=ENV {name}={value}" for name, value in _ENVIRONMENT.items()]
        podman.run("import", *changes, "-", IMAGE, data=_empty_image())
        podman.run("network", "create", podman.network)
        yield podman
    finally:
        podman.run("pod", "rm", "--all", "--force", "--time=0")
        podman.run("network", "rm", "--force", podman.network)
        podman.run("rmi", "--all", "--force")
        _remove(folder)


def _remove(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", path], check=True)
    shutil.rmtree(folder)


def _empty_image() -> bytes:
    """Folders to mount into, and the links of a merged /usr."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("proc", "sys", "dev", "etc", "tmp", "runs", "data", *SOURCES):
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    return buffer.getvalue()


def pod_of_jobset(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The pod of one index, as JobSet and the Job controller make it."""
    name = job["metadata"]["name"]
    inner = job["spec"]["replicatedJobs"][0]
    pod = copy.deepcopy(inner["template"]["spec"]["template"])
    host = f"{name}-{inner['name']}-0-{rank}"
    pod["metadata"]["name"] = host
    pod["metadata"]["labels"] |= {
        "batch.kubernetes.io/controller-uid": "uid-of-the-first-start",
        "batch.kubernetes.io/job-completion-index": str(rank),
        "jobset.sigs.k8s.io/jobset-name": name,
    }
    pod["spec"] |= {"hostname": host, "subdomain": name}
    (container,) = pod["spec"]["containers"]
    container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(rank)})
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def worker_of_pytorchjob(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The pod of one worker, as the training operator makes it."""
    name, policy = job["metadata"]["name"], job["spec"]["elasticPolicy"]
    pod = copy.deepcopy(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
    pod["metadata"]["name"] = f"{name}-worker-{rank}"
    pod["metadata"]["labels"] |= {
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/replica-index": str(rank),
    }
    pod["spec"] |= {"restartPolicy": "Never", "hostname": f"{name}-worker-{rank}"}
    added = {
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
    }
    (container,) = pod["spec"]["containers"]
    container["env"] += [{"name": key, "value": value} for key, value in added.items()]
    return {"apiVersion": "v1", "kind": "Pod", **pod}

"""Rendered pods of the project's own image, run by podman, which reads Kubernetes' YAML.

Podman knows pods, volumes and restarts of containers: it plays the kubelet. Jobs it does not know,
so each pod is made here from the job's template with what its controller would add: name, host
name, index, and the variables of the training operator.
"""

import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardyard.launchers.kubernetes.objects import to_yaml
from tests.debian_packages import need
from tests.image.base_image import build_options, import_arguments, package_index

IMAGE = "localhost/shardyard:test"
VOLUME = "runs"
"""Name of the claim, and of podman's volume."""

# Limits and cgroups as an unprivileged machine has them; netavark gives containers names.
_CONTAINERS = """
[containers]
default_ulimits=["nofile=16384:16384", "nproc=16384:16384"]
[engine]
cgroup_manager="cgroupfs"
events_logger="file"
runtime="runc"
tmp_dir="{folder}/tmp"
[network]
network_backend="netavark"
network_config_dir="{folder}/networks"
"""
_STORAGE = """
[storage]
driver="overlay"
graphroot="{folder}/root"
runroot="{folder}/run"
"""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a build took."""

    seconds: float | None
    """None: it was there."""
    bytes: int


class Podman:
    """A podman whose images, containers, volumes and networks are in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        # Podmen do not know of each other, and share the names of networks and the ranges of
        # addresses: each needs its own.
        self._network = folder.name
        net = f"10.{random.randrange(64, 192)}.{random.randrange(256)}"
        self._subnet, self.host = f"{net}.0/24", f"{net}.1"
        """``host``: this machine, as pods see it."""
        files = {"containers.conf": _CONTAINERS, "storage.conf": _STORAGE}
        for name, text in files.items():
            (folder / name).write_text(text.format(folder=folder))
        self.settings = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        self.environ = {**os.environ, **self.settings}

    def run(self, *arguments: str, data: bytes | None = None, timeout_s: float = 300) -> str:
        """Output of one podman command; its words if it fails."""
        done = subprocess.run(
            ["podman", *arguments],
            input=data,
            capture_output=True,
            timeout=timeout_s,
            env=self.environ,
        )
        if done.returncode:
            raise AssertionError(f"podman {arguments}: {done.stderr.decode()}")
        return done.stdout.decode()

    def build(self) -> Built:
        """The project's image, by its own command line and Dockerfile."""
        if self.run("images", "--quiet", IMAGE):
            return Built(seconds=None, bytes=self._image_bytes())
        self.run("import", *import_arguments())
        command = [sys.executable, "-m", "shardyard", "image", "build", "--base=cpu"]
        command += ["--tool=podman", f"--tag={IMAGE}", "--", "--pull=never"]
        started = time.monotonic()
        with package_index() as url:
            done = subprocess.run(
                [*command, *build_options(url)], env=self.environ, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr[-3000:]
        seconds = time.monotonic() - started
        return Built(seconds=round(seconds, 1), bytes=self._image_bytes())

    def _image_bytes(self) -> int:
        return int(self.run("image", "inspect", "--format={{.Size}}", IMAGE))

    def make_network(self) -> None:
        """Where pods find each other by name."""
        self.run("network", "create", f"--subnet={self._subnet}", self._network)

    def make_volume(self) -> Path:
        """The claim that pods write runs to, as a folder of this machine."""
        self.run("volume", "create", VOLUME)
        path = Path(self.run("volume", "inspect", "--format={{.Mountpoint}}", VOLUME).strip())
        os.chown(path, 1000, 1000)  # what the kubelet does for fsGroup
        return path

    def play(self, config: dict[str, Any], pod: dict[str, Any], *, domain: str = "") -> None:
        """Start a pod; its name is its host's, in the domain that a headless service would make."""
        text = to_yaml((config, pod)).encode()
        alias = ".".join(filter(None, (pod["metadata"]["name"], domain)))
        self.run("play", "kube", f"--network={self._network}:alias={alias}", "-", data=text)

    def kill(self, pod: str) -> None:
        """As if its node were lost: SIGKILL to all of it."""
        self._remove_pods(pod)

    def delete(self, pod: str) -> None:
        """As a controller does: SIGTERM, the time that our pods have to drain, and it is gone."""
        names = self.run("ps", "--filter", f"pod={pod}", "--format={{.Names}}").split()
        running = [name for name in names if not name.endswith("-infra")]
        if running:
            # Not `pod stop`: it takes the network away while the container still drains.
            self.run("stop", "--time=150", *running)
        self._remove_pods(pod)

    def remove_all(self) -> None:
        """All but images."""
        self._remove_pods("--all")
        self.run("rm", "--all", "--force", "--time=0")
        self.run("volume", "rm", "--all", "--force")
        self.run("network", "prune", "--force")
        self.run("secret", "rm", "--all")

    def _remove_pods(self, *which: str) -> None:
        """Podman gives up on a process that a busy machine has not ended within some seconds."""
        for tries_left in range(9, -1, -1):
            try:
                self.run("pod", "rm", "--force", "--time=0", *which)
                return
            except AssertionError as error:
                if not tries_left or "did not die" not in str(error):
                    raise

    def follow(self, container: str) -> Iterator[str]:
        """Lines of a container, until it ends."""
        with subprocess.Popen(
            ["podman", "logs", "--follow", container], env=self.environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")

    def wait(self, container: str, *, timeout_s: float) -> int:
        """Exit code of a container."""
        return int(self.run("wait", container, timeout_s=timeout_s))


@contextmanager
def running_podman() -> Iterator[Podman]:
    """A podman with a network; all is removed at the end.

    SHARDYARD_TEST_PODMAN names a folder whose image is kept, and used again as it is.
    """
    need("podman", "runc", "netavark", "aardvark-dns", "catatonit")
    if os.geteuid() != 0:
        pytest.skip("pods of this machine need root")
    kept = os.environ.get("SHARDYARD_TEST_PODMAN")
    # podman takes no path over 50 characters
    folder = Path(kept or tempfile.mkdtemp(prefix="pods-"))
    podman = Podman(folder)
    try:
        podman.make_network()
        yield podman
    finally:
        podman.remove_all()
        if not kept:
            podman.run("rmi", "--all", "--force")
            _remove(folder)


def _remove(folder: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", path], check=True)
    shutil.rmtree(folder)


def pod_of_jobset(job: dict[str, Any], rank: int, *, start: int) -> dict[str, Any]:
    """The pod of one index, as JobSet and the Job controller make it; each start is a new Job."""
    name = job["metadata"]["name"]
    inner = job["spec"]["replicatedJobs"][0]
    pod = copy.deepcopy(inner["template"]["spec"]["template"])
    host = f"{name}-{inner['name']}-0-{rank}"
    pod["metadata"]["name"] = host
    pod["metadata"]["labels"] |= {
        "batch.kubernetes.io/controller-uid": f"uid-of-start-{start}",
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
    replica = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = copy.deepcopy(replica["template"])
    pod["metadata"]["name"] = f"{name}-worker-{rank}"
    pod["metadata"]["labels"] |= {
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/replica-index": str(rank),
    }
    host = f"{name}-worker-{rank}"
    pod["spec"] |= {"restartPolicy": replica["restartPolicy"], "hostname": host}
    added = {
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
    }
    (container,) = pod["spec"]["containers"]
    container["env"] += [{"name": key, "value": value} for key, value in added.items()]
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def pod_of_job(job: dict[str, Any], number: int) -> dict[str, Any]:
    """A pod of a plain Job, as the Job controller makes it; each start is a new one."""
    name = job["metadata"]["name"]
    pod = copy.deepcopy(job["spec"]["template"])
    pod["metadata"]["name"] = f"{name}-{number:05}"
    pod["metadata"]["labels"] |= {"batch.kubernetes.io/job-name": name}
    return {"apiVersion": "v1", "kind": "Pod", **pod}

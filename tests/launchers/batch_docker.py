"""AWS Batch as far as it can be had here: moto with a real Docker engine behind it.

The containers are of the project's own image, built by `shardyard image build`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.image.base_image import build_options, import_arguments, package_index
from tests.launchers.batch_server import CREDENTIALS, REGION, BatchServer, batch_server
from tests.launchers.docker_engine import DockerEngine, running_docker

IMAGE = "shardyard:test"
QUEUE = "trainers"


@dataclass(frozen=True, kw_only=True)
class DockerBatch:
    """A queue whose jobs run in containers on this machine."""

    server: BatchServer
    engine: DockerEngine
    runs: Path
    """The folder that containers see as /runs."""

    def settings(self, text: Path) -> tuple[str, ...]:
        """What a recipe says of this place; its nodes see the texts as /data."""
        mounts = [{"path": "/runs", "host": str(self.runs)}, {"path": "/data", "host": str(text)}]
        return (
            f"launch.image={IMAGE}", f"launch.aws_batch.region={REGION}",
            f"launch.aws_batch.queue={QUEUE}", "launch.aws_batch.vcpus=1",
            "launch.aws_batch.memory_gib=2", "launch.aws_batch.shared_memory_gib=1",
            f"launch.volumes={json.dumps(mounts)}", "launch.run_dir=/runs",
            "launch.env={OMP_NUM_THREADS: '1'}",  # as for all runs of tests: cores are few
        )  # fmt: skip

    def containers(self) -> list[dict[str, Any]]:
        """What Docker says of the containers that run now."""
        ids = self.engine.run("ps", "--quiet").split()
        found: list[dict[str, Any]] = json.loads(self.engine.run("inspect", *ids)) if ids else []
        return found


@contextmanager
def docker_batch(folder: Path) -> Iterator[DockerBatch]:
    """An engine with the image, and moto with a queue; skips the test where they cannot be had."""
    runs = folder / "batch-runs"
    runs.mkdir()
    runs.chmod(0o777)  # the image's user is not root
    with running_docker(CREDENTIALS) as engine:
        build_image(engine)
        with batch_server(folder, docker=engine) as server:
            server.reset()
            server.run_containers()
            server.make_queue(QUEUE)
            yield DockerBatch(server=server, engine=engine, runs=runs)


def build_image(engine: DockerEngine) -> None:
    """`shardyard image build`, on a base that needs no registry."""
    engine.run("import", *import_arguments())
    with package_index() as url:
        options = ["--base", "cpu", "--tool", "docker", "--tag", IMAGE, "--", *build_options(url)]
        done = subprocess.run(
            [sys.executable, "-m", "shardyard", "image", "build", *options],
            env={**os.environ, **engine.environ},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]

"""Processes for the tests of checkpoints."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

Play = Callable[..., None]


@pytest.fixture(scope="session")
def play() -> Play:
    """Run a scene of scenes.py on some processes and wait for them."""

    def run(scene: str, folder: Path, *more: str, world_size: int) -> None:
        python = [sys.executable, "-W", "error", str(Path(__file__).with_name("scenes.py"))]
        (folder / "rendezvous").unlink(missing_ok=True)
        ranks = [
            subprocess.Popen(
                [*python, scene, str(rank), str(world_size), str(folder), *more],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
            assert rank.returncode == 0, f"rank {number} of {scene}:\n{output}"

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    rendezvous = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def trained(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on two processes whose newest checkpoint is of step 2."""
    folder = tmp_path_factory.mktemp("trained")
    play("train_and_save", folder, world_size=2)
    return folder

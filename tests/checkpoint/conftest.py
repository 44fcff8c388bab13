"""Processes for the tests of checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.scenes import play_scene
from tests.distributed.ranks import run_forked

Play = Callable[..., None]


@pytest.fixture(scope="session")
def play() -> Play:
    """Run a scene of scenes.py on some processes and wait for them."""

    def run(scene: str, folder: Path, *more: str, world_size: int) -> None:
        (folder / "rendezvous").unlink(missing_ok=True)
        run_forked(play_scene, world_size, scene, folder, *more, timeout_s=120)

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

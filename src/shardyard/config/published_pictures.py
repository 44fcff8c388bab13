"""Number of pictures in a published set, before any of them is read."""

from pathlib import Path, PurePosixPath

from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_remote
from shardyard.config.tasks import task_row

IMAGENET = {"train": 1_281_167, "val": 50_000}
"""Pictures of each split. Source: https://image-net.org/challenges/LSVRC/2012/"""
_NAMES = ("ilsvrc", "ilsvrc2012", "imagenet-1k", "imagenet1k")
_LIST = "ImageSets/CLS-LOC/train_cls.txt"


def train_image_count(recipe: Recipe) -> int | None:
    """Training pictures of a recipe that names ImageNet; None: its number is not known.

    A tree on this machine is counted by its own list, since it may be a part of ImageNet.
    """
    entries = recipe.data.entries
    if task_row(recipe.task.name).reads != "images" or len(entries) != 1:
        return None
    ((_, entry),) = entries
    name = PurePosixPath(str(entry).rstrip("/")).name.lower().removesuffix(".tar")
    if name not in _NAMES:
        return None
    folder = Path(str(entry)).expanduser()
    if is_remote(str(entry)) or not folder.exists():
        return IMAGENET["train"]
    try:
        with (folder / _LIST).open("rb") as lines:
            return sum(1 for line in lines if line.strip()) or None
    except OSError:
        return None

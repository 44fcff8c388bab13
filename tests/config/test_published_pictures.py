"""Pictures of a published set, before any of them is read."""

from pathlib import Path

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.run_length import train_image_count

IMAGES = ("model.preset=resnet18", "task.name=image_classification", "optim.lr=0.1")


@pytest.mark.parametrize(
    ("source", "pictures"),
    [
        ("/nowhere/ILSVRC", 1_281_167),
        ("s3://bucket/ILSVRC2012/", 1_281_167),
        ("/nowhere/ILSVRC.tar", 1_281_167),
        ("/nowhere/imagenet-100", None),
        ("digits", None),
    ],
)
def test_only_a_source_named_like_imagenet_has_a_known_number(
    source: str, pictures: int | None
) -> None:
    recipe = load_checked_recipe([], [*IMAGES, f"data.source={source}"])
    assert train_image_count(recipe) == pictures


def test_a_tree_here_is_counted_by_its_own_list(tmp_path: Path) -> None:
    tree = tmp_path / "ILSVRC"
    tree.mkdir()
    recipe = load_checked_recipe([], [*IMAGES, f"data.source={tree}"])
    assert train_image_count(recipe) is None
    (tree / "ImageSets" / "CLS-LOC").mkdir(parents=True)
    (tree / "ImageSets" / "CLS-LOC" / "train_cls.txt").write_text("n1/a 1\nn1/b 2\n")
    assert train_image_count(recipe) == 2

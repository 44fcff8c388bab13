"""What a recipe's settings make of pictures, and what becomes of them without Pillow."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.mixup import Mixing
from shardyard.data.images.transforms import (
    Augmentation,
    CenterCrop,
    eval_view,
    train_mixing,
    train_view,
)
from shardyard.data.samples import identity_prepare
from shardyard.errors import RequestError
from tests.data.images.pictures import picture


def _recipe(tmp_path: Path, **images: Any) -> Recipe:
    return load_checked_recipe(
        {
            "model": {"preset": "resnet18"},
            "task": {"name": "image_classification"},
            "data": {"source": str(tmp_path), "images": {"size": 24, **images}},
            "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "run": {"seed": 5},
        }
    )


def test_pictures_are_learnt_from_as_the_recipe_says(tmp_path: Path) -> None:
    view = train_view(
        _recipe(
            tmp_path, crop_area=[0.4, 0.6], crop_ratio=[0.9, 1.1], flip=0.1, rand_augment=3,
            rand_augment_magnitude=12, interpolation="bicubic", erase=0.3, mean=[0.5, 0.0, 1.0],
        )
    )  # fmt: skip
    assert isinstance(view, Augmentation) and view.resample.name == "BICUBIC"
    assert (view.seed, view.size) == (5, 24)
    assert (view.area, view.ratio) == ((0.4, 0.6), (0.9, 1.1))
    assert (view.flip, view.operations, view.magnitude, view.erase) == (0.1, 3, 12, 0.3)
    assert view.erased_to == (128, 0, 255)


def test_pictures_are_judged_by_their_middle(tmp_path: Path) -> None:
    view = eval_view(_recipe(tmp_path, eval_crop=0.75))
    assert isinstance(view, CenterCrop) and (view.size, view.share) == (24, 0.75)
    assert view(picture(60, 40), epoch=0, sample=0).shape == (24, 24, 3)


def test_the_usual_settings_are_those_of_resnet(tmp_path: Path) -> None:
    assert train_view(_recipe(tmp_path))(picture(40, 60), epoch=0, sample=0).dtype == np.uint8
    assert train_mixing(_recipe(tmp_path)) is identity_prepare
    mixing = train_mixing(_recipe(tmp_path, mixup=0.2, cutmix=1))
    assert mixing == Mixing(seed=5, size=24, mixup=0.2, cutmix=1.0)


@pytest.mark.parametrize("make", [train_view, eval_view])
def test_without_pillow_is_said_how_to_install_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(RequestError, match=r"PIL, which is not installed.*'shardyard\[images\]'"):
        make(_recipe(tmp_path))

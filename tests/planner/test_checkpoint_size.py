"""Bytes of a checkpoint, before there is a plan."""

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.request import Request


def size_of(*settings: str) -> int:
    size = Request.of(load_checked_recipe([], list(settings)), needs_weights=False).checkpoint_bytes
    assert size is not None
    return size


def test_weights_and_the_two_averages_of_adamw_are_saved_in_fp32() -> None:
    request = Request.of(load_checked_recipe([], ["model.preset=llama-1b"]), needs_weights=False)
    assert request.shape is not None
    assert request.checkpoint_bytes == 12 * request.shape.parameters


@pytest.mark.parametrize("preset", ["llama-1b", "llama3-8b"])
def test_a_checkpoint_of_adapters_holds_no_base(preset: str) -> None:
    whole, adapters = size_of(f"model.preset={preset}"), size_of(
        f"model.preset={preset}", "model.lora.rank=8"
    )  # fmt: skip
    assert adapters < whole / 50


def test_a_network_for_images_has_a_size() -> None:
    # 25,557,032 parameters, as torchvision's resnet50; SGD without momentum has no state
    settings = ("task.name=image_classification", "data.source=.", "optim.lr=0.1")
    assert size_of("model.preset=resnet50", *settings, "optim.name=sgd") == 4 * 25_557_032

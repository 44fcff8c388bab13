"""What a recipe for images may not ask, and what of images a recipe for text may not."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.images import check_image_size, check_network
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError
from shardyard.families.images.registry import IMAGE_PRESETS

IMAGES: dict[str, Any] = {
    "model": {"preset": "resnet18"},
    "task": {"name": "image_classification"},
    "data": {"source": "pictures"},
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}


def test_a_recipe_for_images_is_accepted() -> None:
    load_checked_recipe(IMAGES)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.seq_len=128", "data.seq_len=128 is of text, and image_classification reads images."),
        ("data.tokenizer=gpt2", "data.tokenizer=gpt2 is of text"),
        ("run.tokens=1000", "run.tokens=1000 is of text"),
        ("memory.loss_chunk=256", "memory.loss_chunk=256 is of text"),
        ("model.preset=llama-tiny", "is not a network for images. Use resnet-tiny, resnet18, "),
        ("parallel.tp=2", "parallel.tp=2: in a network for images "),
        (
            "optim.lr=auto",
            "Set optim.lr=1e-3 for adamw, or optim.name=sgd optim.momentum=0.9 optim.l",
        ),
        ("model.lora.rank=8", "adapters are not built for a network for images. Leave it out."),
        ("optim.name=muon", "which of a network for images those are is not known. Use adamw, or"),
        (
            "optim.name=schedule_free_adamw",
            "running statistics of batch normalisation are of the trained ones. Use adamw with",
        ),
        ("memory.offload=activations", "Use memory.recompute, or memory.offload=optimizer."),
        ("precision.compute=fp8", "=fp8 is not built for a network for images. Use bf16 or fp32."),
        ("data.images.crop_area=[0.5, 0.1]", "crop_area=[0.5, 0.1] are not bounds. Give a number"),
        ("data.images.crop_area=[0, 1]", "crop_area=[0.0, 1.0] are not bounds."),
        ("data.images.crop_ratio=[2, 0.5]", "crop_ratio=[2.0, 0.5] are not bounds."),
        ("data.images.rand_augment_magnitude=7", "rand_augment is 0. Set that to 2, as is usual"),
        ("task.name=causal_lm", "Use task.name=image_classification."),
    ],
)
def test_what_says_nothing_of_images_is_refused(override: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe(IMAGES, [override])
    assert words in str(refused.value)


def test_a_dataset_of_the_users_own_is_a_source_of_images() -> None:
    own = {**IMAGES, "data": {"module": "tests.config.rules.test_images:pictures"}}
    load_checked_recipe(own)


def pictures(split: str) -> None:
    """A dataset; only its source is read."""


def test_weights_with_positions_are_for_images_of_one_size() -> None:
    recipe = load_checked_recipe({**IMAGES, "model": {"path": "vit"}}, ["data.images.size=48"])
    network = IMAGE_PRESETS["vit-b16"].at_size(32)
    (found,) = check_image_size(recipe, network, Path("vit"))
    assert "=48, but the weights of vit have positions for images of 32 pixels" in str(found)
    assert "Set data.images.size=32" in str(found)
    assert not check_image_size(recipe, network.at_size(48), Path("vit"))
    assert not check_image_size(recipe, IMAGE_PRESETS["resnet18"], Path("resnet"))
    assert not check_image_size(recipe, network, None)


def test_a_recipe_for_images_names_its_images() -> None:
    with pytest.raises(RecipeError, match=r"data.source.*names no images. Give a folder"):
        load_checked_recipe({**IMAGES, "data": {}})


def test_settings_of_images_are_refused_of_text() -> None:
    recipe = {"model": {"preset": "llama-tiny"}}
    with pytest.raises(RecipeError, match=r"data.images.size=64 is of images.*Leave it out"):
        load_checked_recipe(recipe, ["data.images.size=64"])


def test_smoothed_labels_are_refused_of_text() -> None:
    recipe = {"model": {"preset": "llama-tiny"}}
    with pytest.raises(RecipeError, match=r"label_smoothing=0.1 is of images.*Leave it out"):
        load_checked_recipe(recipe, ["task.label_smoothing=0.1"])


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_images_are_not_mixed_with_nobody(way: str) -> None:
    overrides = [f"data.images.{way}=0.2", "optim.micro_batch=1"]
    with pytest.raises(RecipeError, match=r"micro_batch=1 leaves no other image.*Give more, or"):
        load_checked_recipe(IMAGES, overrides)


def test_one_token_is_no_sample_of_text() -> None:
    recipe = {"model": {"preset": "llama-tiny"}}
    with pytest.raises(RecipeError, match=r"data.seq_len=1 leaves no token.*at least 2"):
        load_checked_recipe(recipe, ["data.seq_len=1"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"drop_path": 0.1}}, "model.drop_path=0.1 is of networks for images, and "),
        ({"model": {"batch_norm": "step"}}, "model.batch_norm=step is of networks for images"),
        (
            {"model": {"zero_last_norm": True}},
            "model.zero_last_norm=True is of networks for images",
        ),
    ],
)
def test_settings_of_networks_are_refused_for_text(settings: dict[str, Any], words: str) -> None:
    text = {"model": {"preset": "llama-tiny", **settings["model"]}}
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "model", "words"),
    [
        ("vit-b16", {"batch_norm_momentum": 0.2}, "a network of type vit has no batch normalis"),
        ("vit-b16", {"batch_norm": "step"}, "=step: a network of type vit has no batch normalis"),
        ("efficientnet-b0", {"zero_last_norm": True}, "=true is built for resnet, and this netwo"),
        ("resnet18", {"zero_last_norm": True, "weights": "load"}, "here they are loaded. Leave it"),
        ("resnet18", {"batch_norm": "step"}, "optim.micro_batch=4 on 2 ranks is less than the 10 "),
        (
            "resnet18",
            {"batch_norm": "step", "compile": True},
            "blocks that ask other ranks are not",
        ),
    ],
)
def test_what_a_network_has_nothing_for_is_refused(
    preset: str, model: dict[str, Any], words: str
) -> None:
    sections = {
        "model": {"preset": preset, **model},
        "parallel": {"dp_replicate": 1, "dp_shard": 2},
        "optim": {**IMAGES["optim"], "global_batch": 10, "micro_batch": 4},
    }
    recipe = Recipe.model_validate({**IMAGES, **sections})
    found = list(check_network(recipe, IMAGE_PRESETS[preset]))
    assert words in str(RecipeError(found))


@pytest.mark.parametrize(
    ("size", "global_batch", "micro_batch", "words"),
    [
        (
            32,
            5,
            2,
            (
                "optim.global_batch=5 in micro-batches of 2 leaves a micro-batch of one picture, "
                "and at "
            ),
        ),
        (32, 5, 2, "Use optim.micro_batch=3, or optim.global_batch=4."),
        (32, 4, 1, "Use optim.micro_batch=2, or optim.global_batch=3."),
        (32, 4, 2, ""),
        (64, 5, 2, ""),  # features of 2x2: four numbers of one picture
    ],
)
def test_a_picture_that_is_left_alone_under_batch_normalisation_is_rejected(
    size: int, global_batch: int, micro_batch: int, words: str
) -> None:
    optim = {**IMAGES["optim"], "global_batch": global_batch, "micro_batch": micro_batch}
    recipe = Recipe.model_validate({**IMAGES, "optim": optim})
    found = list(check_network(recipe, IMAGE_PRESETS["resnet18"].at_size(size)))
    assert [words in str(problem) for problem in found] == [True] * bool(words)

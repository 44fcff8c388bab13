"""The batch and the learning rate of S4's BERT 1.5B on 8 and 16 nodes, and what a resume keeps."""

import pytest

from shardyard.config.formulas import Batch, batch_or_none, steps_on
from shardyard.config.schema.recipe import Optim
from shardyard.errors import RecipeError
from tests.config.test_resolve import preview, resolved

OF_S4 = {"lr": 0.0015, "batch_per_device": 384, "lr_batch": 24576}


@pytest.mark.parametrize(
    ("scaling", "devices", "samples", "lr"),
    [
        ("linear", 64, 24576, 0.0015),
        ("linear", 128, 49152, 0.003),
        ("sqrt", 256, 98304, 0.003),
        ("none", 128, 49152, 0.0015),
    ],
)
def test_the_rate_follows_the_batch(scaling: str, devices: int, samples: int, lr: float) -> None:
    began_elsewhere = {"global_batch": 12288, "lr_scaling": scaling}
    optim = Optim.model_validate({**OF_S4, **began_elsewhere})
    batch = Batch.of(optim, devices=devices)
    assert (batch.samples, batch.first) == (samples, 12288)
    assert batch.lr_factor * float(optim.lr) == pytest.approx(lr)


def test_without_a_batch_to_compare_with_the_rate_is_that_of_the_beginning() -> None:
    optim = Optim(global_batch=8, batch_per_device=2, lr_scaling="linear")
    assert [Batch.of(optim, devices=devices).lr_factor for devices in (2, 4, 8)] == [0.5, 1, 2]


def test_a_batch_that_is_held_is_the_same_on_any_number_of_devices() -> None:
    held = Optim(global_batch=6)
    assert {Batch.of(held, devices=devices) for devices in (1, 2, 5)} == {
        Batch(samples=6, first=6, lr_factor=1.0)
    }
    assert batch_or_none(held, devices=None) == 6
    assert batch_or_none(Optim(), devices=2) is None


def test_a_length_in_steps_is_as_many_samples_on_other_devices() -> None:
    optim = Optim(global_batch=4, batch_per_device=2)
    assert [steps_on(optim, 10, devices=devices) for devices in (1, 2, 3, 4)] == [20, 10, 7, 5]
    assert batch_or_none(optim, devices=3) == 6
    assert batch_or_none(optim, devices=None) is None


def test_the_batch_of_the_beginning_stands_in_the_resolved_recipe_and_stays() -> None:
    asked = ("optim.batch_per_device=3", "run.samples=60")
    first = resolved(*asked, "cluster.devices=2")
    assert (first.recipe.optim.global_batch, first.steps, first.samples) == (6, 10, 60)
    assert first.reasons["optim.global_batch"] == "3 for each of 2 devices"
    later = resolved(*asked, "cluster.devices=4", previous=first)
    assert (later.recipe.optim.global_batch, later.steps, later.samples) == (6, 10, 60)
    assert later.reasons["optim.global_batch"] == "as the run began"
    with pytest.raises(RecipeError, match=r"optim\.batch_per_device: 3 -> 4 changes what is"):
        resolved("optim.batch_per_device=4", "cluster.devices=2", previous=first)


def test_on_8_nodes_of_8_the_batch_is_that_of_s4() -> None:
    asked = ("optim.batch_per_device=384", "cluster.instance=dl1.24xlarge", "optim.micro_batch=16")
    for nodes, samples in ((8, 24576), (16, 49152)):
        found = preview("bert-large", *asked, f"cluster.nodes={nodes}").recipe.optim
        assert found.global_batch == samples


def test_a_warm_up_can_be_a_share_of_the_run() -> None:
    optim = resolved("optim.warmup_share=0.2843", "run.steps=7038").recipe.optim
    assert optim.warmup_steps == 2001

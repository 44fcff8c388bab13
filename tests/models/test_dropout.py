"""Dropout by itself: what it keeps has the right mean, and every mask is its own."""

import torch
from torch import Tensor, nn

from shardyard.models.random import Dropout, SampleKeys

DROP = 0.2
SAMPLES, TOKENS, WIDTH = 4, 100, 250
ELEMENTS = SAMPLES * TOKENS * WIDTH


def _dropped(
    place: str = "model.layers.0.mlp", *, seed: int = 0, samples: tuple[int, ...] = (0, 1, 2, 3)
) -> Tensor:
    """Ones after dropout."""
    keys = SampleKeys()
    keys.samples_B = torch.tensor(samples)
    module = nn.Identity()
    module.register_forward_hook(Dropout(place, drop=DROP, seed=seed, keys=keys))
    kept: Tensor = module(torch.ones(SAMPLES, TOKENS, WIDTH))
    return kept


def _agreement(one: Tensor, other: Tensor) -> float:
    return float(((one == 0) == (other == 0)).double().mean())


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    x = _dropped()
    assert set(x.flatten().tolist()) == {0.0, 1.25}
    # the standard deviation of one element is sqrt(p / (1 - p)) = 0.5
    assert abs(float(x.double().mean()) - 1.0) < 4 * 0.5 / ELEMENTS**0.5
    by_token = x.double().mean(dim=(0, 2))
    assert float((by_token - 1.0).abs().max()) < 5 * 0.5 / (SAMPLES * WIDTH) ** 0.5


def test_masks_of_places_seeds_and_samples_agree_by_chance_alone() -> None:
    by_chance = DROP**2 + (1 - DROP) ** 2
    x = _dropped()
    assert _agreement(x, _dropped()) == 1.0
    for other in (
        _dropped("model.layers.1.mlp"),
        _dropped("model.layers.0.self_attn"),
        _dropped(seed=1),
        _dropped(samples=(4, 5, 6, 7)),
        x.roll(1, dims=0),  # the samples of one micro-batch
        x.roll(1, dims=1),  # its tokens
        x.roll(1, dims=2),
    ):
        assert abs(_agreement(x, other) - by_chance) < 0.01


def test_a_model_that_is_evaluated_drops_nothing() -> None:
    module = nn.Identity().eval()
    module.register_forward_hook(Dropout("any", drop=DROP, seed=0, keys=SampleKeys()))
    assert torch.equal(module(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))

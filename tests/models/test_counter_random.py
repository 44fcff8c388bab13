"""Counter-based random numbers: known values, right distribution, nothing shared between keys."""

import torch

from shardyard.models.random import keep_mask, key_of, normal, random_bits


def _unsigned(bits: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in bits.tolist()]


def test_bits_are_those_of_splitmix64() -> None:
    # The first three outputs of SplitMix64 seeded with 1234567, as Rosetta Code lists them
    # (https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64): its state is counter x golden
    # + seed, and output i uses counter i + 1.
    bits = random_bits(1234567, torch.tensor([1, 2, 3]))
    assert _unsigned(bits) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_key_depends_on_every_part_and_on_nothing_else() -> None:
    assert key_of(0, "init", "a") == key_of(0, "init", "a")
    keys = {key_of(0, "init", "a"), key_of(1, "init", "a"), key_of(0, "init", "b"), key_of(0, "ab")}
    assert len(keys) == 4


def test_normal_numbers_have_mean_0_and_standard_deviation_1() -> None:
    sample = normal(key_of(0), torch.arange(1_000_000))
    assert abs(sample.mean()) < 4e-3  # 4 standard errors
    assert abs(sample.std() - 1) < 3e-3
    inside = (sample.abs() < 1).double().mean()
    assert abs(inside - 0.6827) < 2e-3


def test_a_mask_keeps_the_share_it_should_and_differs_by_key() -> None:
    counter = torch.arange(1_000_000)
    first = keep_mask(key_of(1), counter, drop=0.1)
    second = keep_mask(key_of(2), counter, drop=0.1)
    assert abs(first.double().mean() - 0.9) < 1.5e-3
    both = (first & second).double().mean()
    assert abs(both - 0.81) < 2e-3  # independent

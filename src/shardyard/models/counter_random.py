"""Random numbers as a pure function of (key, counter): no state, the same in every layout.

A stateful generator gives numbers that depend on who asked before; a counter gives element i of
stream k the same number on every rank, device and micro-batch split. The generator is SplitMix64
with the key as its start (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators", section 4; it passes BigCrush).
"""

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def key_of(*parts: int | str) -> int:
    """A signed 64-bit key from a seed and names, such as ``key_of(seed, "init", "lm_head")``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def place_key(seed: int, place: str) -> Tensor:
    """The key of one place where a model drops something, as a tensor in host memory.

    A compiler takes a number for part of the code, and compiles every block anew; a tensor without
    dimensions is an argument, which a device gets with the kernel.
    """
    return torch.tensor(key_of(seed, "dropout", place), device="cpu")


def random_bits(key: int | Tensor, counter: Tensor) -> Tensor:
    """64 random bits for each element of ``counter`` (int64; ``key`` broadcasts against it)."""
    # inductor multiplies out what it knows to be an index, in numbers that do not wrap; of a xor
    # it knows nothing
    counter = counter ^ 0
    bits = counter * _signed(_GOLDEN) + key  # int64 products wrap, as the algorithm wants
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    return bits ^ _shift_right(bits, 31)


def keep_mask(key: int | Tensor, counter: Tensor, *, drop: float) -> Tensor:
    """True with probability ``1 - drop``, resolved to 2**-32."""
    return _shift_right(random_bits(key, counter), 32) >= round(drop * 2**32)


def normal(key: int, counter: Tensor) -> Tensor:
    """Standard normal fp64 numbers, by the inverse of the normal distribution function.

    In fp64, so that the last bit of an fp32 result does not depend on how a kernel splits its work.
    """
    return torch.erfinv(uniform(key, counter)) * math.sqrt(2.0)


def uniform(key: int, counter: Tensor) -> Tensor:
    """fp64 numbers between -1 and 1, each alike."""
    share = (_shift_right(random_bits(key, counter), 11).double() + 0.5) * 2.0**-53
    return 2.0 * share - 1.0


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Logical shift: torch's own keeps the sign bit."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

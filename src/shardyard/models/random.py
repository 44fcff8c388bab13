"""Random numbers as a pure function of (key, counter): no state, the same in every layout.

A stateful generator gives numbers that depend on who asked before; a counter gives element i of
stream k the same number on every rank, device and micro-batch split. The generator is SplitMix64
with the key as its start (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators", section 4; it passes BigCrush).
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def key_of(*parts: int | str) -> int:
    """A signed 64-bit key from a seed and names, such as ``key_of(seed, "init", "lm_head")``."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def dropout_key(seed: int, module_name: str) -> Tensor:
    """Return the key of one place where a model drops values, as a tensor in host memory.

    A compiler treats a number as part of the code, and recompiles every block. A tensor without
    dimensions is an argument, which a device gets with the kernel.
    """
    return torch.tensor(key_of(seed, "dropout", module_name), device="cpu")


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


def _shift_right(bits: Tensor, num_bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign bit."""
    return (bits >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# Dropout masks depend only on (seed, sample, place in the model, element). The same sample
# therefore has the same mask on every rank, in every micro-batch and when it is recomputed.
#
# Shape suffixes: B = samples of a micro-batch, L = tokens of a sample, D = width of the model.


class SampleKeys:
    """Tells the dropout places and routers of one model what is passing through."""

    samples_B: Tensor | None = None
    """Stream position of each sample, int64; set at the beginning of each forward pass."""
    lengths_B: Tensor | None = None
    """Tokens of each sample, padding follows them; set with ``samples_B``. None: all are full."""
    computed_l: Tensor | None = None
    """Indices in a sample of the tokens that this rank computes; None: all."""
    tokens_l: Tensor | None = None
    """Indices of those among them whose residual stream it holds between matrices. None: all."""


class Dropout:
    """A forward hook that masks the output of one module while it trains."""

    def __init__(
        self,
        module_name: str,
        *,
        drop: float,
        seed: int,
        keys: SampleKeys,
        part: tuple[int, int] | None = None,
        is_of_samples: bool = False,
    ) -> None:
        """Args:
        is_of_samples: What passes is one vector of each sample, (B, 1, D).
        part: Where ranks of tp split the width: this rank's first column, and how many there are
            over all; all tokens that it computes pass through then. None: it has the whole width.
        """
        self._drop = drop
        self._dropout_key = dropout_key(seed, module_name)
        self._keys = keys
        self._part = part
        self._is_of_samples = is_of_samples

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if not module.training:
            return None
        if isinstance(output, tuple):
            return (self.mask(output[0]), *output[1:])
        return self.mask(output)

    def mask(self, x_BLD: Tensor) -> Tensor:
        """Drop elements of ``x_BLD`` and scale the rest so that its mean stays."""
        assert self._keys.samples_B is not None
        length, columns = x_BLD.shape[1:]
        first, width = self._part or (0, columns)
        key_B11 = random_bits(self._dropout_key, self._keys.samples_B)[:, None, None]
        tokens_L = self._keys.tokens_l if self._part is None else self._keys.computed_l
        if tokens_L is None or self._is_of_samples:
            tokens_L = torch.arange(length, device=x_BLD.device)
        columns_D = torch.arange(first, first + columns, device=x_BLD.device)
        element_LD = tokens_L[:, None] * width + columns_D
        keep_BLD = keep_mask(key_B11, element_LD, drop=self._drop)
        return x_BLD * keep_BLD * (1.0 / (1.0 - self._drop))


def add_dropout(modules: dict[str, nn.Module], *, drop: float, seed: int, keys: SampleKeys) -> None:
    """Mask the outputs of named modules. Call before sharding: its hooks must come after these."""
    for place, module in modules.items():
        module.register_forward_hook(Dropout(place, drop=drop, seed=seed, keys=keys))


def add_head_dropout(
    module: nn.Module, name: str, *, drop: float, seed: int, keys: SampleKeys, is_of_samples: bool
) -> None:
    """Mask what a head over labels reads; ``is_of_samples`` as of ``Dropout``."""
    mask = Dropout(name, drop=drop, seed=seed, keys=keys, is_of_samples=is_of_samples)
    module.register_forward_hook(mask)

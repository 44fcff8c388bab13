"""Sums of fp64 numbers that come out the same in any order.

Each number becomes whole multiples of fixed powers of two, 31 bits each, and these are added up as
64-bit integers: integer sums have no order. From 2^62 down to 2^-93 nothing of a number is lost;
what is smaller is cut off it before it is added, wherever that happens. Up to 2^31 summands fit.
"""

import math

import torch
from torch import Tensor

_UNITS = tuple(2.0**exponent for exponent in (31, 0, -31, -62, -93))
"""What one means in each place, largest first."""
_TOO_LARGE = 2.0**62

PLACES = len(_UNITS) + 1
"""Integers for one number: its multiples, and how many summands were none (NaN, infinity)."""


def to_integers(x_n: Tensor) -> Tensor:
    """The integers (n, PLACES) of fp64 numbers (n); add them up as they are."""
    has_value_n = x_n.abs() < _TOO_LARGE  # false of NaN too
    rest_n = torch.where(has_value_n, x_n, 0.0)
    places = []
    for unit in _UNITS:  # both steps are exact: the quotient's bits are a part of the number's
        place_n = (rest_n / unit).trunc()
        rest_n = rest_n - place_n * unit
        places.append(place_n.to(torch.int64))
    places.append((~has_value_n).to(torch.int64))
    return torch.stack(places, dim=1)


def of_integers(sums_nP: Tensor) -> Tensor:
    """The sums (n), fp64, of added integers; NaN where a summand was none."""
    *places, without_value = sums_nP.unbind(dim=1)
    total_n = torch.zeros_like(places[0], dtype=torch.float64)
    for unit, place_n in zip(reversed(_UNITS), reversed(places), strict=True):  # smallest first
        total_n = total_n + place_n.double() * unit
    return total_n.masked_fill(without_value > 0, math.nan)

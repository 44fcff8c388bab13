"""No number without its losses: they must be those of the same work that is not compiled.

A compiled model that is fast because it computes something else is told by its first losses.
"""

from collections.abc import Sequence
from typing import Any

FIRST = 8
MOST_APART = 0.01
"""Relative, of each of the first losses."""
DIFFER = "losses differ"
RATES = (
    "median_step_s", "tokens_per_s_per_device", "tokens_per_s_by_wall", "tflops_per_device_full",
    "mfu_full", "mfu_causal", "step_times_s", "wall_s", "images_per_s_per_device",
)  # fmt: skip
"""What is withheld where losses differ."""
_SAME = (
    "model", "blocks", "contender", "seq_len", "sequences_per_step_per_device",
)  # fmt: skip
_WITHOUT_EFFECT = ("model.compile=", "memory.")
"""Settings that change no loss."""


def checked(line: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A measured line with ``losses_apart``: its distance from the first that is not compiled.

    Where the two are further apart than ``MOST_APART`` the line loses its rates and its status
    becomes ``losses differ``. null: there is nothing to hold it against.
    """
    if line["status"] != "ok":
        return line
    held_against = next((other for other in earlier if _is_reference(other, line)), None)
    if not line["compile"] or held_against is None:
        return {**line, "losses_apart": None}
    apart = distance(line["losses"], held_against["losses"])
    if apart is None or apart <= MOST_APART:
        return {**line, "losses_apart": apart}
    kept = {key: value for key, value in line.items() if key not in RATES}
    message = (
        f"one of the first {FIRST} losses is {apart:.1%} from that without compilation, and at "
        f"most {MOST_APART:.0%} is a matter of rounding: the rates are withheld"
    )
    return {**kept, "status": DIFFER, "losses_apart": apart, "message": message}


def distance(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """The largest relative distance of two first losses; None where there are none."""
    pairs = list(zip(losses[:FIRST], others[:FIRST], strict=False))
    # not <= : a loss that is no number is as far away as can be
    found = [abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in pairs]
    return max(found) if found else None


def _is_reference(other: dict[str, Any], line: dict[str, Any]) -> bool:
    is_same = all(other.get(key) == line.get(key) for key in _SAME)
    is_plain = other["status"] == "ok" and not other["compile"]
    return is_plain and is_same and _telling(other) == _telling(line)


def _telling(line: dict[str, Any]) -> list[str]:
    return sorted(s for s in line["settings"] if not s.startswith(_WITHOUT_EFFECT))

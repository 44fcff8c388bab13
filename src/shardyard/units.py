"""Print bytes, counts, FLOP, seconds, dollars, shares and losses the same way everywhere."""

import math
import re
from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``. Powers of 1,024."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def format_count(number: float) -> str:
    """``6738415616`` -> ``6.74 B``. Powers of 1,000."""
    value = float(number)
    for unit in ("", " K", " M", " B", " T"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} Q"


def parse_count(written: object) -> object:
    """``"10B"`` -> ``10000000000``, ``"1.5k"`` -> ``1500``; anything else stays as it is.

    Suffixes are powers of 1,000: k (or K), M, B (or G) and T.
    """
    suffixed = r"(\d+)(?:\.(\d+))?([kKMBGT])"
    found = re.fullmatch(suffixed, written) if isinstance(written, str) else None
    if found is None:
        return written
    zeros = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}[found[3].upper()]
    decimals = (found[2] or "").rstrip("0")
    return int(found[1] + decimals.ljust(zeros, "0")) if len(decimals) <= zeros else written


def format_flops(flops: float) -> str:
    """``9.89e14`` -> ``989 TFLOP``; append ``/s`` for a rate."""
    value = float(flops)
    for unit in ("", " K", " M", " G", " T", " P", " E"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit or ' '}FLOP"
        value /= 1000
    return f"{value:.3g} ZFLOP"


def format_age(seconds: float) -> str:
    """``3.2 s ago``; ``just now`` where the clock that wrote the time is ahead of this one."""
    return "just now" if seconds < 0 else f"{format_seconds(seconds)} ago"


def format_seconds(seconds: float) -> str:
    """``93784`` -> ``1 d 2 h``; two units at most."""
    if seconds < 0.9995:  # 0.9996 s are 1 s in three digits, not 1e+03 ms
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for name, size, small_name, small in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{whole} s"


def format_usd(usd: float) -> str:
    """``1234.5`` -> ``$1,234.50``."""
    return f"${usd:,.2f}"


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LONGEST_LENGTH = 64
"""Characters of a length of time: reading one takes the square of them."""
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*(min|s|h|d|w)\s*")


def parse_seconds(text: str) -> float:
    """``90min``, ``24h``, ``1 d 12 h`` in seconds: what ``format_seconds`` writes is understood.

    Raises:
        ValueError: It is not above 0, or no numbers with the units s, min, h, d, w.
    """
    asked = text.strip().lower()
    parts = _LENGTH.findall(asked) if len(asked) <= _LONGEST_LENGTH else []
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not parts or _LENGTH.sub("", asked) or not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a length of time such as 90min, 24h or 1.5d")
    return seconds


ABSENT = "-"
"""Text for values that were not measured, or have no meaning here."""


def format_nats(value: float | None) -> str:
    """A loss or another metric: three decimals, one where it is large."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def format_value(value: float | None, unit: str, absent: str) -> str:
    """``(1536, "bytes", "")`` -> ``1.5 KiB``; None -> ``absent``."""
    if value is None:
        return absent
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "share":
        return format_percent(value)
    if unit == "USD":
        return format_usd(value)
    return f"{format_count(value)} {unit}"


def format_error(error: float | None) -> str:
    """``0.034`` -> ``+3.4 %``: more was predicted than measured."""
    return ABSENT if error is None else f"{100 * error:+.1f} %"


def format_percent(share: float) -> str:
    """``0.4123`` -> ``41.2 %``."""
    return f"{100 * share:.1f} %"


def format_list(words: Sequence[str]) -> str:
    """``[adamw, lamb, muon]`` -> ``adamw, lamb and muon``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last

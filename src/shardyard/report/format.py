"""Text of one value in the report, by its unit."""

from shardyard.units import format_bytes, format_count, format_seconds, format_usd

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

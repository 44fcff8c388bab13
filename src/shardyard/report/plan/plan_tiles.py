"""The head of a plan's page: what a person reads in ten seconds."""

from shardyard.planner.format import mark_of, spare_words
from shardyard.planner.plan import Plan
from shardyard.report.format import ABSENT, format_percent
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

Tile = tuple[str, str, str]


def tiles(plan: Plan) -> list[Tile]:
    """How full, how fast, how long, how dear, how often it fails: label, value, a line below."""
    return [
        ("memory of a rank", *_memory(plan)),
        (f"{plan.units} per second", *_rate(plan)),
        ("MFU", *_mfu(plan)),
        ("time", *_time(plan)),
        ("price", *_price(plan)),
        ("expected failures", *_failures(plan)),
    ]


def _memory(plan: Plan) -> tuple[str, str]:
    used, limit = plan.device_bytes, plan.memory_limit_bytes
    if limit is None:
        return format_bytes(used), f"{plan.fits}: {plan.fits_reason}"
    return f"{used / limit:.0%} full", f"{format_bytes(used)} of {format_bytes(limit)}"


def _rate(plan: Plan) -> tuple[str, str]:
    rate = plan.speed.tokens_per_s
    if rate is None:
        return ABSENT, plan.speed.reason
    each = f"{format_count(rate / plan.layout.world_size)} a device"
    step = f", {format_seconds(plan.step_s)} a step" if plan.step_s is not None else ""
    rates = "; rate of products not measured" if plan.speed.unmeasured else ""
    return f"{format_count(rate)}{mark_of(plan)}", each + step + rates


def _mfu(plan: Plan) -> tuple[str, str]:
    if plan.mfu is None:
        return ABSENT, plan.peak.source if plan.peak.flops_per_s is None else plan.speed.reason
    if plan.unit == "image":
        return format_percent(plan.mfu), "convolutions and products, forward and backward"
    causal = plan.mfu * plan.flops_per_token["causal"] / plan.flops_per_token["full"]
    return format_percent(plan.mfu), f"full attention; {format_percent(causal)} counted causally"


def _time(plan: Plan) -> tuple[str, str]:
    length = "length known once the data is prepared"
    if plan.steps is not None:
        length = f"{plan.steps:,} steps"
    if not plan.advances:
        return ABSENT, f"{length}; would not advance for failures"
    if plan.wall_s is None:
        return ABSENT, length
    wall = f"{format_seconds(plan.wall_s)}{mark_of(plan)}"
    if plan.failures is None:
        return wall, f"{length}, without failures"
    return wall, f"{length}, with start, saves and failures"


def _price(plan: Plan) -> tuple[str, str]:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    if per_hour is None:
        return ABSENT, plan.price.source
    words = f"{format_usd(per_hour)} an hour"
    if per_million is not None:
        words += f", {format_usd(per_million)} a million {plan.units}"
    if plan.usd is None:
        return ABSENT, words
    spares = spare_words(plan.spare_nodes)
    return f"{_short_usd(plan.usd)}{mark_of(plan)}", f"{words}{f', {spares}' if spares else ''}"


def _short_usd(usd: float) -> str:
    """Cents where they matter, and no more than a tile holds."""
    if usd < 1000:
        return format_usd(usd)
    return f"${usd:,.0f}" if usd < 1e6 else f"${format_count(usd)}"


def _failures(plan: Plan) -> tuple[str, str]:
    outlook = plan.failures
    if not plan.advances:
        return ABSENT, "more often than it can save"
    if outlook is None:
        return ABSENT, "needs a speed, a length and a known cluster"
    spares = spare_words(outlook.spare_nodes) or "no spare node"
    words = f"one every {format_seconds(outlook.mtbf.seconds)}; {spares}"
    return f"{outlook.expected_failures:.2g}", words

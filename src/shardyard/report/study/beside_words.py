"""Studies beside each other in words: the same cells in the terminal and on the page."""

from shardyard.report.compare.words import Table
from shardyard.report.format import ABSENT
from shardyard.report.study.beside import Scaling, SizeBeside, StudiesBeside
from shardyard.units import format_count


def sizes_table(beside: StudiesBeside) -> Table:
    """A row a side and a size that it has."""
    heads = [
        "#accelerators", "study", f"#{beside.unit}/s", "#efficiency", "speed", "#step time",
        "#interval", "scaling", "#its share", "#interval",
    ]  # fmt: skip
    return heads, [_row(beside, size) for size in beside.sizes if size.rate is not None]


def _row(beside: StudiesBeside, size: SizeBeside) -> list[str]:
    return [
        str(size.accelerators),
        beside.name(size.side),
        ABSENT if size.rate is None else format_count(size.rate),
        ABSENT if size.efficiency is None else f"{100 * size.efficiency:.1f} %",
        *_speed(size),
        *_scaling(size.scaling),
    ]


def _speed(size: SizeBeside) -> list[str]:
    speed = size.speed
    if speed is None:
        return ["", "", ""]
    if speed.ratio is None or speed.low is None or speed.high is None:
        return [speed.verdict, ABSENT, ABSENT]
    return [speed.verdict, f"{speed.ratio:.3f}", f"{speed.low:.3f} to {speed.high:.3f}"]


def _scaling(scaling: Scaling | None) -> list[str]:
    if scaling is None:
        return ["", "", ""]
    ends = f"{scaling.low:.3f} to {scaling.high:.3f}"
    return [scaling.verdict, f"{scaling.ratio:.3f}", ends]


def settings_table(beside: StudiesBeside) -> Table:
    """A row a setting that differs between the runs of the smallest size."""
    return ["setting", *beside.settings_of], [[e.name, *e.values] for e in beside.settings]


def how_words(beside: StudiesBeside) -> list[str]:
    """What the numbers are."""
    first = beside.name(0)
    return [
        f"Speed: step time at a size beside that of {first} at the same size; 1.05 is 5 % slower. "
        f"Scaling: efficiency beside that of {first}, both against their {beside.base} "
        "accelerators; 1.05 scales 5 % better. Intervals hold 95 % of the time, each by itself; "
        "inconclusive is not equal.",
        *_reasons(beside),
    ]


def _reasons(beside: StudiesBeside) -> list[str]:
    """Why a speed has no verdict, or no number."""
    said = [
        f"{beside.name(size.side)} on {size.accelerators}: {size.speed.why}"
        + (f"; {size.speed.how}." if size.speed.how else ".")
        for size in beside.sizes
        if size.speed is not None and size.speed.verdict == "inconclusive"
    ]
    missing = [
        f"{beside.name(size.side)} on {size.accelerators}"
        for size in beside.sizes
        if size.side and size.speed is None and size.rate is not None
    ]
    if missing:
        said.append(
            f"No speed is judged of {'; '.join(missing)}: that takes the run of this size on both "
            "sides, and one has published numbers alone, or its run's folder is gone."
        )
    return said

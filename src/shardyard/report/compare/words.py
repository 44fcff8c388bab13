"""The tables of a comparison in words: the same cells in the terminal and on the page."""

from shardyard.report.compare.comparison import ComparedRun, Comparison
from shardyard.report.compare.speed import Speed
from shardyard.report.format import ABSENT, format_nats
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

Table = tuple[list[str], list[list[str]]]
"""Heads, a # before those of numbers, and rows."""


def runs_table(comparison: Comparison) -> Table:
    """A row a run."""
    heads = [
        "run", "state", "#steps", "#loss", "#held-out loss", "#a second", "#peak memory",
        "#wall time", "#cost",
    ]  # fmt: skip
    return heads, [_run_row(run) for run in comparison.runs]


def _run_row(run: ComparedRun) -> list[str]:
    summary = run.summary
    rate, peak, cost = summary.tokens_per_s, summary.peak_memory_bytes, summary.cost
    return [
        run.id,
        summary.state,
        f"{summary.steps_done:,}",
        format_nats(summary.loss),
        format_nats(summary.eval_loss),
        ABSENT if rate is None else f"{format_count(rate)} {summary.unit}s",
        ABSENT if peak is None else format_bytes(peak),
        format_seconds(summary.wall_s),
        ABSENT if cost is None else format_usd(cost.so_far_usd),
    ]


def speeds_table(comparison: Comparison) -> Table:
    """A row a side but the first."""
    heads = [
        "beside the first",
        "verdict",
        "#step time",
        "#interval",
        "#all steps",
        "#steps",
        "why",
    ]
    rows = [
        [side.name, speed.verdict, *_numbers(speed), _why(speed)]
        for side, speed in zip(comparison.sides[1:], comparison.speeds, strict=True)
    ]
    return heads, rows


def _numbers(speed: Speed) -> list[str]:
    steps = f"{speed.steps[0]:,} and {speed.steps[1]:,}"
    if speed.ratio is None or speed.low is None or speed.high is None:
        return [ABSENT, ABSENT, ABSENT, steps]
    means = speed.ratio_of_means
    return [
        f"{speed.ratio:.3f}",
        f"{speed.low:.3f} to {speed.high:.3f}",
        ABSENT if means is None else f"{means:.3f}",
        steps,
    ]


def _why(speed: Speed) -> str:
    return f"{speed.why}; {speed.how}" if speed.how else speed.why


def left_out_words(comparison: Comparison) -> str:
    """How many steps say nothing of the speed, of each run that has any."""
    told = [
        f"of {run.id} {sum(run.left_out.values()):,} ("
        + ", ".join(f"{number:,} {reason}" for reason, number in run.left_out.items())
        + ")"
        for run in comparison.runs
        if run.left_out
    ]
    return f"Steps left out: {'; '.join(told)}." if told else "No step is left out."


def targets_table(comparison: Comparison) -> Table:
    """A row a target and run; no rows: there is no target."""
    heads = ["target", "run", "#step", "#samples", "#tokens or images", "#time", "#cost", ""]
    rows = []
    for each in comparison.targets:
        at = each.at
        asked = ", ".join(f"{name} {value:g}" for name, value in each.target.items())
        hours, usd = at.get("hours"), at.get("dollars")
        rows.append(
            [
                asked,
                each.run,
                *(_count(at.get(axis)) for axis in ("steps", "samples", "tokens")),
                ABSENT if hours is None else format_seconds(hours * 3600),
                ABSENT if usd is None else format_usd(usd),
                each.why_not,
            ]
        )
    return heads, rows


def _count(number: float | None) -> str:
    return ABSENT if number is None else f"{number:,.0f}"


def settings_table(comparison: Comparison) -> Table:
    """A row a setting that differs."""
    return ["setting", *_columns(comparison)], [[e.name, *e.values] for e in comparison.settings]


def surroundings_table(comparison: Comparison) -> Table:
    """A row a fact that differs."""
    rows = [[each.name, *each.values] for each in comparison.surroundings]
    return ["around them", *_columns(comparison)], rows


def _columns(comparison: Comparison) -> list[str]:
    return [run.id for run in comparison.runs]

"""The numbers at the top of the page and of the Markdown."""

from shardyard.report.cost import Cost
from shardyard.report.format import ABSENT, format_nats, format_percent
from shardyard.report.summary import Summary
from shardyard.units import format_bytes, format_count, format_seconds, format_usd


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """The headline: label, value, and a line below."""
    attempts, restarts = len(summary.attempts), summary.restarts
    return [
        (
            "training loss",
            format_nats(summary.loss),
            f"nats per {summary.unit}, step {summary.steps_done:,}",
        ),
        ("held-out loss", format_nats(summary.eval_loss), _below_evaluation(summary)),
        (f"{summary.unit}s per second", *_rate(summary)),
        ("MFU", *_mfu(summary)),
        ("peak memory", _bytes(summary.peak_memory_bytes), "of the rank that held most"),
        (
            "wall time",
            format_seconds(summary.wall_s),
            f"{attempts} attempt{_s(attempts)}, {restarts} restart{_s(restarts)}",
        ),
        *([] if summary.cost is None else [("cost", *_cost(summary.cost))]),
    ]


def _below_evaluation(summary: Summary) -> str:
    if summary.eval_loss is None:
        return "not evaluated"
    words = [
        f"{name.replace('_', ' ')} {format_nats(value)}" for name, value in summary.scores.items()
    ]
    if summary.unigram_entropy:
        words.append(f"unigram entropy {format_nats(summary.unigram_entropy)}")
    if summary.best_eval_loss is not None and summary.best_eval_loss < summary.eval_loss:
        words.append(f"best {format_nats(summary.best_eval_loss)}")
    return ", ".join(words)


def _rate(summary: Summary) -> tuple[str, str]:
    if summary.tokens_per_s is None or summary.step_time_s is None:
        return ABSENT, "no step was measured"
    ranks = summary.world_size or 1
    words = f"{ranks} rank{_s(ranks)}, {format_seconds(summary.step_time_s)} a step, medians"
    return format_count(summary.tokens_per_s), words


def _mfu(summary: Summary) -> tuple[str, str]:
    if summary.mfu is None:
        return ABSENT, "not known; why, below"
    causal = format_percent(summary.mfu["causal"])
    return format_percent(summary.mfu["full"]), f"full attention; {causal} counted causally"


def _cost(cost: Cost) -> tuple[str, str]:
    more = cost.to_end_usd
    end = "" if more is None else f", about {format_usd(more)} more to its end"
    return format_usd(cost.so_far_usd), f"at {format_usd(cost.usd_per_hour)} an hour{end}"


def _bytes(size: int | None) -> str:
    return ABSENT if size is None else format_bytes(size)


def _s(number: int) -> str:
    return "" if number == 1 else "s"

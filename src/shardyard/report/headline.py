"""The numbers at the top of the page and of the Markdown."""

from shardyard.report.summary import Summary
from shardyard.report.values import ABSENT, format_nats, format_percent
from shardyard.units import format_bytes, format_count, format_seconds


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """The headline: label, value, and a line below; also printed as Markdown."""
    found = [("loss", format_nats(summary.loss), f"training, step {summary.steps_done:,}")]
    if summary.eval_loss is not None:
        below = f"perplexity {format_nats(summary.perplexity)}"
        if summary.best_eval_loss is not None and summary.best_eval_loss < summary.eval_loss:
            below += f"; best loss {summary.best_eval_loss:.3f}"
        found.append(("held-out loss", format_nats(summary.eval_loss), below))
    if summary.unigram_entropy:
        found.append(
            ("unigram entropy", f"{summary.unigram_entropy:.3f}", "knowing token frequencies only")
        )
    rate = ABSENT if summary.tokens_per_s is None else format_count(summary.tokens_per_s)
    per_step = (
        "" if summary.step_time_s is None else f"{format_seconds(summary.step_time_s)} a step"
    )
    ranks = "" if summary.world_size is None else f", {summary.world_size} ranks"
    found.append(("tokens per second", rate, f"median, {per_step}{ranks}" if per_step else ""))
    if summary.mfu is None:
        found.append(("MFU", ABSENT, summary.mfu_note))
    else:
        full, causal = (format_percent(summary.mfu[name]) for name in ("full", "causal"))
        words = f"attention in full; causal half: {causal}; {summary.mfu_note}"
        found.append(("MFU", full, words))
    if summary.peak_memory_bytes:
        found.append(("peak memory", format_bytes(summary.peak_memory_bytes), "largest rank"))
    attempts = len(summary.attempts)
    below = f"{attempts} attempt{'' if attempts == 1 else 's'}, {summary.restarts} restarts"
    found.append(("wall time", format_seconds(summary.wall_s), below))
    return found

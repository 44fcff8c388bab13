"""Output of `shardyard plan`: first what takes ten seconds to read, the rest on request."""

import shutil
import sys
from collections.abc import Sequence
from textwrap import fill

from shardyard.cluster.live_prices import LivePrice
from shardyard.config.schema.recipe import Parallel
from shardyard.io.terminal import echo, print_table
from shardyard.planner.dry_run import DryRun
from shardyard.planner.failures import FailureForecast
from shardyard.planner.format import (
    Row,
    candidate_name,
    fitting_words,
    headline,
    mark_of,
    settings_of,
    spare_words,
    unmeasured_words,
)
from shardyard.planner.instance_search import ClusterQuote, ClusterQuotes
from shardyard.planner.layouts import Candidate, Search, speed_reason
from shardyard.planner.memory import RULE_BYTES_PER_PARAMETER
from shardyard.planner.plan import Plan, layout_name
from shardyard.units import format_bytes, format_count, format_flops, format_seconds, format_usd

NOTABLE_GAIN = 0.01
"""Faster by less is within any error."""


def show_headline(plan: Plan) -> None:
    """Fits, how full, speed, MFU, time, price, failures."""
    _print_paragraph(
        f"plan: {plan.model} {plan.parameters_words()}, "
        f"{layout_name(plan.layout)} over {plan.devices_words()}"
    )
    echo()
    print_table(("", "", ""), headline(plan))


def show_task(plan: Plan) -> None:
    """Show the training task, where no machines are named."""
    length = "length known once the data is prepared"
    if plan.steps is not None and plan.tokens is not None:
        length = f"{plan.steps:,} steps, {format_count(plan.tokens)} {plan.units}"
    _print_paragraph(
        f"plan: {plan.model} {plan.parameters_words()}, {length}, {plan.samples_words()} a step"
    )


def show_day_prices(prices: Sequence[LivePrice]) -> None:
    """Show today's price of a node, rented in each way."""
    echo()
    print_table(
        ("a node, rented", "an hour", ""),
        [
            (each.kind, "-" if usd is None else format_usd(usd), each.rate.source)
            for each in prices
            for usd in (each.rate.usd_per_hour,)
        ],
    )


def show_quality(plan: Plan, critical_batch: float) -> None:
    """Show the cost of the batch size in samples."""
    factor = plan.samples_factor(critical_batch)
    twice = plan.samples_factor(critical_batch, times=2)
    _print_paragraph(
        f"\nTime to quality is more than rate: with a critical batch of {critical_batch:,.0f}, a "
        f"given loss takes {factor:.2f} x the fewest samples at {plan.samples_per_step:,} a step, "
        f"and {twice:.2f} x at twice that: {twice / factor:.2f} x the samples of this recipe."
    )


def show_layouts(
    plan: Plan, search: Search, requested: Parallel, *, enough: tuple[int, Candidate] | None
) -> None:
    """Show the best layouts, each with its reason, and the settings of the one to take.

    Args:
        requested: Axes in the recipe.
        enough: Where no layout fits: nodes on which one does, and that layout.
    """
    if not search.best:
        _show_nearest(search, requested, enough)
        return
    which = "The fastest:" if search.fits else "These are tight, the fastest first:"
    _print_paragraph(f"\n{fitting_words(search)} {which}\n")
    rows = [_layout_row(candidate, mark_of(plan)) for candidate in search.best]
    print_table((f"{plan.units}/s", "full", "layout", "why"), rows)
    _show_advice(plan, search, requested)
    if enough is not None:
        _show_enough("\nIt fits", requested, enough)


def show_rejected(search: Search) -> None:
    """Why other families of layouts lost."""
    echo()
    print_table(("other families", ""), [(row.family, row.reason) for row in search.rejected])


def show_quotes(
    quotes: ClusterQuotes, axes: Parallel, *, deadline_s: float | None, budget_usd: float | None
) -> None:
    """The Pareto front, and the offer that meets what was asked, with its settings.

    Args:
        axes: What the recipe says of them.
    """
    _print_paragraph(
        f"\n{quotes.considered} clusters can train it. Of those, no other is both cheaper and "
        "faster than:\n"
    )
    rows = [_quote_row(offer) for offer in quotes.quotes]
    print_table(("cluster", "devices", "time", "price", "layout"), rows)
    for why in dict.fromkeys(offer.unmeasured for offer in quotes.quotes if offer.unmeasured):
        _print_paragraph(unmeasured_words(why))
    asked = []
    if deadline_s is not None:
        asked.append(f"within {format_seconds(deadline_s)}")
    if budget_usd is not None:
        asked.append(f"for at most {format_usd(budget_usd)}")
    if not asked:
        return
    if quotes.selected is None:
        cheapest, fastest = (_quote_text(quotes.quotes[place]) for place in (0, -1))
        _print_paragraph(
            f"\nNone is {' and '.join(asked)}. The cheapest is {cheapest}; the fastest is "
            f"{fastest}."
        )
        return
    word = "fastest" if deadline_s is None else "cheapest"
    _print_paragraph(f"\nThe {word} {' and '.join(asked)}: {_quote_text(quotes.selected)}:")
    picked = quotes.selected
    echo(
        f"  cluster.instance={picked.instance} cluster.nodes={picked.nodes} "
        f"{' '.join(settings_of(picked.candidate, axes))} "
        f"checkpoint.every={picked.failures.interval_steps}"
    )


def show_dry_run(plan: Plan, dry: DryRun) -> None:
    """Show the bytes of the real model next to the plan's."""
    peak = dry.peak
    names = [name for name in peak.terms if peak.terms[name] or plan.memory_term(name)]
    rows = [(n, format_bytes(plan.memory_term(n)), format_bytes(peak.terms[n])) for n in names]
    tensors = sum(plan.memory_term(name) for name in peak.terms)  # a CPU's process is in no tensor
    error = tensors / peak.bytes - 1
    rows.append(("sum", format_bytes(tensors), f"{format_bytes(peak.bytes)}"))
    _print_paragraph(
        f"\nThe real model, built and stepped without a device (torch {dry.torch}, "
        f"{dry.attention} attention): most in the {peak.phase}, at {peak.operator}. The plan is "
        f"{error:+.1%} off.\n"
    )
    print_table(("memory per rank", "plan", "dry run"), rows)


def show_details(plan: Plan, steps_reason: str) -> None:
    """Every term with its reason."""
    _show_memory(plan)
    _show_time(plan)
    _show_failures(plan)
    _show_rest(plan, steps_reason)


# --- rows ---------------------------------------------------------------------------------------


def _layout_row(candidate: Candidate, mark: str) -> tuple[str, str, str, str]:
    full = f"{candidate.device_bytes / candidate.limit_bytes:.0%}"
    if candidate.fit.verdict != "fits":
        full += f" {candidate.fit.verdict}"
    return (
        f"{format_count(candidate.tokens_per_s)}{mark}",
        full,
        candidate_name(candidate),
        speed_reason(candidate),
    )


def _show_advice(plan: Plan, search: Search, requested: Parallel) -> None:
    """The settings to take, where they are better than what was asked for."""
    better = search.best[0]
    if plan.fits == "does not fit":
        word = "does" if better.is_safe else "is tight"
        _print_paragraph(f"\nThis recipe does not fit. The first {word}:")
    elif plan.fits == "tight" and better.is_safe:
        _print_paragraph("\nThis recipe is tight. The first fits:")
    elif plan.step_s and (times := plan.step_s / better.step_s) > 1 + NOTABLE_GAIN:
        faster = f"{times - 1:.0%} faster than" if times < 2 else f"{times:.1f} times as fast as"
        tight = "" if better.is_safe else ", and as tight"
        _print_paragraph(f"\nThe first is {faster} this recipe{tight}:")
    else:
        return
    echo(f"  {' '.join(settings_of(better, requested))}")


def _show_nearest(
    search: Search, requested: Parallel, enough: tuple[int, Candidate] | None
) -> None:
    nearest = search.nearest
    assert nearest is not None  # a search without any result keeps what needs least
    over = nearest.device_bytes - nearest.limit_bytes
    much = f", {format_bytes(over)} too much on each device" if over > 0 else ""
    lead = (
        f"\n{fitting_words(search)} The nearest is {candidate_name(nearest)}: "
        f"{nearest.fit.reason}{much}."
    )
    if enough is None:
        _print_paragraph(
            f"{lead} Use devices with more memory, a smaller model or shorter samples."
        )
        return
    _show_enough(f"{lead} It fits on devices with more memory, or", requested, enough)


def _show_enough(lead: str, requested: Parallel, enough: tuple[int, Candidate]) -> None:
    nodes, candidate = enough
    _print_paragraph(f"{lead} as {candidate_name(candidate)} on {nodes} nodes:")
    echo(f"  cluster.nodes={nodes} {' '.join(settings_of(candidate, requested))}")


def _quote_row(quote: ClusterQuote) -> tuple[str, str, str, str, str]:
    return (
        f"{quote.nodes} x {quote.instance}",
        f"{quote.devices} x {quote.device}",
        f"{format_seconds(quote.wall_s)}{quote.mark}",
        f"{format_usd(quote.usd)}{quote.mark}",
        candidate_name(quote.candidate),
    )


def _quote_text(quote: ClusterQuote) -> str:
    spares = spare_words(quote.failures.spare_nodes)
    name = f"{quote.nodes} x {quote.instance}{f' {spares}' if spares else ''}"
    return (
        f"{name}, {format_seconds(quote.wall_s)}{quote.mark}, {format_usd(quote.usd)}{quote.mark}"
    )


def _print_paragraph(text: str) -> None:
    """A paragraph, folded between words where a terminal would break them."""
    if sys.stdout is not None and sys.stdout.isatty():
        lead = "\n" * (len(text) - len(text.lstrip("\n")))
        tail = "\n" * (len(text) - len(text.rstrip("\n")))
        width = shutil.get_terminal_size().columns
        text = lead + fill(text.strip("\n"), width, break_on_hyphens=False) + tail
    echo(text)


# --- details ------------------------------------------------------------------------------------


def _show_memory(plan: Plan) -> None:
    rows = [(term.name, format_bytes(term.bytes), term.reason) for term in plan.memory]
    rows += [
        ("allocated", format_bytes(plan.memory_bytes), f"tensors, {plan.memory_moment}"),
        ("reserved", format_bytes(plan.reserved_bytes), "what the allocator holds for them"),
        ("device", format_bytes(plan.device_bytes), f"as the driver shows; {plan.fits_reason}"),
    ]
    rule, ranks = RULE_BYTES_PER_PARAMETER * plan.trained_parameters, plan.layout.dp_shard
    _print_paragraph(
        f"\nRule of the field: {RULE_BYTES_PER_PARAMETER} bytes a trained parameter "
        f"(Adam, mixed precision) = {format_bytes(rule)}, split over {ranks}: "
        f"{format_bytes(rule / ranks)} a rank, before activations. Term by term:\n"
    )
    print_table(("memory per rank", "", ""), rows)


def _show_time(plan: Plan) -> None:
    step_s = plan.step_s
    if step_s is None:
        return
    rows = [
        (term.name, f"{format_seconds(term.seconds)}  {term.seconds / step_s:.1%}", term.reason)
        for term in plan.time
    ]
    rows.append(("step", format_seconds(step_s), plan.speed.reason))
    echo()
    print_table(("time of a step", "", ""), rows)


def _show_failures(plan: Plan) -> None:
    outlook = plan.failures
    if outlook is None:
        return
    rows: list[Row] = [
        ("interval", f"{outlook.interval_steps:,} steps", outlook.interval_reason),
        *_snapshots(outlook),
        (
            "first start",
            format_seconds(outlook.init_s),
            "rendezvous and init, as of a whole restart",
        ),
        ("effective", f"{outlook.ettr:.2%}", f"by {outlook.method}: {outlook.method_reason}"),
        *((f"restart: {p.name}", format_seconds(p.seconds), p.reason) for p in outlook.restart),
        ("restart: replay", format_seconds(outlook.replay.seconds), outlook.replay.reason),
        ("spare nodes", f"{outlook.spare_nodes}", outlook.spares_reason),
        ("MTBF", format_seconds(outlook.mtbf.seconds), outlook.mtbf.reason),
    ]
    echo()
    print_table(("failures", "", ""), rows)


def _snapshots(forecast: FailureForecast) -> list[Row]:
    every, mtbf_s = forecast.snapshot_interval_steps, forecast.snapshot_mtbf_s
    if every is None or mtbf_s is None:
        return []
    why = f"in memory, as for one failure every {format_seconds(mtbf_s)}"
    return [("snapshots", f"{every:,} steps", why)]


def _show_rest(plan: Plan, steps_reason: str) -> None:
    flops = {name: format_flops(value) for name, value in plan.flops_per_token.items()}
    length, why = "not known yet", steps_reason
    if plan.steps is not None and plan.tokens is not None:
        length = f"{plan.steps:,} steps"
        why = f"{format_count(plan.tokens)} {plan.units}; {steps_reason}"
    peak = plan.peak.flops_per_s
    work = ("work", f"{flops['full']} a token", f"{flops['causal']} with causal attention")
    if plan.unit == "image":
        work = ("work", f"{flops['full']} an image", "forward and backward")
    rows: list[Row] = [
        ("layout", layout_name(plan.layout), plan.devices_words()),
        work,
        ("step", f"{plan.tokens_per_step:,} {plan.units}", plan.samples_words()),
        ("length", length, why),
        ("peak", "-" if peak is None else f"{format_flops(peak)}/s", plan.peak.source),
        ("checkpoint", format_bytes(plan.checkpoint_bytes), "on disk, all ranks"),
        *(
            (term.name, f"{format_bytes(term.bytes)} a step", f"each rank sends {term.reason}")
            for term in plan.communication
        ),
    ]
    echo()
    print_table(("the rest", "", ""), rows)

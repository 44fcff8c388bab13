"""What `shardyard plan` prints: first what takes ten seconds to read, the rest on request."""

import click

from shardyard.cli.tables import print_table
from shardyard.plan.dry_run import DryRun
from shardyard.plan.layouts import Candidate, Search, strength
from shardyard.plan.memory import RULE_BYTES_PER_PARAMETER
from shardyard.plan.offers import Offer, Offers
from shardyard.plan.plan import Plan, layout_name
from shardyard.units import format_bytes, format_count, format_flops, format_seconds, format_usd

Row = tuple[str, str, str]


def show_headline(plan: Plan) -> None:
    """Fits, how full, speed, MFU, time, price, failures."""
    click.echo(plan.line())
    rows: list[Row] = [
        ("memory", plan.fits, plan.fits_reason),
        _speed(plan),
        ("MFU", "-" if plan.mfu is None else f"{plan.mfu:.1%}", _mfu_reason(plan)),
        ("time", _time(plan), _time_reason(plan)),
        _price(plan),
        *_failures(plan),
        *(("measured", "", source) for source in plan.measured),
    ]
    click.echo()
    print_table(("", "", ""), rows)


def show_quality(plan: Plan, critical_batch: float) -> None:
    """What the size of the batch costs in samples."""
    factor = plan.samples_factor(critical_batch)
    click.echo(
        f"\nTime to quality is not rate alone: at {plan.samples_per_step:,} samples a step and a "
        f"critical batch of {critical_batch:,.0f}, a given loss takes {factor:.2f} x the fewest "
        "samples. Doubling the batch would take "
        f"{plan.samples_factor(critical_batch, times=2) / factor:.2f} x as many again."
    )


def show_layouts(
    plan: Plan, found: Search, *, with_rejected: bool, enough_nodes: int | None
) -> None:
    """The best layouts, each with its reason, and why other families lost.

    Args:
        enough_nodes: Where nothing fits: nodes on which something does.
    """
    if not found.best:
        _show_nearest(found, enough_nodes)
    else:
        click.echo(f"\n{found.fitting:,} of {found.legal:,} legal layouts fit. The fastest:\n")
    rows = [_layout_row(candidate) for candidate in found.best]
    if rows:
        print_table(("layout", "tokens/s", "why"), rows)
    asked = plan.speed.tokens_per_s
    if found.best and asked:
        gain = found.best[0].tokens_per_s / asked - 1
        if gain > 0.01:
            click.echo(f"\nThe first is {gain:.0%} faster than what the recipe asks for:")
            click.echo(f"  {settings_of(found.best[0])}")
    if any(not candidate.is_trainable for candidate in found.best):
        click.echo("\n* can be planned, not trained yet: tp, pp, cp or ep above 1")
    if with_rejected:
        click.echo()
        print_table(
            ("other families", ""), [(row.family, row.reason) for row in found.rejected]
        )  # fmt: skip


def show_offers(found: Offers, *, deadline_s: float | None, budget_usd: float | None) -> None:
    """The Pareto front, and the offer that meets what was asked."""
    click.echo(
        f"\n{found.considered} clusters can train it. Of those, no other is both cheaper and "
        "faster than:\n"
    )
    rows = [_offer_row(offer) for offer in found.offers]
    print_table(("cluster", "time", "price", "failures", "layout"), rows)
    asked = []
    if deadline_s is not None:
        asked.append(f"within {format_seconds(deadline_s)}")
    if budget_usd is not None:
        asked.append(f"for at most {format_usd(budget_usd)}")
    if not asked:
        return
    if found.picked is None:
        click.echo(f"\nNone is {' and '.join(asked)}.")
        return
    best, time, price, *_ = _offer_row(found.picked)
    word = "fastest" if deadline_s is None else "cheapest"
    click.echo(f"\nThe {word} {' and '.join(asked)}: {best}, {time}, {price}.")


def show_dry_run(plan: Plan, dry: DryRun) -> None:
    """The real model's bytes beside the arithmetic's."""
    peak = dry.peak
    names = [name for name in peak.terms if peak.terms[name] or plan.memory_term(name)]
    rows = [(n, format_bytes(plan.memory_term(n)), format_bytes(peak.terms[n])) for n in names]
    error = plan.memory_bytes / peak.bytes - 1
    rows.append(("sum", format_bytes(plan.memory_bytes), f"{format_bytes(peak.bytes)}"))
    click.echo(
        f"\nThe real model, built and stepped without a device (torch {dry.torch}, "
        f"{dry.attention} attention): most in the {peak.phase}, at {peak.operator}. The plan is "
        f"{error:+.1%} off.\n"
    )
    print_table(("memory per rank", "plan", "dry run"), rows)


def show_details(plan: Plan, why_steps: str) -> None:
    """Every term with its reason."""
    _show_memory(plan)
    _show_time(plan)
    _show_failures(plan)
    _show_rest(plan, why_steps)


def settings_of(candidate: Candidate) -> str:
    """The overrides that make a recipe use a candidate."""
    layout = candidate.layout
    degrees = [
        f"parallel.{axis}={degree}"
        for axis in ("cp", "tp", "pp", "ep")
        if (degree := getattr(layout, axis)) > 1
    ]
    return " ".join(
        [
            f"parallel.zero={layout.zero}",
            f"parallel.dp_shard={layout.dp_shard}",
            *degrees,
            f"optim.micro_batch={candidate.micro_batch}",
            f"memory.recompute={candidate.recompute}",
        ]
    )


# --- rows ---------------------------------------------------------------------------------------


def _speed(plan: Plan) -> Row:
    rate = plan.speed.tokens_per_s
    if rate is None:
        return ("speed", "-", plan.speed.reason)
    each = f"{rate / plan.layout.world_size:,.0f} a device"
    return ("speed", f"{format_count(rate)} tokens/s", each)


def _mfu_reason(plan: Plan) -> str:
    peak = plan.peak.flops_per_s
    if peak is None:
        return plan.peak.source
    return f"of {format_flops(peak)}/s, attention counted in full"


def _time(plan: Plan) -> str:
    if plan.wall_s is not None:
        return format_seconds(plan.wall_s)
    return "-" if plan.step_s is None else f"{format_seconds(plan.step_s)} a step"


def _time_reason(plan: Plan) -> str:
    if plan.steps is None:
        return "length known once the data is prepared"
    length = f"{plan.steps:,} steps"
    if plan.step_s is None:
        return length
    return f"{length} of {format_seconds(plan.step_s)}, with saves and failures"


def _price(plan: Plan) -> Row:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    if per_hour is None:
        return ("price", "-", plan.price.source)
    parts = [f"{format_usd(per_hour)} an hour"]
    if per_million is not None:
        parts.append(f"{format_usd(per_million)} per million tokens")
    parts.append(plan.price.source)
    total = "-" if plan.usd is None else format_usd(plan.usd)
    return ("price", total, "; ".join(parts))


def _failures(plan: Plan) -> list[Row]:
    outlook = plan.failures
    if outlook is None:
        return [("failures", "-", plan.failures_reason)] if plan.steps and plan.time else []
    mtbf = outlook.mtbf
    words = (
        f"one every {format_seconds(mtbf.seconds)} ({format_seconds(mtbf.low_s)} to "
        f"{format_seconds(mtbf.high_s)}); {outlook.ettr:.1%} of the time trains; best saved every "
        f"{outlook.best_interval_steps:,} steps"
    )
    return [("failures", f"{outlook.expected_failures:.2g}", words)]


def _layout_row(candidate: Candidate) -> Row:
    mark = "" if candidate.is_trainable else " *"
    name = (
        f"{layout_name(candidate.layout)}, micro-batch {candidate.micro_batch}, recompute "
        f"{candidate.recompute}{mark}"
    )
    fit = candidate.fit
    tight = f"{fit.verdict}: " if fit.verdict != "fits" else ""
    why = f"{tight}{candidate.device_bytes / candidate.limit_bytes:.0%} full; {strength(candidate)}"
    return (name, format_count(candidate.tokens_per_s), why)


def _show_nearest(found: Search, enough_nodes: int | None) -> None:
    nearest = found.nearest
    assert nearest is not None  # a search without any result keeps what needs least
    over = nearest.device_bytes - nearest.limit_bytes
    advice = "Use devices with more memory, a smaller model or shorter samples."
    if enough_nodes is not None:
        advice = f"It fits on cluster.nodes={enough_nodes}, or on devices with more memory."
    click.echo(
        f"\nNone of {found.legal:,} legal layouts fits. The nearest is "
        f"{layout_name(nearest.layout)}, micro-batch {nearest.micro_batch}, recompute "
        f"{nearest.recompute}: {nearest.fit.reason}, {format_bytes(over)} too much on each device. "
        f"{advice}"
    )


def _offer_row(offer: Offer) -> tuple[str, str, str, str, str]:
    best = offer.candidate
    return (
        f"{offer.nodes} x {offer.instance} ({offer.devices} x {offer.device})",
        format_seconds(offer.wall_s),
        format_usd(offer.usd),
        f"{offer.failures.expected_failures:.2g}",
        f"{layout_name(best.layout)}, micro-batch {best.micro_batch}, recompute {best.recompute}",
    )


# --- details ------------------------------------------------------------------------------------


def _show_memory(plan: Plan) -> None:
    rows = [(term.name, format_bytes(term.bytes), term.reason) for term in plan.memory]
    rows += [
        ("allocated", format_bytes(plan.memory_bytes), f"tensors, {plan.memory_moment}"),
        ("reserved", format_bytes(plan.reserved_bytes), "what the allocator holds for them"),
        ("device", format_bytes(plan.device_bytes), f"as the driver shows; {plan.fits_reason}"),
    ]
    rule, ranks = RULE_BYTES_PER_PARAMETER * plan.parameters, plan.layout.dp_shard
    click.echo(
        f"\nRule of the field: {RULE_BYTES_PER_PARAMETER} bytes a parameter "
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
    click.echo()
    print_table(("time of a step", "", ""), rows)


def _show_failures(plan: Plan) -> None:
    outlook = plan.failures
    if outlook is None:
        return
    rows: list[Row] = [
        ("interval", f"{outlook.interval_steps:,} steps", outlook.interval_reason),
        ("effective", f"{outlook.ettr:.2%}", f"by {outlook.method}: {outlook.method_reason}"),
        *((f"restart: {p.name}", format_seconds(p.seconds), p.reason) for p in outlook.restart),
        ("restart: replay", format_seconds(outlook.replay.seconds), outlook.replay.reason),
        ("spare nodes", f"{outlook.spare_nodes}", outlook.spares_reason),
        ("MTBF", format_seconds(outlook.mtbf.seconds), outlook.mtbf.reason),
    ]
    click.echo()
    print_table(("failures", "", ""), rows)


def _show_rest(plan: Plan, why_steps: str) -> None:
    flops = {name: format_flops(value) for name, value in plan.flops_per_token.items()}
    length, why = "not known yet", why_steps
    if plan.steps is not None and plan.tokens is not None:
        length, why = f"{plan.steps:,} steps", f"{format_count(plan.tokens)} tokens; {why_steps}"
    peak = plan.peak.flops_per_s
    tokens = f"{plan.tokens_per_step:,} tokens"
    rows: list[Row] = [
        ("layout", layout_name(plan.layout), plan.devices_words()),
        ("work", f"{flops['full']} a token", f"{flops['causal']} with causal attention"),
        ("step", tokens, f"{plan.samples_per_step:,} samples x {plan.seq_len:,}"),
        ("length", length, why),
        ("peak", "-" if peak is None else f"{format_flops(peak)}/s", plan.peak.source),
        ("checkpoint", format_bytes(plan.checkpoint_bytes), "on disk, all ranks"),
        *(
            (term.name, f"{format_bytes(term.bytes)} a step", f"each rank sends {term.reason}")
            for term in plan.communication
        ),
    ]
    click.echo()
    print_table(("the rest", "", ""), rows)

"""The plan's page: one HTML file for a person who decides whether to start, and on what.

Pure: a plan, and what a search and a comparison of offers found, in; text out. Recipes and machines
may hold any text, so that everything shown passes through ``esc``.
"""

from collections.abc import Callable, Sequence

from shardyard.planner.failures import FailureForecast
from shardyard.planner.format import fitting_words, mark_of, spare_words, unmeasured_words
from shardyard.planner.instance_search import ClusterQuote, ClusterQuotes
from shardyard.planner.layouts import Candidate, Search, speed_reason
from shardyard.planner.memory import RULE_BYTES_PER_PARAMETER, MemoryEstimate
from shardyard.planner.plan import Plan, layout_name
from shardyard.planner.plan_diff import IN_USE, Advice, Change
from shardyard.report.html import (
    esc,
    render_page,
    render_section,
    render_table,
    render_tiles,
    swatch,
)
from shardyard.report.plan.bars import (
    MEMORY_COLOURS,
    OWN_NAMES,
    TIME_COLOURS,
    Bar,
    bars_of,
    is_planned,
    own_share,
)
from shardyard.units import (
    ABSENT,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_usd,
)

# The head of a plan's page: what a person reads in ten seconds.

Tile = tuple[str, str, str]


def tiles(plan: Plan) -> list[Tile]:
    """Return tiles on memory, speed, MFU, time, price and failures: label, value, a line below."""
    return [
        ("memory of a rank", *_memory_tile(plan)),
        (f"{plan.units} per second", *_rate(plan)),
        ("MFU", *_mfu(plan)),
        ("time", *_time_tile(plan)),
        ("price", *_price_tile(plan)),
        ("expected failures", *_failures_tile(plan)),
    ]


def _memory_tile(plan: Plan) -> tuple[str, str]:
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


def _time_tile(plan: Plan) -> tuple[str, str]:
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


def _price_tile(plan: Plan) -> tuple[str, str]:
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


def _failures_tile(plan: Plan) -> tuple[str, str]:
    outlook = plan.failures
    if not plan.advances:
        return ABSENT, "more often than it can save"
    if outlook is None:
        return ABSENT, "needs a speed, a length and a known cluster"
    spares = spare_words(outlook.spare_nodes) or "no spare node"
    words = f"one every {format_seconds(outlook.mtbf.seconds)}; {spares}"
    return f"{outlook.expected_failures:.2g}", words


# The part of a plan's page that gives advice: what each technique and each lever would do.
#
# One picture, memory beside step time, a bar for each technique; then tables with the same numbers,
# and why.

Cells = tuple[str, ...]

THIS = "this recipe"

_MOST_OF_LIMIT = 1.5
"""Factor of the limit at which memory bars are cut off, to leave room for plans that fit."""


def advice_sections(advice: Advice, *, has_chart: bool) -> list[str]:
    """Techniques, then levers, as HTML."""
    picture = _chart(advice) if has_chart else ""
    note = (
        '<p class="note">Each row is this recipe with the settings of its row, planned again; the '
        "micro-batch and the batch stay.</p>"
    )
    techniques = f"{picture}{_card(advice, advice.techniques, note)}"
    return [
        render_section("techniques", "What each technique would do", techniques),
        render_section("levers", "What each lever would do", _card(advice, advice.levers, note)),
    ]


def technique_bars(advice: Advice) -> tuple[list[Bar], list[Bar]]:
    """Memory and step of the recipe and of every technique that is another plan."""
    named = [(THIS, advice.now)]
    named += [
        (f"{change.name}: {' '.join(change.settings)}", change.plan)
        for change in advice.techniques
        if change.plan is not None and change.effect is not None and change.effect.verdict != IN_USE
    ]
    pairs = [bars_of(name, plan) for name, plan in named]
    steps = [step for _, step in pairs if step.parts]
    return [memory for memory, _ in pairs], steps


def _chart(advice: Advice) -> str:
    from shardyard.report.plan.charts import side_by_side  # only here: matplotlib is an extra

    memory, steps = technique_bars(advice)
    limit = advice.now.memory_limit_bytes
    most = None if limit is None else _MOST_OF_LIMIT * limit
    return side_by_side(memory, steps, limit, prefix="technique-", most_bytes=most)


def _card(advice: Advice, changes: Sequence[Change], note: str) -> str:
    heads = ["", "#device", "#fits", "#step", f"#{advice.now.units}/s", "#price", ""]
    rows = [_advice_row(THIS, advice.now, "")]
    rows += [
        _advice_row(change.name, change.plan, _words(change)) for change in changes if change.plan
    ]
    table = render_table(heads, rows) + _unmeasured(advice, changes)
    refused = [
        (esc(each.name), esc(each.rejection_reason)) for each in changes if each.plan is None
    ]
    if refused:
        table += f'<p class="note">Not here:</p>{render_table(["", ""], refused)}'
    return f'<div class="card" style="margin-top:12px">{note}{table}</div>'


def _advice_row(name: str, plan: Plan, words: str) -> Cells:
    return tuple(
        esc(cell)
        for cell in (
            name,
            format_bytes(plan.device_bytes),
            plan.fits,
            _marked(plan, plan.step_s, format_seconds),
            _marked(plan, plan.speed.tokens_per_s, format_count),
            _marked(plan, plan.usd, format_usd),
            words,
        )
    )


def _marked(plan: Plan, value: float | None, written: Callable[[float], str]) -> str:
    return ABSENT if value is None else f"{written(value)}{mark_of(plan)}"


def _unmeasured(advice: Advice, changes: Sequence[Change]) -> str:
    plans = [advice.now, *(change.plan for change in changes if change.plan is not None)]
    found = dict.fromkeys(plan.speed.unmeasured for plan in plans if plan.speed.unmeasured)
    return "".join(f'<p class="note">{esc(unmeasured_words(why))}</p>' for why in found)


def _words(change: Change) -> str:
    """Describe the change: its name, its effect and reason, and the settings to write."""
    assert change.effect is not None  # it has a plan
    parts = [f"{change.what}: {change.effect.words()}"]
    parts += [change.note] if change.note else []
    parts += [f"set {' '.join(change.settings)}"]
    if change.measured is not None:
        step = format_seconds(change.measured.step_s)
        parts.append(f"{change.measured.run_id} measured {step} a step")
    return "; ".join(parts)


def plan_page(
    plan: Plan,
    *,
    search: Search | None,
    quotes: ClusterQuotes | None,
    title: str,
    bars: Sequence[tuple[str, MemoryEstimate]] = (),
    advice: Advice | None = None,
    no_charts_reason: str = "",
) -> str:
    """Return the whole page as text: no network, no script, no other files.

    Args:
        search: Search whose best layouts are drawn next to the plan.
        bars: Name and memory of each of ``search.best``, in its order.
        advice: Effect of each technique and lever; None: not requested.
        title: The page's first line.
        no_charts_reason: Why there are none; empty: they are drawn.
    """
    parts = [
        _header(plan, title),
        _charts(plan, search, bars, no_charts_reason),
        _memory(plan),
        _time(plan),
        _layouts(plan, search),
        *([] if advice is None else advice_sections(advice, has_chart=not no_charts_reason)),
        _failures(plan),
        _price(plan),
        _quotes(quotes, has_chart=not no_charts_reason),
        _rest(plan),
    ]
    body = "\n".join(part for part in parts if part)
    footer = (
        "Written by <code>shardyard plan --page</code>. Predictions from datasheets, papers and "
        "published runs; no run was started."
    )
    return render_page(title, body, footer=footer)


def _header(plan: Plan, title: str) -> str:
    verdict = plan.fits if plan.fits != "unknown" else "memory unknown"
    kind = esc(plan.fits.replace(" ", "-"))
    measured = "".join(f"<li>{esc(source)}</li>" for source in plan.measured)
    looked_up = "All of this is predicted: rates and prices are looked up."
    sources = f"Measured, not looked up:<ul>{measured}</ul>" if measured else looked_up
    return f"""<header>
<p class="eyebrow">Training plan</p>
<h1>{esc(title)} <span class="badge {kind}">{esc(verdict)}</span></h1>
<p class="lead">{esc(plan.line().removeprefix("plan: "))}</p>
{render_tiles(tiles(plan))}
<div class="note" id="measured" style="margin-top:12px">{sources}</div>
</header>"""


def _charts(
    plan: Plan, search: Search | None, bars: Sequence[tuple[str, MemoryEstimate]], reason: str
) -> str:
    if reason:
        body = f'<p class="muted">{esc(reason)}</p>'
    else:
        from shardyard.report.plan.charts import figures  # only here: matplotlib is an extra

        body = figures(plan, search, bars)
    return render_section("pictures", "Memory and time at a glance", body)


# --- terms --------------------------------------------------------------------------------------


def _memory(plan: Plan) -> str:
    total, limit = plan.memory_bytes, plan.memory_limit_bytes
    rows: list[Cells] = [
        (
            swatch(MEMORY_COLOURS.get(term.name, "grey")) + esc(term.name),
            format_bytes(term.bytes),
            format_percent(term.bytes / total),
            esc(term.reason),
        )
        for term in plan.memory
    ]
    has_more = plan.device_bytes != total  # on a CPU the process is a term, and all there is
    name = "tensors" if has_more else "sum"
    sums = [_row(name, format_bytes(total), "100.0 %", f"most {plan.memory_moment}")]
    if has_more:
        sums += [
            _row("reserved", format_bytes(plan.reserved_bytes), "", "what the allocator holds"),
            _row("device", format_bytes(plan.device_bytes), "", "what the driver shows"),
        ]
    shown = ABSENT if limit is None else format_bytes(limit)
    sums.append(_row("limit", shown, "", f"{plan.fits}: {plan.fits_reason}"))
    table = render_table(
        ["term", "#bytes", "#share", ""], [*rows, *sums], totals=len(sums), is_folding=True
    )
    states = RULE_BYTES_PER_PARAMETER * plan.trained_parameters
    note = (
        f"For comparison, the rule of the field: {RULE_BYTES_PER_PARAMETER} bytes a trained "
        f"parameter, {format_bytes(states)} over all ranks, and activations on top."
    )
    body = f'<div class="card">{table}<p class="note">{note}</p></div>'
    return render_section("memory", "Memory of one rank", body)


def _time(plan: Plan) -> str:
    heading = "Time of one step"
    if plan.step_s is None:
        text = f"No speed: {plan.speed.reason}."
        return render_section("time", heading, f'<p class="muted">{esc(text)}</p>')
    rows: list[Cells] = [
        (
            swatch(TIME_COLOURS.get(term.name, "grey")) + esc(term.name),
            format_seconds(term.seconds),
            format_percent(term.seconds / plan.step_s),
            "computes" if term.name in OWN_NAMES else "lost",
            esc(term.reason),
        )
        for term in plan.time
    ]
    own = own_share([(term.name, term.seconds) for term in plan.time])
    rows.append(
        _row("step", format_seconds(plan.step_s), "100.0 %", f"{own:.0%} computes", "the sum")
    )
    table = render_table(["term", "#time", "#share", "#kind", ""], rows, totals=1, is_folding=True)
    rates = f" {unmeasured_words(plan.speed.unmeasured)}." if plan.speed.unmeasured else ""
    note = f"From {plan.speed.reason}.{rates}"
    body = f'<div class="card">{table}<p class="note">{esc(note)}</p></div>'
    return render_section("time", heading, body)


# --- layouts ------------------------------------------------------------------------------------


def _layouts(plan: Plan, search: Search | None) -> str:
    if search is None:
        return ""
    found = fitting_words(search)
    if search.best:
        rows = [_layout(plan, place, best) for place, best in enumerate(search.best, start=1)]
        heads = ["", "layout", f"#{plan.units}/s", "#step", "#MFU", "#device", "#fits", ""]
        which = "The fastest:" if search.fits else "These are tight, the fastest first:"
        body = f'<p class="note">{esc(found)} {which}</p>{render_table(heads, rows)}'
    else:
        body = f'<p class="bad">{esc(found)}</p>{_nearest(search.nearest)}'
    rejected = render_table(
        ["family", ""], [_row(family.family, family.reason) for family in search.rejected]
    )
    more = (
        f"<details><summary>Families that did not win, each with its reason: "
        f"{len(search.rejected)}</summary><div>{rejected}</div></details>"
        if search.rejected
        else ""
    )
    return render_section("layouts", "Best layouts", f'<div class="card">{body}</div>{more}')


def _layout(plan: Plan, position: int, candidate: Candidate) -> Cells:
    this = " (this plan)" if is_planned(candidate, plan) else ""
    mfu = ABSENT
    if plan.peak.flops_per_s is not None:
        peak = plan.peak.flops_per_s * candidate.layout.world_size
        mfu = format_percent(candidate.tokens_per_s * plan.flops_per_token["full"] / peak)
    return _row(
        f"{position}.",
        f"{_layout_details(candidate)}{this}",
        f"{format_count(candidate.tokens_per_s)}{mark_of(plan)}",
        f"{format_seconds(candidate.step_s)}{mark_of(plan)}",
        mfu,
        f"{format_bytes(candidate.device_bytes)}, "
        f"{candidate.device_bytes / candidate.limit_bytes:.0%}",
        candidate.fit.verdict,
        speed_reason(candidate),
    )


def _layout_details(candidate: Candidate) -> str:
    name = layout_name(candidate.layout)
    more = "".join(f", {setting}" for setting in candidate.more)
    return f"{name}, micro-batch {candidate.micro_batch}, recompute {candidate.recompute}{more}"


def _nearest(candidate: Candidate | None) -> str:
    if candidate is None:
        return ""
    text = f"What needs least memory is {_layout_details(candidate)}: {candidate.fit.reason}."
    return f"<p>{esc(text)}</p>"


# --- failures, price, the rest ------------------------------------------------------------------


def _failures(plan: Plan) -> str:
    outlook = plan.failures
    if outlook is None:
        text = "Not predicted: that takes a speed, a length and a known cluster."
        if not plan.advances:
            text = esc(plan.failures_reason)
        return render_section("failures", "Failures", f'<p class="muted">{text}</p>')
    mtbf = outlook.mtbf
    of_range = f"{format_seconds(mtbf.low_s)} to {format_seconds(mtbf.high_s)}"
    own = f"{outlook.interval_steps:,} steps, {format_seconds(outlook.interval_s)}"
    phases = outlook.restart_s_per_failure + outlook.replay.seconds
    rows = [
        _row("mean time between failures", format_seconds(mtbf.seconds), mtbf.reason),
        _row("its range", of_range, "by the worst and the best published rate"),
        _row("failures", f"{outlook.expected_failures:.2g} in this run", "restarts included"),
        _row("a checkpoint every", own, outlook.interval_reason),
        _row(
            "effective time (ETTR)",
            format_percent(outlook.ettr),
            f"of wall time trains and stays; by {outlook.method}: {outlook.method_reason}",
        ),
        _row("spare nodes", f"{outlook.spare_nodes}", outlook.spares_reason),
    ]
    restart = [
        _row(phase.name, format_seconds(phase.seconds), phase.reason, phase.source)
        for phase in (*outlook.restart, outlook.replay)
    ]
    restart.append(_row("one failure", format_seconds(phases), "the sum", ""))
    facts = render_table(["", "#", ""], rows, is_folding=True)
    costs = render_table(["phase", "#time", "why", ""], restart, totals=1, is_folding=True)
    body = (
        f'<div class="card">{_wall_time(outlook)}{facts}'
        f'<p class="note" style="margin-top:16px">What one failure costs:</p>{costs}</div>'
    )
    return render_section("failures", "Failures", body)


def _wall_time(forecast: FailureForecast) -> str:
    """Wall time split as the run's own report splits it, in the same colours."""
    shares = {
        "init": forecast.init_s,
        "productive": forecast.productive_s,
        "checkpoint-blocked": forecast.checkpoint_blocked_s,
        "lost-work": forecast.lost_work_s,
        "restart": forecast.restart_s,
    }
    spans = "".join(
        f'<span class="{name}" style="width:{100 * seconds / forecast.wall_s:.3f}%" '
        f'title="{name}: {esc(format_seconds(seconds))}"></span>'
        for name, seconds in shares.items()
        if seconds > 0
    )
    keys = "".join(
        f'<span><span class="swatch {name}"></span>{name.replace("-", " ")} '
        f"{esc(format_seconds(seconds))}</span>"
        for name, seconds in shares.items()
    )
    wall = esc(format_seconds(forecast.wall_s))
    return (
        f'<div class="muted">wall time: {wall}</div><div class="bar">{spans}</div>'
        f'<div class="keys">{keys}</div>'
    )


def _price(plan: Plan) -> str:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    mark = mark_of(plan)
    rows = [
        _row("an hour", _usd(per_hour), plan.price.source),
        _row("the run", _usd(plan.usd) + mark, _run_words(plan)),
        _row(f"a million {plan.units}", _usd(per_million) + mark, "without failures"),
    ]
    if per_hour is None:
        rows = rows[:1]
    body = f'<div class="card">{render_table(["", "#price", ""], rows, is_folding=True)}</div>'
    return render_section("price", "Price", body)


def _run_words(plan: Plan) -> str:
    if not plan.advances:
        return "it would not advance for failures, and have no end"
    if plan.wall_s is None:
        return "its time is not known"
    failures = "with start, saves and failures" if plan.failures is not None else "without failures"
    spares = spare_words(plan.spare_nodes)
    on = f"{plan.devices_words()}{f' {spares}' if spares else ''}"
    return f"{format_seconds(plan.wall_s)} on {on}, {failures}"


def _usd(usd: float | None) -> str:
    return ABSENT if usd is None else format_usd(usd)


def _quotes(quotes: ClusterQuotes | None, *, has_chart: bool) -> str:
    if quotes is None:
        return ""
    rows = [_quote_row(offer, quotes.selected) for offer in quotes.quotes]
    heads = ["cluster", "#time", "#price", "#an hour", "#failures", "devices", "layout"]
    note = (
        f"{quotes.considered} clusters can train it. No other is both cheaper and faster than one "
        f"of these {len(quotes.quotes)}."
    )
    picked = "None meets the deadline or the budget that was given."
    if quotes.selected is not None:
        usd, wall = format_usd(quotes.selected.usd), format_seconds(quotes.selected.wall_s)
        mark = quotes.selected.mark
        picked = f"Picked: {quotes.selected.name}, {wall}{mark}, {usd}{mark}."
    rates = dict.fromkeys(offer.unmeasured for offer in quotes.quotes if offer.unmeasured)
    unmeasured = "".join(f'<p class="note">{esc(unmeasured_words(why))}</p>' for why in rates)
    passed = render_table(["instance", ""], [_row(*pair) for pair in quotes.passed_over])
    more = (
        f"<details><summary>Instance types in no offer: {len(quotes.passed_over)}</summary>"
        f"<div>{passed}</div></details>"
        if quotes.passed_over
        else ""
    )
    body = (
        f'<p class="note">{esc(note)} <b>{esc(picked)}</b></p>'
        f"{_quotes_chart(quotes) if has_chart else ''}"
        f'<div class="card" style="margin:12px 0">{render_table(heads, rows)}{unmeasured}</div>'
        f"{more}"
    )
    return render_section("offers", "What can be rented", body)


def _quotes_chart(quotes: ClusterQuotes) -> str:
    from shardyard.report.plan.charts import draw_quotes

    return f'<figure id="offers-picture" class="wide">{draw_quotes(quotes)}</figure>'


def _quote_row(quote: ClusterQuote, selected: ClusterQuote | None) -> Cells:
    mark = swatch("orange" if quote == selected else "blue")
    name, *rest = _row(
        quote.name,
        f"{format_seconds(quote.wall_s)}{quote.mark}",
        f"{format_usd(quote.usd)}{quote.mark}",
        format_usd(quote.usd_per_hour),
        f"{quote.failures.expected_failures:.2g}",
        f"{quote.devices} x {quote.device}",
        _layout_details(quote.candidate),
    )
    return (mark + name, *rest)


def _rest(plan: Plan) -> str:
    flops, peak = plan.flops_per_token, plan.peak.flops_per_s
    length = "known once the data is prepared"
    if plan.steps is not None and plan.tokens is not None:
        length = f"{plan.steps:,} steps, {format_count(plan.tokens)} {plan.units}"
    frozen = f", {plan.frozen_parameters:,} of them frozen" if plan.frozen_parameters else ""
    rows = [
        _row("model", f"{plan.parameters:,} parameters{frozen}", plan.model),
        _row("devices", plan.devices_words(), layout_name(plan.layout)),
        _row(
            "a step",
            f"{plan.tokens_per_step:,} {plan.units}",
            f"{plan.samples_words()}, micro-batch {plan.micro_batch}, recompute {plan.recompute}",
        ),
        _row("length", length, ""),
        *_of_images(plan),
        _row(
            "work",
            f"{format_flops(flops['full'])} for each of the {plan.units}",
            "forward and backward"
            if plan.unit == "image"
            else f"full attention; {format_flops(flops['causal'])} a token counted causally",
        ),
        _row(
            "peak of a device",
            ABSENT if peak is None else f"{format_flops(peak)}/s",
            plan.peak.source,
        ),
        _row("a checkpoint", format_bytes(plan.checkpoint_bytes), "on disk, all ranks"),
    ]
    sent = [
        _row(f"{term.name}, a rank and step", format_bytes(term.bytes), term.reason)
        for term in plan.communication
    ]
    body = f'<div class="card">{render_table(["", "#", ""], [*rows, *sent], is_folding=True)}</div>'
    return render_section("rest", "What is trained, and on what", body)


def _of_images(plan: Plan) -> list[Cells]:
    rows = []
    if plan.unit == "image" and plan.epoch_s is not None:
        rows.append(
            _row("an epoch", format_seconds(plan.epoch_s), f"{plan.epoch_samples:,} images")
        )
    if plan.decoding is not None:
        found = plan.decoding
        words = f"{format_count(found.decoded_per_s)} images/s"
        wait = "the devices wait" if found.is_bound else "the devices never wait"
        needed = f"{found.needed:,} cores a node keep them busy; {found.reason}"
        rows.append(_row("decoding", words, f"{wait}; {needed}"))
    return rows


def _row(*values: object) -> Cells:
    return tuple(esc(value) for value in values)

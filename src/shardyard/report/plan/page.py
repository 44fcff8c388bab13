"""A plan as blocks: the page shows all of them, the terminal those that it asks for.

Pure: a plan, and what a search and a comparison of offers found, in; values out.
"""

from collections.abc import Callable, Iterator, Sequence

from shardyard.config.schema.recipe import Parallel
from shardyard.planner.failures import FailureForecast
from shardyard.planner.format import (
    band_words,
    candidate_name,
    extras_words,
    fitting_words,
    headline,
    mark_of,
    range_words,
    reference_rows,
    settings_of,
    spare_words,
    unmeasured_words,
)
from shardyard.planner.instance_search import ClusterQuotes
from shardyard.planner.layouts import Candidate, Search, speed_reason
from shardyard.planner.memory import RULE_BYTES_PER_PARAMETER, MemoryEstimate
from shardyard.planner.plan import Plan, layout_name
from shardyard.planner.plan_diff import Advice
from shardyard.planner.throughput import Range
from shardyard.report.document import (
    BarPart,
    Block,
    Callout,
    Details,
    Document,
    PageSection,
    Paragraph,
    ShareBar,
    Table,
    Text,
    Tiles,
    only_in,
)
from shardyard.report.html import render_html
from shardyard.report.plan.advice import advice_sections
from shardyard.report.plan.bars import (
    MEMORY_COLOURS,
    OWN_NAMES,
    TIME_COLOURS,
    is_planned,
    own_share,
)
from shardyard.report.plan.offers import quotes_section
from shardyard.units import (
    ABSENT,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_usd,
)

NOTABLE_GAIN = 0.01
"""Faster by less is within any error."""

MOST_RECOMMENDED = 4
"""Changes that lead the page."""


def plan_page(
    plan: Plan,
    *,
    search: Search | None,
    quotes: ClusterQuotes | None,
    title: str,
    bars: Sequence[tuple[str, MemoryEstimate]] = (),
    no_charts_reason: str = "",
    advice: Advice | None = None,
    requested: Parallel | None = None,
    steps_reason: str = "",
    deadline_s: float | None = None,
    budget_usd: float | None = None,
) -> str:
    """Return the whole page.

    Args:
        bars: Name and memory of each of the search's best, in their order.
        no_charts_reason: Why there are no pictures; empty where they can be drawn.
        advice: What each technique and lever would do; None: it was not asked for.
        requested: Axes as the recipe gives them.
        steps_reason: Where the length of the run comes from.
        deadline_s: The deadline of the cheapest offer, if one was asked for.
        budget_usd: The budget of the fastest offer, if one was asked for.
    """
    asked = requested or Parallel()
    sections = [
        recommendation(plan, search, advice, asked),
        _charts(plan, search, bars, no_charts_reason),
        *([] if advice is None else advice_sections(advice, has_charts=not no_charts_reason)),
        layouts_section(plan, search, asked),
        memory_section(plan),
        time_section(plan),
        failures_section(plan),
        _price(plan),
        quotes_section(
            quotes,
            asked,
            has_chart=not no_charts_reason,
            deadline_s=deadline_s,
            budget_usd=budget_usd,
        ),
        rest_section(plan, steps_reason),
    ]
    looked_up = "All of this is predicted: rates and prices are looked up."
    sources = "; ".join(plan.measured)
    measured = f"Measured, not looked up: {sources}" if sources else looked_up
    return render_html(
        Document(
            title=title,
            kind="Training plan",
            heading=title,
            badge=plan.fits if plan.fits != "unknown" else "memory unknown",
            badge_kind=plan.fits.replace(" ", "-"),
            head=[
                Paragraph(plan.line().removeprefix("plan: "), kind="lead"),
                Tiles(tiles(plan)),
                Paragraph(measured, kind="note"),
            ],
            body=[section for section in sections if section is not None],
            footer=(
                "Predicted by ", Text("shardyard plan", kind="code"), ". Nothing was started. "
                "Point at an underlined number, or reach it with the Tab key, to read where it "
                "comes from.",
            ),
        )
    )  # fmt: skip


# --- the head -----------------------------------------------------------------------------------


def tiles(plan: Plan) -> list[tuple[str, str, str]]:
    """Return tiles on memory, speed, MFU, time, price and failures: label, value, a line below."""
    return [
        ("memory of a rank", *_memory_tile(plan)),
        (f"{plan.units} per second", *_rate(plan)),
        ("MFU", *_mfu(plan)),
        ("time", *_time_tile(plan)),
        ("price", *_price_tile(plan)),
        ("expected failures", *_failures_tile(plan)),
    ]


def headline_blocks(plan: Plan) -> list[Block]:
    """Fits, how full, speed, MFU, time, price, failures: for the terminal, as the tiles are."""
    lead = (
        f"plan: {plan.model} {plan.parameters_words()}, "
        f"{layout_name(plan.layout)} over {plan.devices_words()}"
    )
    return [Paragraph(lead), PageSection("headline", "", [Table(("", "", ""), headline(plan))])]


def task_block(plan: Plan) -> Paragraph:
    """The training task, where no machines are named."""
    return Paragraph(
        f"plan: {plan.model} {plan.parameters_words()}, {_length(plan)}, "
        f"{plan.samples_words()} a step"
    )


def quality_section(plan: Plan, critical_batch: float) -> PageSection:
    """The cost of the batch size in samples."""
    factor = plan.samples_factor(critical_batch)
    twice = plan.samples_factor(critical_batch, times=2)
    words = (
        f"Time to quality is more than rate: with a critical batch of {critical_batch:,.0f}, a "
        f"given loss takes {factor:.2f} x the fewest samples at {plan.samples_per_step:,} a step, "
        f"and {twice:.2f} x at twice that: {twice / factor:.2f} x the samples of this recipe."
    )
    return PageSection("quality", "", [Paragraph(words)])


def _memory_tile(plan: Plan) -> tuple[str, str]:
    used, limit = plan.device_bytes, plan.memory_limit_bytes
    if limit is None:
        return format_bytes(used), f"{plan.fits}: {plan.fits_reason}"
    source = f"sum of the terms under Memory of one rank; {plan.fits}: {plan.fits_reason}"
    return (
        Text(f"{used / limit:.0%} full", source=source),
        f"{format_bytes(used)} of {format_bytes(limit)}",
    )


def _rate(plan: Plan) -> tuple[str, str]:
    rate = plan.speed.tokens_per_s
    if rate is None:
        return ABSENT, plan.speed.reason
    each = f"{format_count(rate / plan.layout.world_size)} a device"
    step = f", {format_seconds(plan.step_s)} a step" if plan.step_s is not None else ""
    rates = "; rate of products not measured" if plan.speed.unmeasured else ""
    band = plan.speed.band
    basis = "no published run was compared" if band is None else f"band from {band.words()}"
    value = Text(f"{format_count(rate)}{mark_of(plan)}", source=f"{plan.speed.reason}; {basis}")
    return value, _with_band(each + step, plan.tokens_per_s_band, format_count) + rates


def _with_band(words: str, band: Range | None, form: Callable[[float], str]) -> str:
    return words if band is None else f"{words}; {band_words(band, form)}"


def _mfu(plan: Plan) -> tuple[str, str]:
    if plan.mfu is None:
        return ABSENT, plan.peak.source if plan.peak.flops_per_s is None else plan.speed.reason
    shown = Text(format_percent(plan.mfu), source=f"of the peak: {plan.peak.source}")
    if plan.unit == "image":
        return shown, "convolutions and products, forward and backward"
    causal = plan.mfu * plan.flops_per_token["causal"] / plan.flops_per_token["full"]
    return shown, f"full attention; {format_percent(causal)} counted causally"


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
        words = _with_band(f"{length}, without failures", plan.wall_s_band, format_seconds)
        return Text(wall, source="steps x time of a step"), words
    source = f"by {plan.failures.method}: {plan.failures.method_reason}"
    words = f"{length}, {extras_words(plan)}"
    return Text(wall, source=source), _with_band(words, plan.wall_s_band, format_seconds)


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
    value = Text(f"{_short_usd(plan.usd)}{mark_of(plan)}", source=plan.price.source)
    words = _with_band(words, plan.usd_band, _short_usd)
    return value, f"{words}{f', {spares}' if spares else ''}"


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
    return Text(f"{outlook.expected_failures:.2g}", source=outlook.mtbf.reason), words


# --- what to change -----------------------------------------------------------------------------


def recommendation(
    plan: Plan, search: Search | None, advice: Advice | None, requested: Parallel
) -> PageSection:
    """The overrides that make the recipe fit or faster, the largest gain first, to copy."""
    rows: list[tuple[float, str, Plan | Candidate, str]] = []
    if search is not None and search.best and _better(plan, search.best[0], "It"):
        best = search.best[0]
        settings = " ".join(settings_of(best, requested))
        rows.append((best.step_s, candidate_name(best), best, settings))
    for change in () if advice is None else advice.levers:
        then = change.plan
        if then is None or then.step_s is None or change.note or then.fits == "does not fit":
            continue
        is_faster = plan.step_s is None or then.step_s < plan.step_s / (1 + NOTABLE_GAIN)
        if is_faster or plan.fits == "does not fit":
            rows.append((then.step_s, change.name, then, " ".join(change.settings)))
    if not rows:
        planned = "layout" if advice is None else "layout or lever"
        words = f"No {planned} that was planned is faster than this recipe."
        if search is None and advice is None:
            words = "No other layout was planned."
        return PageSection("recommendation", "What to change", [Paragraph(words, kind="muted")])
    rows = sorted(rows, key=lambda row: row[0])[:MOST_RECOMMENDED]
    step_s, name, _, settings = rows[0]
    lead = Callout(f"{name}: {_gain(plan, step_s)} than this recipe.", settings)
    heads = ["change", "#gain", "#step", "#device", "override"]
    cells = [
        (name, _gain(plan, step_s), format_seconds(step_s), format_bytes(found.device_bytes),
         Text(settings, kind="copy"))
        for step_s, name, found, settings in rows
    ]  # fmt: skip
    more = [Table(heads, cells)] if len(rows) > 1 else []
    note = Paragraph("Gains of several changes do not add up: plan them together.", kind="note")
    return PageSection("recommendation", "What to change", [lead, *more, *([note] if more else [])])


def _gain(plan: Plan, step_s: float) -> str:
    if plan.fits == "does not fit" or plan.step_s is None:
        return "fits rather"
    return f"{plan.step_s / step_s - 1:.0%} faster"


def _charts(
    plan: Plan, search: Search | None, bars: Sequence[tuple[str, MemoryEstimate]], reason: str
) -> PageSection:
    body: Block = Paragraph(reason, kind="muted")
    if not reason:
        from shardyard.report.plan.charts import figures  # only here: matplotlib is an extra

        body = figures(plan, search, bars)
    return PageSection("pictures", "Memory and time at a glance", [body])


# --- terms --------------------------------------------------------------------------------------


def memory_section(plan: Plan) -> PageSection:
    """Bytes of a rank, term by term."""
    total, limit = plan.memory_bytes, plan.memory_limit_bytes
    rows = [
        (
            Text(term.name, colour=MEMORY_COLOURS.get(term.name, "grey")),
            format_bytes(term.bytes),
            format_percent(term.bytes / total),
            term.reason,
        )
        for term in plan.memory
    ]
    has_more = plan.device_bytes != total  # on a CPU the process is a term, and all there is
    sums = [("tensors" if has_more else "sum", format_bytes(total), "100.0 %",
             f"most {plan.memory_moment}")]  # fmt: skip
    if has_more:
        held, device = format_bytes(plan.reserved_bytes), format_bytes(plan.device_bytes)
        sums.append(("reserved", held, "", "what the allocator holds"))
        sums.append(("device", device, "", "what the driver shows"))
    bound = ABSENT if limit is None else format_bytes(limit)
    sums.append(("limit", bound, "", f"{plan.fits}: {plan.fits_reason}"))
    rule, ranks = RULE_BYTES_PER_PARAMETER * plan.trained_parameters, plan.layout.dp_shard
    words = (
        f"Rule of the field: {RULE_BYTES_PER_PARAMETER} bytes a trained parameter "
        f"(Adam, mixed precision) = {format_bytes(rule)}, split over {ranks}: "
        f"{format_bytes(rule / ranks)} a rank, before activations."
    )
    table = Table(["", "#bytes", "#share", ""], [*rows, *sums], totals=len(sums), is_folding=True)
    return PageSection("memory", "Memory of one rank", [table, Paragraph(words, kind="note")])


def time_section(plan: Plan) -> PageSection:
    """Seconds of a step, term by term."""
    heading = "Time of one step"
    if plan.step_s is None:
        return PageSection("time", heading, [Paragraph(f"No speed: {plan.speed.reason}.", "muted")])
    rows = [
        (
            Text(term.name, colour=TIME_COLOURS.get(term.name, "grey")),
            format_seconds(term.seconds),
            format_percent(term.seconds / plan.step_s),
            "computes" if term.name in OWN_NAMES else "lost",
            term.reason,
        )
        for term in plan.time
    ]
    own = own_share([(term.name, term.seconds) for term in plan.time])
    total = ("step", format_seconds(plan.step_s), "100.0 %", f"{own:.0%} computes",
             plan.speed.reason)  # fmt: skip
    table = Table(["", "#time", "#share", "+#kind", ""], [*rows, total], totals=1, is_folding=True)
    notes = [unmeasured_words(plan.speed.unmeasured)] if plan.speed.unmeasured else []
    return PageSection("time", heading, [table, *(Paragraph(note, "note") for note in notes)])


# --- layouts ------------------------------------------------------------------------------------


def layouts_section(
    plan: Plan,
    search: Search | None,
    requested: Parallel,
    *,
    enough: tuple[int, Candidate] | None = None,
) -> PageSection | None:
    """The best layouts, each with its reason, and the settings of the one to take.

    Args:
        requested: Axes in the recipe.
        enough: Where no layout fits: nodes on which one does, and that layout.
    """
    if search is None:
        return None
    rejected = Table(("other families", ""), [(row.family, row.reason) for row in search.rejected])
    count = len(search.rejected)
    summary = f"Families that did not win, each with its reason: {count}"
    more = [Details(summary, [rejected], only=("page",))] if count else []
    if not search.best:
        blocks: list[Block] = list(_nearest(search, requested, enough))
        return PageSection("layouts", "Best layouts", [*blocks, *more])
    which = "The fastest:" if search.fits else "These are tight, the fastest first:"
    heads = [f"#{plan.units}/s", "+#80 % band", "+#step", "+#MFU", "#full", "layout", "why"]
    rows = [_layout_row(plan, candidate) for candidate in search.best]
    blocks = [Paragraph(f"{fitting_words(search)} {which}"), Table(heads, rows)]
    if words := _better(plan, search.best[0], "The first"):
        command = " ".join(settings_of(search.best[0], requested))
        blocks += only_in("terminal", Callout(words, command))
    if enough is not None:
        blocks += only_in("terminal", _enough("It fits", requested, enough))
    return PageSection("layouts", "Best layouts", [*blocks, *more])


def rejected_section(search: Search) -> PageSection:
    """Why other families of layouts lost."""
    rows = [(row.family, row.reason) for row in search.rejected]
    return PageSection("families", "other families", [Table(("", ""), rows)])


def _layout_row(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    mfu = ABSENT
    if plan.peak.flops_per_s is not None:
        peak = plan.peak.flops_per_s * candidate.layout.world_size
        mfu = format_percent(candidate.tokens_per_s * plan.flops_per_token["full"] / peak)
    full = f"{candidate.device_bytes / candidate.limit_bytes:.0%}"
    if candidate.fit.verdict != "fits":
        full += f" {candidate.fit.verdict}"
    of = f"{format_bytes(candidate.device_bytes)} of {format_bytes(candidate.limit_bytes)}"
    this = " (this plan)" if is_planned(candidate, plan) else ""
    band = candidate.band
    return (
        Text(f"{format_count(candidate.tokens_per_s)}{mark_of(plan)}", source=plan.speed.reason),
        ABSENT if band is None else range_words(band.of_rate(candidate.tokens_per_s), format_count),
        f"{format_seconds(candidate.step_s)}{mark_of(plan)}",
        mfu,
        Text(full, source=of),
        f"{candidate_name(candidate)}{this}",
        speed_reason(candidate),
    )


def _better(plan: Plan, better: Candidate, name: str) -> str:
    """Say in what a layout is better than the plan; empty: in nothing."""
    if plan.fits == "does not fit":
        word = "does" if better.is_safe else "is tight"
        return f"This recipe does not fit. {name} {word}:"
    if plan.fits == "tight" and better.is_safe:
        return f"This recipe is tight. {name} fits:"
    if plan.step_s and (times := plan.step_s / better.step_s) > 1 + NOTABLE_GAIN:
        faster = f"{times - 1:.0%} faster than" if times < 2 else f"{times:.1f} times as fast as"
        tight = "" if better.is_safe else ", and as tight"
        return f"{name} is {faster} this recipe{tight}:"
    return ""


def _nearest(
    search: Search, requested: Parallel, enough: tuple[int, Candidate] | None
) -> Iterator[Block]:
    nearest = search.nearest
    assert nearest is not None  # a search without any result keeps what needs least
    over = nearest.device_bytes - nearest.limit_bytes
    much = f", {format_bytes(over)} too much on each device" if over > 0 else ""
    lead = (
        f"{fitting_words(search)} The nearest is {candidate_name(nearest)}: "
        f"{nearest.fit.reason}{much}."
    )
    if enough is not None:
        lead = f"{lead} It fits on devices with more memory, or"
        yield _enough(lead, requested, enough)
    else:
        yield Paragraph(f"{lead} Use devices with more memory, a smaller model or shorter samples.")


def _enough(lead: str, requested: Parallel, enough: tuple[int, Candidate]) -> Callout:
    nodes, candidate = enough
    return Callout(
        f"{lead} as {candidate_name(candidate)} on {nodes} nodes:",
        f"cluster.nodes={nodes} {' '.join(settings_of(candidate, requested))}",
    )


# --- failures, price, the rest ------------------------------------------------------------------


def failures_section(plan: Plan) -> PageSection:
    """Failures of the run, and what one costs."""
    outlook = plan.failures
    if outlook is None:
        text = "Not predicted: that takes a speed, a length and a known cluster."
        if not plan.advances:
            text = plan.failures_reason
        return PageSection("failures", "Failures", [Paragraph(text, kind="muted")])
    mtbf = outlook.mtbf
    of_range = f"{format_seconds(mtbf.low_s)} to {format_seconds(mtbf.high_s)}"
    own = f"{outlook.interval_steps:,} steps, {format_seconds(outlook.interval_s)}"
    phases = outlook.restart_s_per_failure + outlook.replay.seconds
    rows = [
        ("mean time between failures", format_seconds(mtbf.seconds), mtbf.reason),
        ("its range", of_range, "by the worst and the best published rate"),
        ("failures", f"{outlook.expected_failures:.2g} in this run", "restarts included"),
        ("a checkpoint every", own, outlook.interval_reason),
        *_snapshots(outlook),
        ("first start", format_seconds(outlook.init_s),
         "rendezvous and init, as of a whole restart"),
        *reference_rows(plan),
        ("effective time (ETTR)", format_percent(outlook.ettr),
         f"of wall time trains and stays; by {outlook.method}: {outlook.method_reason}"),
        ("spare nodes", f"{outlook.spare_nodes}", outlook.spares_reason),
    ]  # fmt: skip
    restart = [
        (phase.name, format_seconds(phase.seconds), phase.reason, phase.source)
        for phase in (*outlook.restart, outlook.replay)
    ]
    restart.append(("one failure", format_seconds(phases), "the sum", ""))
    return PageSection(
        "failures",
        "Failures",
        [
            *only_in("page", _wall_time(outlook)),
            Table(["", "#", ""], rows, is_folding=True),
            Table(["one failure costs", "#time", "why", "+"], restart, totals=1, is_folding=True),
        ],
    )


def _snapshots(forecast: FailureForecast) -> list[tuple[str, str, str]]:
    every, mtbf_s = forecast.snapshot_interval_steps, forecast.snapshot_mtbf_s
    if every is None or mtbf_s is None:
        return []
    why = f"in memory, as for one failure every {format_seconds(mtbf_s)}"
    return [("snapshots", f"{every:,} steps", why)]


def _wall_time(forecast: FailureForecast) -> ShareBar:
    """Wall time split as the run's own report splits it, in the same colours."""
    seconds_of = {
        "init": forecast.init_s + forecast.reference_s,
        "productive": forecast.productive_s,
        "checkpoint blocked": forecast.checkpoint_blocked_s,
        "lost work": forecast.lost_work_s,
        "restart": forecast.restart_s,
    }
    return ShareBar(
        f"wall time: {format_seconds(forecast.wall_s)}",
        tuple(
            BarPart(
                name, seconds / forecast.wall_s, name.replace(" ", "-"), format_seconds(seconds)
            )
            for name, seconds in seconds_of.items()
        ),
        has_keys=True,
    )


def _price(plan: Plan) -> PageSection:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    mark = mark_of(plan)
    rows = [
        ("an hour", _usd(per_hour), plan.price.source),
        ("the run", _usd(plan.usd) + mark, _run_words(plan)),
        (f"a million {plan.units}", _usd(per_million) + mark, "without failures"),
    ]
    if per_hour is None:
        rows = rows[:1]
    return PageSection("price", "Price", [Table(["", "#price", ""], rows, is_folding=True)])


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


def _length(plan: Plan) -> str:
    if plan.steps is None or plan.tokens is None:
        return "length known once the data is prepared"
    return f"{plan.steps:,} steps, {format_count(plan.tokens)} {plan.units}"


def rest_section(plan: Plan, steps_reason: str) -> PageSection:
    """Model, devices, length, work and communication."""
    flops, peak = plan.flops_per_token, plan.peak.flops_per_s
    frozen = f", {plan.frozen_parameters:,} of them frozen" if plan.frozen_parameters else ""
    step = f"{plan.samples_words()}, micro-batch {plan.micro_batch}, recompute {plan.recompute}"
    work = "forward and backward"
    if plan.unit != "image":
        work = f"full attention; {format_flops(flops['causal'])} a token counted causally"
    rows = [
        ("model", f"{plan.parameters:,} parameters{frozen}", plan.model),
        ("devices", plan.devices_words(), layout_name(plan.layout)),
        ("a step", f"{plan.tokens_per_step:,} {plan.units}", step),
        ("length", _length(plan), steps_reason),
        *_of_images(plan),
        ("work", f"{format_flops(flops['full'])} for each of the {plan.units}", work),
        ("peak of a device", ABSENT if peak is None else f"{format_flops(peak)}/s",
         plan.peak.source),
        ("a checkpoint", format_bytes(plan.checkpoint_bytes), "on disk, all ranks"),
        *(
            (f"{term.name}, a rank and step", format_bytes(term.bytes), term.reason)
            for term in plan.communication
        ),
    ]  # fmt: skip
    table = Table(["", "#", ""], rows, is_folding=True)
    return PageSection("rest", "What is trained, and on what", [table])


def _of_images(plan: Plan) -> list[tuple[str, str, str]]:
    rows = []
    if plan.unit == "image" and plan.epoch_s is not None:
        rows.append(("an epoch", format_seconds(plan.epoch_s), f"{plan.epoch_samples:,} images"))
    if plan.decoding is not None:
        found = plan.decoding
        words = f"{format_count(found.decoded_per_s)} images/s"
        wait = "the devices wait" if found.is_bound else "the devices never wait"
        needed = f"{found.needed:,} cores a node keep them busy; {found.reason}"
        rows.append(("decoding", words, f"{wait}; {needed}"))
    return rows

"""Report page of a run: its headline numbers, sections, sources and profiles."""

import json
import time
from collections.abc import Sequence
from typing import Any

from shardyard.config.data_choices import SLOTS
from shardyard.config.resolved import flatten
from shardyard.config.rules.tags import tag_words
from shardyard.report.against_plan import PlanRow
from shardyard.report.attempts import attempts_table
from shardyard.report.cost import RunCost
from shardyard.report.html import (
    esc,
    render_page,
    render_section,
    render_table,
    render_tiles,
    scrolling,
)
from shardyard.report.run_data import Line, RunRecord
from shardyard.report.summary import Summary
from shardyard.report.timeline import describe, timeline
from shardyard.report.walltime import PHASES, WAITING, running_s
from shardyard.rundir.profiles import ProfileSummary, ProfileTerm
from shardyard.units import (
    ABSENT,
    format_bytes,
    format_count,
    format_error,
    format_nats,
    format_percent,
    format_seconds,
    format_usd,
    format_value,
)


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """The headline: label, value, and a line below."""
    step_s = summary.step_time_s
    return [
        (
            "training loss",
            format_nats(summary.loss),
            f"nats per {summary.unit}, step {summary.steps_done:,}",
        ),
        ("validation loss", format_nats(summary.eval_loss), _below_evaluation(summary)),
        (f"{summary.unit}s per second", *_rate(summary)),
        (
            "step time",
            ABSENT if step_s is None else format_seconds(step_s),
            f"median, {summary.steps_words()}",
        ),
        *([] if summary.mfu is None else [("MFU", *_mfu(summary.mfu))]),
        ("peak memory", _bytes(summary.peak_memory_bytes), _peaks(summary)),
        ("time trained", format_seconds(summary.trained_s), _trained(summary)),
        ("wall time", format_seconds(summary.wall_s), _wall(summary)),
        *([] if summary.cost is None else [("cost", *_cost(summary.cost))]),
    ]


def _peaks(summary: Summary) -> str:
    """The peak of each attempt, and of which ranks."""
    if len(summary.results) <= 1:
        known = all(each.peak_memory_ranks > 1 for each in summary.results)
        is_one = summary.world_size in (None, 1)
        return "of the rank that held most" if known or is_one else "of rank 0"
    shown = summary.results[-MAX_COLUMNS:]
    more = "; ".join(f"attempt {each.number} {each.peak_words()}" for each in shown)
    return f"highest of {len(summary.results)} attempts; {more}"


def _trained(summary: Summary) -> str:
    share = summary.effective_share
    of = f"of {format_seconds(summary.running_s)} running time"
    return of if share is None else f"{format_percent(share)} {of} (effective share)"


def _wall(summary: Summary) -> str:
    attempts, restarts = len(summary.attempts), summary.restarts
    words = f"{attempts} attempt{_s(attempts)}, {restarts} restart{_s(restarts)}"
    if not summary.between_s:
        return words
    return f"{words}; {format_seconds(summary.between_s)} of it between attempts"


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
    if summary.tokens_per_s is None:
        return ABSENT, "no step was measured"
    ranks = summary.paces[0].ranks or 1
    together = "of 1 rank" if ranks == 1 else f"of {ranks:,} ranks together"
    return format_count(summary.tokens_per_s), f"median, {together}"


def _mfu(mfu: dict[str, float]) -> tuple[str, str]:
    causal = format_percent(mfu["causal"])
    return format_percent(mfu["full"]), f"full attention; {causal} counted causally"


def _cost(cost: RunCost) -> tuple[str, str]:
    more = cost.to_end_usd
    end = "" if more is None else f", about {format_usd(more)} more to its end"
    return format_usd(cost.so_far_usd), f"at {format_usd(cost.usd_per_hour)} an hour{end}"


def _bytes(size: int | None) -> str:
    return ABSENT if size is None else format_bytes(size)


def _s(number: int) -> str:
    return "" if number == 1 else "s"


# Of a mixture: what was read of each source, and its validation loss.


def sources_section(record: RunRecord) -> str:
    """Return a table with a row a source; empty if there was one source."""
    resolved = record.resolved
    if resolved is None or not resolved.data.parts:
        return ""
    seq_len = int(resolved.recipe.data.seq_len)
    last = record.steps[-1] if record.steps else {}
    # samples, as tokens leave padding out; phases have samples of several lengths
    samples = (last.get("tokens") or 0) // seq_len if resolved.phases else last.get("samples") or 0
    newest = record.evaluations[-1].get("eval_sources", {}) if record.evaluations else {}
    rows = [
        (
            esc(part.name),
            f"{part.slots / SLOTS:.1%}",
            f"{part.data.train_tokens:,}",
            f"{part.passes(samples, seq_len):.2f}",
            format_nats(newest[part.name].get("loss")) if part.name in newest else ABSENT,
        )
        for part in resolved.data.parts
    ]
    names = ["source", "#share of the samples", "#tokens", "#times read", "#validation loss"]
    table = render_table(names, rows)
    return render_section("sources", "Sources", f'<div class="card">{table}</div>')


# Profiles of a run as rows and words: the verb, the page and report.md show the same.

HEADS = ("term", "predicted", "measured", "share", "lowest", "highest", "what")


def profile_rows(profile: ProfileSummary) -> list[tuple[str, ...]]:
    """The table: where a step's time went, by the plan's terms. The last row is their sum."""
    rows = [_row(term, profile) for term in profile.terms]
    predicted = [term.predicted_s for term in profile.terms if not term.is_part]
    known = [seconds for seconds in predicted if seconds is not None]
    total = format_seconds(sum(known)) if known else ABSENT
    rows.append(("a step", total, format_seconds(profile.step_s), "100 %", "", "", ""))
    return rows


def profile_words(profile: ProfileSummary) -> str:
    """Describe the profiled steps and what the profile cost, in one paragraph."""
    last = profile.step + profile.steps - 1
    which = f"step {profile.step}" if profile.steps == 1 else f"steps {profile.step} to {last}"
    ranks = "1 rank" if len(profile.ranks) == 1 else f"{len(profile.ranks)} ranks"
    before = "no step came before to compare with"
    if profile.usual_s is not None and profile.slowdown is not None:
        change = f"{abs(profile.slowdown):.0%} {'longer' if profile.slowdown >= 0 else 'shorter'}"
        before = f"{change} than the {format_seconds(profile.usual_s)} of those before"
    told = (
        f"{which[0].upper()}{which[1:]} on {ranks} of {profile.world_size}: "
        f"{format_seconds(profile.step_s)} a step, {before}. The run stood still for "
        f"{format_seconds(profile.stood_still_s)}; the traces have "
        f"{format_bytes(profile.trace_bytes)}."
    )
    gaps = "; ".join(f"rank {rank}: {why}" for rank, why in profile.missing.items())
    return f"{told} No trace of {gaps}." if gaps else told


def _row(term: ProfileTerm, profile: ProfileSummary) -> tuple[str, ...]:
    several = len(profile.ranks) > 1
    share = format_percent(term.measured_s / profile.step_s) if profile.step_s else ABSENT
    return (
        f"- {term.name}" if term.is_part else term.name,
        ABSENT if term.predicted_s is None else format_seconds(term.predicted_s),
        format_seconds(term.measured_s),
        share,
        f"{format_seconds(term.lowest_s)} (rank {term.lowest_rank})" if several else "",
        f"{format_seconds(term.highest_s)} (rank {term.highest_rank})" if several else "",
        term.reason,
    )


# The report's page: one HTML file that opens from disk, without network and without script.
#
# Pure: a run's record and its numbers in, text out. Everything that came from outside (prompts,
# paths, causes) passes through ``esc``, which escapes it.

_TILES = "grid-template-columns: repeat(auto-fit, minmax(min(45%, 220px), 1fr))"
"""Columns of the tiles: four on a wide page, two on a phone."""

MAX_COLUMNS = 4
"""Attempts with a column of their own; with more, only their sum has one."""


def render(
    record: RunRecord, summary: Summary, panels: dict[str, str], *, no_charts_reason: str = ""
) -> str:
    """The whole page.

    Args:
        panels: Plots by name, each an ``<svg>``.
        no_charts_reason: Why there are none.
    """
    parts = [
        _header(record, summary),
        _what_to_change(summary),
        _curves(_of(panels, is_of_devices=False), no_charts_reason or "No step was finished yet."),
        _sample(record),
        _devices(summary, panels),
        sources_section(record),
        _attempts(summary),
        _wall_time(summary),
        _comparison(record, summary.comparisons),
        _profiles(record),
        _checkpoints(record),
        _timeline(record),
        _settings(record),
        _manifest(record),
        _commands(summary),
    ]
    body = "\n".join(part for part in parts if part)
    footer = (
        f"Written {_clock(time.time())} from <code>{esc(record.run.path)}</code> by "
        "<code>shardyard report</code>. Every number is read from that folder."
    )
    return render_page(f"{summary.run_id}: training report", body, footer=footer)


def _header(record: RunRecord, summary: Summary) -> str:
    line = f'<p class="note">{esc(record.plan.line())}</p>' if record.plan else ""
    mfu = f'<p class="note">MFU: {esc(summary.mfu_note)}.</p>'
    cost = "" if summary.cost is None else f'<p class="note">{esc(summary.cost.words())}</p>'
    reason = summary.state_reason if summary.state != "finished" else ""
    why = f'<p class="lead">{esc(reason)}</p>' if reason else ""
    return f"""<header>
<p class="eyebrow">Training report</p>
<h1>{esc(summary.run_id)} <span class="badge {summary.state}">{summary.state}</span></h1>
<p class="lead">{esc(summary.sentence())}</p>
{why}{line}
{render_tiles(tiles(summary), style=_TILES)}
{mfu}{cost}{_tags(summary)}{_trackers(summary)}
</header>"""


def _what_to_change(summary: Summary) -> str:
    """Return findings and levers, the best first; empty if there are none."""
    told = "".join(f"<p>{esc(text)}</p>" for text in summary.findings)
    rows = [
        (
            esc(lever.name),
            f'<code class="copy">{esc(" ".join(lever.settings))}</code>',
            esc(format_seconds(summary.step_time_s or 0.0)),
            esc(format_seconds(lever.step_time_s)),
            f"-{format_percent(lever.gain)}",
            esc(lever.effect),
        )
        for lever in summary.levers
    ]
    heads = ["lever", "override", "#step measured", "#step predicted", "#gain", ""]
    table = render_table(heads, rows) if rows else ""
    if not told and not table:
        return ""
    body = f'<div class="card">{told}{table}</div>'
    return render_section("what-to-change", "What to change", body)


def _commands(summary: Summary) -> str:
    told = "".join(
        f'<p class="muted">{esc(each.purpose[0].upper() + each.purpose[1:])}</p>'
        f'<pre class="copy">{esc(each.command)}</pre>'
        for each in summary.commands
    )
    return render_section("commands", "Commands to copy", f'<div class="card">{told}</div>')


def _tags(summary: Summary) -> str:
    words = tag_words(summary.tags, ", ")
    return f'<p class="note">Tags: {esc(words)}</p>' if words else ""


def _trackers(summary: Summary) -> str:
    """Return links to the run in W&B and MLflow, and folders of W&B's client that was offline."""
    shown = [
        f'{esc(name)} <a href="{esc(address)}">{esc(address)}</a>'
        if address.startswith(("https://", "http://"))
        else f"{esc(name)} <code>{esc(address)}</code>"
        for name, address in summary.trackers.items()
    ]
    return f'<p class="note">Sent to {", ".join(shown)}</p>' if shown else ""


def _curves(panels: dict[str, str], reason: str) -> str:
    if not panels:
        return render_section("curves", "Curves", f'<p class="muted">{esc(reason)}</p>')
    figures = "".join(f'<figure id="{esc(name)}">{svg}</figure>' for name, svg in panels.items())
    return render_section("curves", "Curves", f'<div class="panels">{figures}</div>')


def _of(panels: dict[str, str], *, is_of_devices: bool) -> dict[str, str]:
    return {k: svg for k, svg in panels.items() if k.startswith("device-") == is_of_devices}


def _devices(summary: Summary, panels: dict[str, str]) -> str:
    shown = _of(panels, is_of_devices=True)
    health = summary.health
    if not (shown or health.problems or health.watched_nodes):
        return ""
    figures = "".join(f'<figure id="{esc(name)}">{svg}</figure>' for name, svg in shown.items())
    listed = "".join(f'<p class="bad">{esc(text)}</p>' for text in health.problems)
    body = f'<p>{esc(health.words)}</p>{listed}<div class="panels">{figures}</div>'
    return render_section("devices", "Devices and nodes", body)


def _attempts(summary: Summary) -> str:
    if len(summary.results) < 2 and len(summary.paces) < 2:
        return ""
    heads, rows = attempts_table(summary.results)
    table = render_table(heads, [[esc(cell) for cell in row] for row in rows])
    return render_section("attempts", "Attempts", f'<div class="card">{table}</div>')


def _wall_time(summary: Summary) -> str:
    bars = []
    for attempt in summary.attempts:
        seconds = running_s(attempt.phases)
        head = f"attempt {attempt.number}: {format_seconds(seconds)} running time"
        waited_s = attempt.phases.get(WAITING, 0.0)
        wait = f", {format_seconds(waited_s)} after the attempt before it" if waited_s else ""
        open_end = "" if attempt.has_ended else ", not ended"
        phases = {name: each for name, each in attempt.phases.items() if name != WAITING}
        bars.append(f'<div class="muted">{head}{wait}{open_end}</div>{_bar(phases)}')
    heads = [f"attempt {attempt.number}" for attempt in summary.attempts]
    columns = [attempt.phases for attempt in summary.attempts]
    several = 1 < len(columns) <= MAX_COLUMNS
    columns = columns if several else []
    rows = []
    for name, seconds in summary.phases.items():
        if name != WAITING:
            each = [phases.get(name, 0.0) for phases in columns]
            share = format_percent(seconds / summary.running_s) if summary.running_s else ""
            swatch = f'<span class="swatch {_slug(name)}"></span>{esc(name)}'
            rows.append(_time_row(swatch, [*each, seconds], share, PHASES[name]))
    running = [*map(running_s, columns), summary.running_s]
    rows.append(_time_row("running time", running, "100 %", "shares are of this", is_total=True))
    if summary.between_s:
        waits = [*(phases.get(WAITING, 0.0) for phases in columns), summary.between_s]
        swatch = f'<span class="swatch {WAITING}"></span>between attempts'
        rows.append(_time_row(swatch, waits, "", PHASES[WAITING]))
        walls = [*(sum(phases.values()) for phases in columns), summary.wall_s]
        rows.append(_time_row("wall time", walls, "", "", is_total=True))
    extra = "".join(f'<th class="n">{esc(head)}</th>' for head in heads) if several else ""
    last = "all attempts" if several else "time"
    head = f'<th>phase</th>{extra}<th class="n">{last}</th><th class="n">share</th><th>what</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    words = f"<p>{esc(summary.effective_words())}</p>"
    scrolled = scrolling(table, "phase, time, share")
    body = f'<div class="card">{"".join(bars)}{words}{scrolled}</div>'
    return render_section("wall-time", "Where the time went", body)


def _time_row(
    name: str, seconds: Sequence[float], share: str, what: str, *, is_total: bool = False
) -> str:
    """A row of the table of phases; ``name`` is HTML."""
    cells = "".join(f'<td class="n">{_seconds(each)}</td>' for each in seconds)
    kind = ' class="total"' if is_total else ""
    return (
        f'<tr{kind}><td class="k">{name}</td>{cells}<td class="n">{share}</td>'
        f'<td class="t">{esc(what)}</td></tr>'
    )


def _bar(phases: dict[str, float]) -> str:
    total = sum(max(0.0, seconds) for seconds in phases.values()) or 1.0
    spans = "".join(
        f'<span class="{_slug(name)}" style="width:{100 * seconds / total:.3f}%" '
        f'title="{esc(name)}: {esc(format_seconds(seconds))}"></span>'
        for name, seconds in phases.items()
        if seconds > 0
    )
    return f'<div class="bar">{spans}</div>'


def _comparison(record: RunRecord, rows: Sequence[PlanRow]) -> str:
    title = "Predicted against measured"
    if not rows:
        text = "plan.json is missing or not readable, so the run cannot be compared with its plan."
        return render_section("plan", title, f'<p class="muted">{text}</p>')
    cells = [
        (
            esc(row.name),
            esc(format_value(row.predicted, row.unit, "not predicted")),
            esc(format_value(row.measured, row.unit, "not measured")),
            esc(format_error(row.error)),
            esc(row.note),
        )
        for row in rows
    ]
    table = render_table(["term", "#predicted", "#measured", "#error", ""], cells)
    terms = _memory_terms(record) + _time_terms(record)
    return render_section("plan", title, f'<div class="card">{table}{terms}</div>')


def _memory_terms(record: RunRecord) -> str:
    if record.plan is None:
        return ""
    cells = [
        (esc(term.name), format_bytes(term.bytes), esc(term.reason)) for term in record.plan.memory
    ]
    note = (
        f"Predicted peak of one rank, {format_bytes(record.plan.memory_bytes)} "
        f"{record.plan.memory_moment}, term by term. "
        f"{record.plan.fits}: {record.plan.fits_reason}."
    )
    table = render_table(["term", "#bytes", "why"], cells)
    return f'<p class="note" style="margin-top:16px">{esc(note)}</p>{table}'


def _time_terms(record: RunRecord) -> str:
    if record.plan is None or record.plan.step_s is None:
        return ""
    step_s = record.plan.step_s
    cells = [
        (
            esc(term.name),
            esc(format_seconds(term.seconds)),
            format_percent(term.seconds / step_s),
            esc(term.reason),
        )
        for term in record.plan.time
    ]
    note = f"Predicted time of a step, {format_seconds(step_s)}, term by term."
    table = render_table(["term", "#time", "#share", "why"], cells)
    return f'<p class="note" style="margin-top:16px">{esc(note)}</p>{table}'


def _profiles(record: RunRecord) -> str:
    body = ""
    for profile in record.profiles:
        rows = [tuple(map(esc, row)) for row in profile_rows(profile)]
        heads = [HEADS[0], *(f"#{head}" for head in HEADS[1:-1]), HEADS[-1]]
        table = render_table(heads, rows)
        traces = esc(f"profiles/{record.run.profile(profile.step).name}")
        body += (
            f'<div class="card"><p>{esc(profile_words(profile))}</p>{table}'
            f'<p class="note">Traces: <code>{traces}</code></p></div>'
        )
    return render_section("profiles", "Where a step's time went", body) if body else ""


def _sample(record: RunRecord) -> str:
    if not record.sample:
        return ""
    prompt = record.resolved.recipe.task.prompt if record.resolved else ""
    text = record.sample
    if prompt and text.startswith(prompt):
        written = text[len(prompt) :]
        shown = f'<span class="prompt">{esc(prompt)}</span>{esc(written)}'
        if not written.strip():
            shown += '<span class="muted"> (only white space)</span>'
    else:
        shown = esc(text)
    drawn = record.sampling_method
    note = (
        f'<p class="note">What the model wrote at the end of the run{f", {drawn}" if drawn else ""}'
        "; the prompt is blue.</p>"
    )
    return render_section("sample", "Sample", f'{note}<div class="card"><pre>{shown}</pre></div>')


def _checkpoints(record: RunRecord) -> str:
    durable = record.all("checkpoint_durable")
    found = (event.get("damaged") or [] for event in record.all("checkpoint_loaded"))
    damaged = list(dict.fromkeys(_damage(entry) for entries in found for entry in entries))
    abandoned = [
        f"Step {event.get('step', '?')} was not saved, as it is not finite: {event.get('reason')}"
        for event in record.all("checkpoint_abandoned")
    ]
    if not (durable or damaged or abandoned or record.set_aside):
        return ""
    warnings = "".join(f'<p class="bad">{esc(text)}</p>' for text in [*damaged, *abandoned])
    if record.set_aside:
        folders = ", ".join(record.set_aside)
        warnings += f'<p class="bad">Set aside as damaged: {esc(folders)}</p>'
    shown = durable[-20:]
    started = {(e.get("attempt"), e.get("step")): e for e in record.all("checkpoint_started")}
    cells = [
        (
            f"{event.get('step', 0):,}",
            esc(format_bytes(event.get("bytes") or 0)),
            _seconds(
                (started.get((event.get("attempt"), event.get("step"))) or {}).get("blocked_s")
            ),
            _seconds(event.get("seconds")),
            "",
        )
        for event in shown
    ]
    table = render_table(["#step", "#bytes", "#training stood still", "#until durable", ""], cells)
    more = f"The newest 20 of {len(durable)}." if len(durable) > len(shown) else ""
    body = f'<div class="card">{warnings}{table if cells else ""}<p class="note">{more}</p></div>'
    return render_section("checkpoints", "Checkpoints", body)


def _damage(entry: Any) -> str:
    """A damaged checkpoint as an event names it: a sentence, or its step and the reasons."""
    if not isinstance(entry, dict):
        return str(entry)
    reasons = "; ".join(str(reason) for reason in entry.get("reasons", []))
    return f"The checkpoint of step {entry.get('step', '?')} is damaged: {reasons}"


def _timeline(record: RunRecord) -> str:
    rows, left_out = timeline(record)
    if not rows:
        return ""
    first_t = rows[0]["t"]
    cells = [
        (
            esc(_clock(event["t"])),
            f"+{_seconds(event['t'] - first_t)}",
            f"{event.get('attempt', 1)}.{event.get('generation', 0)}",
            f'<code class="kind">{esc(event["kind"])}</code>',
            esc(describe(event)),
        )
        for event in rows
    ]
    table = render_table(["time (UTC)", "#after", "#attempt", "event", ""], cells)
    frequent = "checkpoints, evaluations and counts of cost"
    note = f"{left_out:,} {frequent} are left out here." if left_out else ""
    count = f"{len(rows)} events"
    body = (
        f"<details open><summary>{count}</summary><div>{table}"
        f'<p class="note">{note}</p></div></details>'
    )
    return render_section("timeline", "Events", body)


def _settings(record: RunRecord) -> str:
    if record.resolved is None:
        text = "No attempt holds a readable resolved.json."
        return render_section("settings", "Settings", f'<p class="muted">{text}</p>')
    content = record.resolved.to_json()
    settings: dict[str, Line] = content["settings"]
    cells = [
        (
            f"<code>{esc(name)}</code>",
            f"<code>{_value(entry['value'])}</code>",
            esc(entry["reason"]),
        )
        for name, entry in settings.items()
    ]
    chosen = sum(entry["reason"] != "given" for entry in settings.values())
    head = f"{len(cells)} settings, {chosen} of them chosen, each with its reason"
    table = render_table(["setting", "value", "reason"], cells)
    data = _key_values({f"data.{key}": value for key, value in content["data"].items()})
    shape = _key_values({f"model.{key}": value for key, value in (content["shape"] or {}).items()})
    body = (
        f"<details><summary>{head}</summary><div>{table}</div></details>"
        f"<details><summary>Model and data</summary><div>{shape}{data}</div></details>"
    )
    return render_section("settings", "Settings", body)


def _manifest(record: RunRecord) -> str:
    shown = [attempt for attempt in record.attempts if attempt.manifest]
    if not shown:
        return render_section("manifest", "Manifest", '<p class="muted">No attempt has one.</p>')
    body = "".join(
        f"<details><summary>Attempt {attempt.number}</summary>"
        f"<div>{_key_values(flatten(attempt.manifest))}</div></details>"
        for attempt in shown
    )
    return render_section("manifest", "Manifest", body)


def _key_values(content: dict[str, Any]) -> str:
    cells = [(f"<code>{esc(key)}</code>", _value(value)) for key, value in content.items()]
    return render_table(["name", "value"], cells)


def _value(value: Any) -> str:
    return esc(value if isinstance(value, str) else json.dumps(value))


def _seconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds:,.2f} s"


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))

"""Report of a run as one value: its headline numbers, sections, sources and profiles."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardyard.config.data_choices import SLOTS
from shardyard.config.resolved import flatten
from shardyard.config.rules.tags import tag_words
from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.attempts import attempts_table
from shardyard.report.cost import RunCost
from shardyard.report.document import (
    BarPart,
    Block,
    Chart,
    CopyCommand,
    Details,
    Document,
    PageSection,
    Panels,
    Paragraph,
    ShareBar,
    Table,
    Text,
    Tiles,
    code,
    only_in,
)
from shardyard.report.html import charts_unavailable_reason, render_html
from shardyard.report.markdown import render_markdown
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.samples import confusion_blocks, sample_blocks
from shardyard.report.summary import Suggest, Summary, no_levers, summarize
from shardyard.report.timeline import describe, timeline
from shardyard.report.walltime import PHASES, WAITING, running_s
from shardyard.rundir.layout import RunDir
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

MAX_COLUMNS = 4
"""Attempts with a column of their own; with more, only their sum has one."""


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """The headline: label, value, and a line below."""
    step_s = summary.step_time_s
    return [
        (
            "training loss",
            format_nats(summary.loss),
            f"{summary.loss_unit}, step {summary.steps_done:,}",
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


def report_document(
    record: RunRecord, summary: Summary, panels: Mapping[str, str], *, no_charts_reason: str = ""
) -> Document:
    """Return the whole report.

    Args:
        panels: Plots by name, each an ``<svg>``.
        no_charts_reason: Reason for their lack.
    """
    charts = [Chart(name, svg) for name, svg in panels.items() if not name.startswith("device-")]
    of_devices = [Chart(name, svg) for name, svg in panels.items() if name.startswith("device-")]
    drawn = f", {record.sampling_method}" if record.sampling_method else ""
    no_charts = Paragraph(no_charts_reason or "No step was finished yet.", "muted")
    sections: list[tuple[str, str, Iterator[Block]]] = [
        ("what-to-change", "What to change", change_blocks(summary)),
        ("curves", "Curves", iter([Panels(charts) if charts else no_charts])),
        ("sample", f"Sample{drawn}", sample_blocks(record)),
        ("confusion", "Confusion matrix", confusion_blocks(record)),
        ("devices", "Devices and nodes", _devices(summary, of_devices)),
        ("sources", "Sources", sources(record)),
        ("eval-sets", "Validation sets", eval_sets(record)),
        ("eval-tasks", "Tasks", eval_tasks(record)),
        ("attempts", "Attempts", _attempts(summary)),
        ("wall-time", "Where the time went", _wall_time(summary)),
        ("plan", "Predicted against measured", _against_plan(record, summary)),
        ("profiles", "Where a step's time went", _profiles(record)),
        ("checkpoints", "Checkpoints", _checkpoints(record)),
        ("timeline", "Events", _events(record)),
        ("settings", "Settings", _settings(record)),
        ("manifest", "Manifest", _manifest(record)),
        ("commands", "Commands to copy", _commands(summary)),
    ]
    found = [PageSection(name, title, list(blocks)) for name, title, blocks in sections]
    more = "Curves, settings with reasons, manifest and events: "
    return Document(
        title=f"{summary.run_id}: training report",
        kind="Training report",
        heading=summary.run_id,
        badge=summary.state,
        badge_kind=summary.state,
        head=[*_head(record, summary)],
        body=[
            *(section for section in found if section.blocks),
            *only_in("markdown", Paragraph((more, Text("report.html", kind="file")))),
        ],
        footer=(
            f"Written {_clock(time.time())} from ", code(record.run.path), " by ",
            code("shardyard report"), ". Every number is read from that folder.",
        ),
    )  # fmt: skip


def write_report(run: RunDir, *, suggest: Suggest = no_levers) -> Summary:
    """Write both files and return their numbers; without pictures where none can be drawn.

    Args:
        suggest: Plans the levers; without it, the report has none.

    Raises:
        RequestError: The folder holds no attempt.
        StorageError: The folder cannot be written.
    """
    record = read_run(run)
    summary = summarize(record, suggest=suggest)
    why_none = charts_unavailable_reason()
    panels = {} if why_none else _panels(record)
    document = report_document(record, summary, panels, no_charts_reason=why_none)
    write_text(run.report_html, render_html(document))
    write_text(run.report_markdown, render_markdown(document))
    if why_none:
        warn(why_none)
    return summary


def _panels(record: RunRecord) -> dict[str, str]:
    # matplotlib: half a second, not for a refused recipe
    from shardyard.report.charts import device_panels, panels

    return {**panels(record), **device_panels(record)}


def terminal_blocks(summary: Summary) -> list[Block]:
    """Return what the verb prints."""
    return [*_outcome(summary), *change_blocks(summary), *_commands(summary)]


def _outcome(summary: Summary) -> Iterator[Paragraph]:
    yield Paragraph(summary.sentence(), "lead")
    if summary.state != "finished" and summary.state_reason:
        yield Paragraph(summary.state_reason, "lead")


def _head(record: RunRecord, summary: Summary) -> Iterator[Block]:
    yield from _outcome(summary)
    if record.plan:
        yield Paragraph(record.plan.line(), "note")
    yield Tiles(tiles(summary))
    yield Paragraph(f"MFU: {summary.mfu_note}.", "note")
    if summary.cost is not None:
        yield Paragraph(summary.cost.words(), "note")
    if summary.tags:
        yield Paragraph(f"Tags: {tag_words(summary.tags, ', ')}", "note")
    if summary.trackers:
        yield Paragraph(("Sent to ", *_trackers(summary)), "note")
    yield Paragraph(summary.health.words, only=("markdown",))


def _trackers(summary: Summary) -> Iterator[str]:
    """Yield links to the run in W&B and MLflow, and folders of W&B's client that was offline."""
    for number, (name, address) in enumerate(summary.trackers.items()):
        yield f"{', ' if number else ''}{name} "
        is_link = address.startswith(("https://", "http://"))
        yield Text(address, kind="link" if is_link else "code")


def change_blocks(summary: Summary) -> Iterator[Block]:
    """Yield findings and levers, the best first; a page has the levers in a table."""
    for text in summary.findings:
        yield Paragraph(text, "item")
    measured_s = summary.step_time_s or 0.0
    rows = []
    for lever in summary.levers:
        override = Text(" ".join(lever.settings), kind="copy")
        words = f"{lever.name}: {lever.words(measured_s)}. "
        yield Paragraph((words, override), "item", only=("markdown", "terminal"))
        times = format_seconds(measured_s), format_seconds(lever.step_time_s)
        rows.append((lever.name, override, *times, f"-{format_percent(lever.gain)}", lever.effect))
    if rows:
        heads = ["lever", "override", "#step measured", "#step predicted", "#gain", ""]
        yield Table(heads, rows, only=("page",))


def _commands(summary: Summary) -> Iterator[CopyCommand]:
    for each in summary.commands:
        yield CopyCommand(each.command, each.purpose[0].upper() + each.purpose[1:])


def _devices(summary: Summary, figures: Sequence[Chart]) -> Iterator[Block]:
    health = summary.health
    if not (figures or health.problems or health.watched_nodes):
        return
    yield Paragraph(health.words, only=("page",))
    for text in health.problems:
        yield Paragraph(text, "item bad")
    if figures:
        yield Panels(figures)


def sources(record: RunRecord) -> Iterator[Table]:
    """Yield a table with a row a source of a mixture; nothing if there was one source."""
    resolved = record.resolved
    if resolved is None or not resolved.data.parts:
        return
    seq_len = int(resolved.recipe.data.seq_len)
    last = record.steps[-1] if record.steps else {}
    # samples, as tokens leave padding out; phases have samples of several lengths
    samples = (last.get("tokens") or 0) // seq_len if resolved.phases else last.get("samples") or 0
    newest = record.evaluations[-1].get("eval_sources", {}) if record.evaluations else {}
    rows = [
        (
            part.name,
            f"{part.slots / SLOTS:.1%}",
            f"{part.data.train_tokens:,}",
            f"{part.passes(samples, seq_len):.2f}",
            format_nats(newest[part.name].get("loss")) if part.name in newest else ABSENT,
        )
        for part in resolved.data.parts
    ]
    heads = ["source", "#share of the samples", "#tokens", "#times read", "#validation loss"]
    yield Table(heads, rows)


def eval_sets(record: RunRecord) -> Iterator[Table]:
    """Yield a table with the newest scores of each set of data.eval_sets; nothing without sets."""
    resolved = record.resolved
    if resolved is None or not resolved.data.eval_sets:
        return
    newest = record.evaluations[-1].get("eval_sources", {}) if record.evaluations else {}
    scores = {each.name: newest.get(each.name, {}) for each in resolved.data.eval_sets}
    metrics = list(dict.fromkeys(name for each in scores.values() for name in each)) or ["loss"]
    rows = [
        (
            each.name,
            f"{each.data.eval_tokens:,}",
            *(format_nats(scores[each.name].get(metric)) for metric in metrics),
        )
        for each in resolved.data.eval_sets
    ]
    yield Table(["set", "#tokens", *(f"#{metric}" for metric in metrics)], rows)


def eval_tasks(record: RunRecord) -> Iterator[Table]:
    """Yield a table with the newest scores of each task of data.eval_tasks; nothing without any."""
    resolved = record.resolved
    if resolved is None or not resolved.recipe.data.eval_tasks:
        return
    newest = record.evaluations[-1].get("eval_sources", {}) if record.evaluations else {}
    rows = [
        (name, word, metric, format_nats(value))
        for name, word in resolved.recipe.data.eval_tasks.items()
        for metric, value in newest.get(name, {ABSENT: None}).items()
    ]
    yield Table(["task", "file", "metric", "#score"], rows)


def _attempts(summary: Summary) -> Iterator[Table]:
    if len(summary.results) > 1 or len(summary.paces) > 1:
        yield Table(*attempts_table(summary.results))


def _wall_time(summary: Summary) -> Iterator[Block]:
    for attempt in summary.attempts:
        text = f"attempt {attempt.number}: {format_seconds(running_s(attempt.phases))} running time"
        if waited_s := attempt.phases.get(WAITING, 0.0):
            text += f", {format_seconds(waited_s)} after the attempt before it"
        yield ShareBar(text + ("" if attempt.has_ended else ", not ended"), _parts(attempt.phases))
    yield Paragraph(summary.effective_words())
    several = 1 < len(summary.attempts) <= MAX_COLUMNS
    columns = [attempt.phases for attempt in summary.attempts] if several else []

    def row(name: str, seconds: Sequence[float], share: str, what: str) -> Sequence[str]:
        exact = f"{seconds[-1]:.3f} s" if seconds[-1] < 0 else format_seconds(seconds[-1])
        return [name, *(f"{each:,.2f} s" for each in seconds), exact, share, what]

    rows = []
    for name, seconds in summary.phases.items():
        if name != WAITING:
            times = [*(phases.get(name, 0.0) for phases in columns), seconds]
            share = format_percent(seconds / summary.running_s) if summary.running_s else ""
            rows.append(row(Text(name, kind=f"key {_slug(name)}"), times, share, PHASES[name]))
    running = [*map(running_s, columns), summary.running_s]
    rows.append(row("running time", running, "100 %", "shares are of this"))
    if summary.between_s:
        waits = [*(phases.get(WAITING, 0.0) for phases in columns), summary.between_s]
        name = Text("between attempts", kind=f"key {WAITING}")
        rows.append(row(name, waits, "", PHASES[WAITING]))
        walls = [*(sum(phases.values()) for phases in columns), summary.wall_s]
        rows.append(row("wall time", walls, "", ""))
    heads = [f"+#attempt {attempt.number}" for attempt in summary.attempts] if several else []
    last = "+#all attempts" if several else "+#time"
    heads = ["phase", *heads, last, "-#time", "#share", ""]
    yield Table(heads, rows, totals=3 if summary.between_s else 1)


def _parts(phases: Mapping[str, float]) -> tuple[BarPart, ...]:
    shown = {name: each for name, each in phases.items() if name != WAITING and each > 0}
    total = sum(shown.values()) or 1.0
    return tuple(
        BarPart(name, seconds / total, _slug(name), format_seconds(seconds))
        for name, seconds in shown.items()
    )


def _against_plan(record: RunRecord, summary: Summary) -> Iterator[Block]:
    if not summary.comparisons:
        text = "plan.json is missing or not readable, so the run cannot be compared with its plan."
        yield Paragraph(text, "muted")
        return
    rows = [
        (
            row.name,
            format_value(row.predicted, row.unit, "not predicted"),
            format_value(row.measured, row.unit, "not measured"),
            format_error(row.error),
            row.note,
        )
        for row in summary.comparisons
    ]
    yield Table(["term", "#predicted", "#measured", "#error", "+"], rows)
    if record.plan is None:
        return
    plan = record.plan
    yield from _terms(
        f"Predicted peak of one rank, {format_bytes(plan.memory_bytes)} {plan.memory_moment}, "
        f"term by term. {plan.fits}: {plan.fits_reason}.",
        ["term", "#bytes", ""],
        [(term.name, format_bytes(term.bytes), term.reason) for term in plan.memory],
    )
    if (step_s := plan.step_s) is not None:
        yield from _terms(
            f"Predicted time of a step, {format_seconds(step_s)}, term by term.",
            ["term", "#time", "#share", ""],
            [
                (
                    term.name,
                    format_seconds(term.seconds),
                    format_percent(term.seconds / step_s),
                    term.reason,
                )
                for term in plan.time
            ],
        )


def _terms(note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Block]:
    yield Paragraph(note, "note", only=("page",))
    yield Table(heads, rows, only=("page",))


def _profiles(record: RunRecord) -> Iterator[Block]:
    heads = [HEADS[0], *(f"#{head}" for head in HEADS[1:-1]), HEADS[-1]]
    for profile in record.profiles:
        yield Paragraph(profile_words(profile))
        yield Table(heads, profile_rows(profile))
        traces = f"profiles/{record.run.profile(profile.step).name}"
        yield Paragraph(("Traces: ", code(traces)), "note")


def _checkpoints(record: RunRecord) -> Iterator[Block]:
    durable = record.all("checkpoint_durable")
    found = (event.get("damaged") or [] for event in record.all("checkpoint_loaded"))
    warnings = list(dict.fromkeys(_damage(entry) for entries in found for entry in entries))
    warnings += [
        f"Step {event.get('step', '?')} was not saved, as it is not finite: {event.get('reason')}"
        for event in record.all("checkpoint_abandoned")
    ]
    if record.set_aside:
        warnings.append(f"Set aside as damaged: {', '.join(record.set_aside)}")
    for text in warnings:
        yield Paragraph(text, "item bad")
    started = {(e.get("attempt"), e.get("step")): e for e in record.all("checkpoint_started")}
    rows = [
        (
            f"{event.get('step', 0):,}",
            format_bytes(event.get("bytes") or 0),
            _seconds(started.get((event.get("attempt"), event.get("step")), {}).get("blocked_s")),
            _seconds(event.get("seconds")),
        )
        for event in durable[-20:]
    ]
    if rows:
        yield Table(["#step", "#bytes", "#training stood still", "#until durable"], rows)
    if len(durable) > len(rows):
        yield Paragraph(f"The newest 20 of {len(durable)}.", "note")


def _damage(entry: Any) -> str:
    """A damaged checkpoint as an event names it: a sentence, or its step and the reasons."""
    if not isinstance(entry, dict):
        return str(entry)
    reasons = "; ".join(str(reason) for reason in entry.get("reasons", []))
    return f"The checkpoint of step {entry.get('step', '?')} is damaged: {reasons}"


def _events(record: RunRecord) -> Iterator[Details]:
    events, left_out = timeline(record)
    if not events:
        return
    rows = [
        (
            _clock(event["t"]),
            f"+{_seconds(event['t'] - events[0]['t'])}",
            f"{event.get('attempt', 1)}.{event.get('generation', 0)}",
            Text(event["kind"], kind="kind"),
            describe(event),
        )
        for event in events
    ]
    blocks: list[Block] = [Table(["time (UTC)", "#after", "#attempt", "event", ""], rows)]
    if left_out:
        frequent = "checkpoints, evaluations and counts of cost"
        blocks.append(Paragraph(f"{left_out:,} {frequent} are left out here.", "note"))
    yield Details(f"{len(rows)} events", blocks, is_open=True)


def _settings(record: RunRecord) -> Iterator[Block]:
    if record.script is not None:
        config = flatten(record.script.config)
        yield Paragraph("The loop is a script's own. It gave this config.", "muted")
        yield Details(f"{len(config)} values", [_key_values(config)], is_open=True)
        return
    if record.resolved is None:
        yield Paragraph("No attempt holds a readable resolved.json.", "muted")
        return
    content = record.resolved.to_json()
    settings: dict[str, dict[str, Any]] = content["settings"]
    rows = [
        (code(name), code(_value(entry["value"])), entry["reason"])
        for name, entry in settings.items()
    ]
    chosen = sum(entry["reason"] != "given" for entry in settings.values())
    head = f"{len(rows)} settings, {chosen} of them chosen, each with its reason"
    yield Details(head, [Table(["setting", "value", "reason"], rows)])
    shape = {f"model.{key}": value for key, value in (content["shape"] or {}).items()}
    data = {f"data.{key}": value for key, value in content["data"].items()}
    yield Details("Model and data", [_key_values({**shape, **data})])


def _manifest(record: RunRecord) -> Iterator[Block]:
    shown = [attempt for attempt in record.attempts if attempt.manifest]
    for attempt in shown:
        yield Details(f"Attempt {attempt.number}", [_key_values(flatten(attempt.manifest))])
    if not shown:
        yield Paragraph("No attempt has one.", "muted")


def _key_values(content: Mapping[str, Any]) -> Table:
    rows = [(code(key), _value(value)) for key, value in content.items()]
    return Table(["name", "value"], rows)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _seconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds:,.2f} s"


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))

"""The page of a drill: one HTML file that opens from disk, in the report's style.

Pure: what a drill has found in, text out.
"""

from shardyard.drill.faults import FAULTS
from shardyard.drill.run import Case, Drill, FaultSummary
from shardyard.drill.verdict import PHASES
from shardyard.report.html import esc, render_page, render_section, render_table
from shardyard.units import format_seconds

_COLOURS = {
    "detect": "detect",
    "restart": "restart",
    "rendezvous": "rendezvous",
    "init": "init",
    "load": "load",
    "first step": "productive",
}
"""Phase -> its class in the style sheet, the one that the report has for it."""


def render_drill(drill: Drill) -> str:
    """The whole page."""
    parts = [
        _header(drill),
        _table(drill),
        _timeline(drill),
        _failures(drill),
        _not_possible(drill),
    ]
    footer = (
        f"Written from <code>{esc(drill.result_file)}</code> by <code>shardyard drill</code>. "
        "Times are comparable only if the machine was otherwise idle."
    )
    return render_page("Drill", "\n".join(filter(None, parts)), footer=footer)


def _header(drill: Drill) -> str:
    cases, good = len(drill.cases), sum(case.result.is_good for case in drill.cases)
    due = [case for case in drill.cases if FAULTS[case.observations.fault].named is not None]
    equal = sum(case.result.exact == "equal" for case in drill.cases)
    tiles = [
        ("faults tried", f"{cases}", f"{len(drill.rows)} kinds"),
        ("noticed", f"{sum(c.result.is_noticed for c in due)} of {len(due)}", "by the run itself"),
        ("cause right", f"{sum(c.result.is_cause_right for c in due)} of {len(due)}",
         "the fault and its target named"),
        ("bit-equal", f"{equal} of {cases}", "losses, samples, weights against the twin"),
        ("recovered", f"{sum(c.result.has_recovered for c in drill.cases)} of {cases}",
         "came to the end of the run"),
    ]  # fmt: skip
    shown = "".join(
        f'<div class="tile"><div class="label">{esc(label)}</div>'
        f'<div class="value">{esc(value)}</div><div class="sub">{esc(below)}</div></div>'
        for label, value, below in tiles
    )
    ranks = f"{drill.drilled.nodes} x {drill.drilled.devices}"
    state, word = ("finished", "good") if drill.is_good else ("failed", f"{cases - good} not good")
    return f"""<header>
<p class="eyebrow">Drill</p>
<h1>{esc(" ".join(drill.drilled.words[:1]))} <span class="badge {state}">{esc(word)}</span></h1>
<p class="lead">{ranks} ranks (nodes x processes), {drill.drilled.steps} steps a run, seed
{drill.seed}. Each
fault breaks a run of its own, which is compared with one that was left alone.</p>
<div class="tiles">{shown}</div>
</header>"""


def _table(drill: Drill) -> str:
    heads = ["fault", "#cases", "#noticed", "#after", "#cause right", "#steps lost", "#next step",
             "bits", "left over", ""]  # fmt: skip
    table = render_table(heads, [_row(row) for row in drill.rows])
    note = (
        "Times and steps are medians. After: from the fault to the first word about it. Next step: "
        "from the fault to the next finished step; where the run had to be resumed by hand, the "
        "resume was typed at once."
    )
    body = f'<div class="card">{table}<p class="note">{note}</p></div>'
    return render_section("faults", "Faults", body)


def _row(row: FaultSummary) -> tuple[str, ...]:
    total, fault = len(row.cases), FAULTS[row.fault]
    is_due = fault.named is not None
    left = sorted({case.result.left for case in row.cases} - {""})
    return (
        f"<code>{esc(row.fault)}</code>",
        f"{total}",
        _share(row.count("is_noticed"), total) if is_due else "-",
        esc(_seconds(row.median("noticed_s"))) if is_due else "-",
        _share(row.count("is_cause_right"), total) if is_due else "-",
        f"{row.median('steps_lost'):g}",
        esc(_seconds(row.median("next_step_s"))),
        _bits(row),
        esc("; ".join(left) or "nothing"),
        esc(f"{fault.what}: {fault.method}"),
    )


def _bits(row: FaultSummary) -> str:
    kind = "bad" if row.exact("different") else "good"
    return f'<span class="{kind}">{esc(row.bits)}</span>'


def _share(count: int, total: int) -> str:
    kind = "good" if count == total else "bad"
    return f'<span class="{kind}">{count} of {total}</span>'


def _timeline(drill: Drill) -> str:
    with_steps = [row for row in drill.rows if row.phases()]
    by_itself = [row for row in with_steps if not row.needs_resume]
    by_hand = [row for row in with_steps if row.needs_resume]
    bars = _bars("by itself", by_itself) + _bars("after `shardyard resume`", by_hand)
    if not bars:
        return ""
    keys = "".join(
        f'<span><span class="swatch {_COLOURS[name]}"></span>{esc(name)}</span>' for name in PHASES
    )
    body = f'<div class="card"><div class="keys">{keys}</div>{bars}</div>'
    return render_section("timeline", "From the fault to the next finished step", body)


def _bars(recovery: str, rows: list[FaultSummary]) -> str:
    """A bar a row, all on one scale."""
    if not rows:
        return ""
    longest_s = max(sum(row.phases().values()) for row in rows)
    cells = [
        (
            f"<code>{esc(row.fault)}</code>",
            esc(_seconds(sum(row.phases().values()))),
            _bar(row.phases(), longest_s),
        )
        for row in rows
    ]
    return render_table(["fault", "#seconds", f"the run went on {recovery}"], cells)


def _bar(phases: dict[str, float], longest_s: float) -> str:
    spans = "".join(
        f'<span class="{_COLOURS[name]}" style="width:{100 * seconds / longest_s:.3f}%" '
        f'title="{esc(name)}: {esc(format_seconds(seconds))}"></span>'
        for name, seconds in phases.items()
        if seconds > 0
    )
    return f'<div class="bar" style="min-width:360px">{spans}</div>'


def _failures(drill: Drill) -> str:
    bad = [case for case in drill.cases if not case.result.is_good]
    if not bad:
        return ""
    cells = [
        (f"<code>{esc(_name(case))}</code>", esc(f"{case.observations.node}"),
         esc(f"{case.observations.rank}"),
         esc("; ".join(case.result.problems)), esc(case.result.said or "no output"))
        for case in bad
    ]  # fmt: skip
    table = render_table(["case", "#node", "#rank", "what is wrong", ""], cells)
    note = f"Output of each command: <code>{esc(drill.folder)}/talk</code>."
    body = f'<div class="card">{table}<p class="note">{note}</p></div>'
    return render_section("problems", "What was not good", body)


def _not_possible(drill: Drill) -> str:
    if not drill.impossible:
        return ""
    cells = [
        (f"<code>{esc(name)}</code>", esc(why), esc(FAULTS[name].what if name in FAULTS else ""))
        for name, why in drill.impossible.items()
    ]
    table = render_table(["fault", "why not", ""], cells)
    return render_section("left-out", "Not possible here", f'<div class="card">{table}</div>')


def _name(case: Case) -> str:
    return f"{case.observations.fault} {case.observations.number}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"

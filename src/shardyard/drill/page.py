"""Findings of a drill as one value: its page, and the table that the verb prints."""

from collections.abc import Iterator

from shardyard.drill.faults import FAULTS
from shardyard.drill.run import Drill, FaultSummary
from shardyard.drill.verdict import PHASES
from shardyard.report.document import (
    BarPart,
    Block,
    Document,
    PageSection,
    Paragraph,
    ShareBar,
    Table,
    Text,
    Tiles,
    code,
)
from shardyard.report.html import render_html
from shardyard.units import ABSENT, format_seconds

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
    cases, good = len(drill.cases), sum(case.result.is_good for case in drill.cases)
    lead = (
        f"{drill.drilled.nodes} x {drill.drilled.devices} ranks (nodes x processes), "
        f"{drill.drilled.steps} steps a run, seed {drill.seed}. Each fault breaks a run of its "
        "own, which is compared with one that was left alone."
    )
    return render_html(
        Document(
            title="Drill",
            kind="Drill",
            heading=" ".join(drill.drilled.words[:1]),
            badge="good" if drill.is_good else f"{cases - good} not good",
            badge_kind="finished" if drill.is_good else "failed",
            head=[Paragraph(lead, kind="lead"), _tiles(drill)],
            body=[
                PageSection("faults", "Faults", [faults_table(drill), Paragraph(_NOTE, "note")]),
                *_timeline(drill),
                *_failures(drill),
                *_not_possible(drill),
            ],
            footer=(
                "Written from ", code(drill.result_file), " by ", code("shardyard drill"), ". "
                "Times are comparable only if the machine was otherwise idle.",
            ),
        )
    )  # fmt: skip


_NOTE = (
    "Times and steps are medians. After: from the fault to the first word about it. Next step: "
    "from the fault to the next finished step; where the run had to be resumed by hand, the "
    "resume was typed at once."
)


def _tiles(drill: Drill) -> Tiles:
    cases = len(drill.cases)
    due = [case for case in drill.cases if FAULTS[case.observations.fault].named is not None]
    equal = sum(case.result.exact == "equal" for case in drill.cases)
    return Tiles([
        ("faults tried", f"{cases}", f"{len(drill.rows)} kind{'s' * (len(drill.rows) > 1)}"),
        ("noticed", f"{sum(c.result.is_noticed for c in due)} of {len(due)}", "by the run itself"),
        ("cause right", f"{sum(c.result.is_cause_right for c in due)} of {len(due)}",
         "the fault and its target named"),
        ("bit-equal", f"{equal} of {cases}", "losses, samples, weights against the twin"),
        ("recovered", f"{sum(c.result.has_recovered for c in drill.cases)} of {cases}",
         "came to the end of the run"),
    ])  # fmt: skip


def faults_table(drill: Drill) -> Table:
    """A row a kind of fault."""
    heads = ["fault", "+#cases", "#noticed", "#after", "#cause right", "#steps lost", "#next step",
             "bits", "left over", "+"]  # fmt: skip
    return Table(heads, [_row(row) for row in drill.rows])


def _row(row: FaultSummary) -> tuple[str, ...]:
    total, fault = len(row.cases), FAULTS[row.fault]
    is_due = fault.named is not None
    left = sorted({case.result.left for case in row.cases} - {""})
    return (
        code(row.fault),
        f"{total}",
        _share(row.count("is_noticed"), total) if is_due else ABSENT,
        _seconds(row.median("noticed_s")) if is_due else ABSENT,
        _share(row.count("is_cause_right"), total) if is_due else ABSENT,
        f"{row.median('steps_lost'):g}",
        _seconds(row.median("next_step_s")),
        Text(row.bits, kind="bad" if row.exact("different") else "good"),
        "; ".join(left) or "nothing",
        f"{fault.what}: {fault.method}",
    )


def _share(count: int, total: int) -> Text:
    return Text(f"{count} of {total}", kind="good" if count == total else "bad")


def _timeline(drill: Drill) -> Iterator[PageSection]:
    with_steps = [row for row in drill.rows if row.phases()]
    by_itself = [row for row in with_steps if not row.needs_resume]
    by_hand = [row for row in with_steps if row.needs_resume]
    keys = ShareBar("", tuple(BarPart(name, 0, _COLOURS[name], "") for name in PHASES), True)
    tables: list[Block] = [*_bars("by itself", by_itself)]
    tables += _bars("after `shardyard resume`", by_hand)
    if tables:
        title = "From the fault to the next finished step"
        yield PageSection("timeline", title, [keys, *tables])


def _bars(recovery: str, rows: list[FaultSummary]) -> Iterator[Table]:
    """A bar a row, all on one scale."""
    longest_s = max((sum(row.phases().values()) for row in rows), default=0.0)
    cells = [
        (
            code(row.fault),
            _seconds(sum(row.phases().values())),
            Text("", shares=tuple(
                BarPart(name, seconds / longest_s, _COLOURS[name], format_seconds(seconds))
                for name, seconds in row.phases().items()
            )),
        )
        for row in rows
    ]  # fmt: skip
    if cells:
        yield Table(["fault", "#seconds", f"the run went on {recovery}"], cells)


def _failures(drill: Drill) -> Iterator[PageSection]:
    cells = [
        (
            code(f"{case.observations.fault} {case.observations.number}"),
            f"{case.observations.node}",
            f"{case.observations.rank}",
            "; ".join(case.result.problems),
            case.result.said or "no output",
        )
        for case in drill.cases
        if not case.result.is_good
    ]
    if cells:
        table = Table(["case", "#node", "#rank", "what is wrong", ""], cells)
        note = Paragraph(("Output of each command: ", code(f"{drill.folder}/talk"), "."), "note")
        yield PageSection("problems", "What was not good", [table, note])


def _not_possible(drill: Drill) -> Iterator[PageSection]:
    cells = [
        (code(name), why, FAULTS[name].what if name in FAULTS else "")
        for name, why in drill.impossible.items()
    ]
    if cells:
        table = Table(["fault", "why not", ""], cells)
        yield PageSection("left-out", "Not possible here", [table])


def _seconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds:.3g} s"

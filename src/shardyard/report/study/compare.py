"""Comparison of studies: the same sizes, which is faster there, and which scales better.

The first study is the baseline. Speeds are those of the runs of a size, judged as
`shardyard compare` judges any two runs. Repeated studies of one kind are one side, so that
their runs of a size are repeats too. Scaling is the speed at a size over the speed at the
smallest size that the two share: a study that is faster everywhere by the same factor
scales alike.

A published table has one number a size: its efficiencies are shown next to the others,
without a verdict.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from shardyard.errors import JsonFileError, RequestError
from shardyard.io.files import read_json_object, write_text
from shardyard.log import warn
from shardyard.report.compare.differences import Difference, settings_that_differ
from shardyard.report.compare.page import Table
from shardyard.report.compare.statistics import (
    SMALLEST_EFFECT,
    Pace,
    SpeedComparison,
    compare_speed,
    pace_of,
)
from shardyard.report.format import ABSENT
from shardyard.report.html import esc, render_page, render_section, render_table
from shardyard.report.matplotlib_check import charts_unavailable_reason
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.study.page import JSON, PAGE
from shardyard.report.study.table import VERSION
from shardyard.report.summary import summarize
from shardyard.rundir.layout import RunDir
from shardyard.units import format_count

_KNOWN = ("measured", "published")

Unit = Literal["tokens", "samples"]


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One size of one study."""

    rates: Mapping[Unit, float]
    """A second, all accelerators; of what is known."""
    run_id: str
    """Empty: of a published table."""


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """One study, as its folder holds it."""

    name: str
    folder: Path
    rows: Mapping[int, StudyRow]
    """Rows by accelerators; only measured and published sizes."""

    def run(self, accelerators: int) -> RunDir | None:
        """The run of a size, where its folder is there."""
        row = self.rows.get(accelerators)
        if row is None or not row.run_id:
            return None
        found = RunDir(self.folder.parent / row.run_id)
        return found if found.recipe.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Efficiency of one side over the baseline's, both against the same smallest size."""

    verdict: Literal["better", "worse", "inconclusive"]
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SizeComparison:
    """One size on one side."""

    side: int
    accelerators: int
    rate: float | None
    """Tokens or samples a second, all accelerators; of repeats the mean. None: it has not run."""
    efficiency: float | None
    """Against the smallest size that all sides share."""
    speed: SpeedComparison | None
    """Step time compared with the baseline's; None: the baseline itself, or a size has no run."""
    scaling: Scaling | None
    """Scaling; None: the baseline, the smallest size, or unknown."""


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """All of it."""

    sides: tuple[tuple[StudyTable, ...], ...]
    unit: Unit
    """Unit of the rates."""
    base: int
    """Accelerators of the smallest size that all sides share."""
    sizes: tuple[SizeComparison, ...]
    """By accelerators, then by side."""
    settings: tuple[Difference, ...]
    """Settings that differ between the studies' runs of that size; empty too without such runs."""
    settings_of: tuple[str, ...]
    """Ids of these runs, in the order of each difference's values."""

    def name(self, side: int) -> str:
        """Return the name of its first study, and the number of further ones."""
        studies = self.sides[side]
        more = len(studies) - 1
        return studies[0].name if not more else f"{studies[0].name} and {more} more"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "studies": [
                {"side": side, "name": study.name, "path": str(study.folder)}
                for side, studies in enumerate(self.sides)
                for study in studies
            ],
            "unit": self.unit,
            "base_accelerators": self.base,
            "sizes": [{**asdict(each), "name": self.name(each.side)} for each in self.sizes],
            "settings": [asdict(each) for each in self.settings],
            "settings_of": list(self.settings_of),
        }


def is_study(folder: Path) -> bool:
    """Whether a folder is that of a study."""
    table, recipe = folder / JSON, folder / "recipe.yaml"
    return os.path.isfile(table) and not os.path.exists(recipe)  # noqa: PTH110, PTH113 (long names)


def read_study(folder: Path) -> StudyTable:
    """Read the table of a study.

    Raises:
        RequestError: The table is damaged, is of another version, or holds several series.
    """
    file = folder / JSON
    try:
        table = read_json_object(file)
        name, version, series = str(table["name"]), table["version"], list(table["series"])
        rows = [row for each in series[:1] for row in each["rows"]]
        known = {int(row["accelerators"]): _row(row) for row in rows if row["origin"] in _KNOWN}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.reason if isinstance(error, JsonFileError) else repr(error)
        raise RequestError(
            f"{file} is not the table of a study ({why}). Write it anew with the command that "
            "made it: `shardyard study` goes on where it stood."
        ) from error
    if version != VERSION:
        raise RequestError(
            f"{file} is of version {version}, and this Shardyard reads {VERSION}. Write it anew "
            "with `shardyard study`."
        )
    if len(series) != 1:
        raise RequestError(
            f"{file} holds {len(series)} series, which are beside each other on its own page "
            "already. Compare studies of one series each."
        )
    if not known:
        raise RequestError(
            f"{file}: no size of this study was measured, so there is nothing to compare. Run it: "
            "`shardyard study RECIPE --nodes ... --on LAUNCHER`."
        )
    return StudyTable(name=name, folder=folder.resolve(), rows=known)


def _row(row: Mapping[str, Any]) -> StudyRow:
    run_id, size = str(row["run_id"]), int(row["accelerators"])
    if run_id != Path(run_id).name and run_id:
        raise ValueError(f"run_id {run_id!r} is no name of a folder")
    units: tuple[Unit, ...] = ("tokens", "samples")
    known = [(unit, row[f"{unit}_per_s"]) for unit in units]
    rates = {unit: float(rate) for unit, rate in known if rate is not None}
    if size < 1 or not all(0 < rate < math.inf for rate in rates.values()):
        raise ValueError(f"accelerators {size} and rates {rates} are not above 0")
    return StudyRow(rates=rates, run_id=run_id)


def compare_studies(sides: Sequence[Sequence[StudyTable]]) -> StudyComparison:
    """Put studies side by side.

    Args:
        sides: The studies of each side, the baseline first.

    Raises:
        RequestError: Only one side, a study named twice, no size in common, or other units.
    """
    _check_sides(sides)
    unit = _unit(sides)
    shared = set.intersection(*(set(study.rows) for studies in sides for study in studies))
    if not shared:
        sizes = "; ".join(
            f"{study.name} has {', '.join(map(str, sorted(study.rows)))}"
            for studies in sides
            for study in studies
        )
        raise RequestError(
            f"these studies have no number of accelerators in common: {sizes}. Add a size to one "
            "of them: `shardyard study RECIPE --nodes ...` with more sizes goes on with it."
        )
    base = min(shared)
    everywhere = sorted({size for studies in sides for study in studies for size in study.rows})
    records = {
        (side, size): _records(studies, size)
        for side, studies in enumerate(sides)
        for size in everywhere
    }
    speeds = _speeds(records)
    smallest = [record for side in range(len(sides)) for record in records[side, base]]
    return StudyComparison(
        sides=tuple(tuple(studies) for studies in sides),
        unit=unit,
        base=base,
        sizes=tuple(
            _compare_size(studies, side, size, base, unit, speeds)
            for size in everywhere
            for side, studies in enumerate(sides)
        ),
        settings=tuple(settings_that_differ(smallest)) if len(smallest) > 1 else (),
        settings_of=tuple(record.run.run_id for record in smallest),
    )


def _compare_size(
    studies: Sequence[StudyTable], side: int, size: int, base: int, unit: Unit,
    speeds: Mapping[tuple[int, int], SpeedComparison],
) -> SizeComparison:  # fmt: skip
    rate, base_rate = _rate(studies, size, unit), _rate(studies, base, unit)
    assert base_rate is not None  # all sides have this size
    speed, at_base = speeds.get((side, size)), speeds.get((side, base))
    return SizeComparison(
        side=side,
        accelerators=size,
        rate=rate,
        efficiency=None if rate is None else rate / size / (base_rate / base),
        speed=speed,
        scaling=None if size == base else _scaling(speed, at_base),
    )


def _check_sides(sides: Sequence[Sequence[StudyTable]]) -> None:
    if len(sides) < 2:
        raise RequestError(
            "one study alone cannot be compared. Name another after a space; its own page is "
            f"{sides[0][0].folder / PAGE}."
        )
    named: set[Path] = set()
    for study in (study for studies in sides for study in studies):
        if study.folder in named:
            raise RequestError(
                f"the study {study.name} is named twice, and it would differ from itself in "
                "nothing. Name each once."
            )
        named.add(study.folder)


def _unit(sides: Sequence[Sequence[StudyTable]]) -> Unit:
    """Return the unit in which all studies have a rate."""
    rows = [row for studies in sides for study in studies for row in study.rows.values()]
    units: tuple[Unit, ...] = ("tokens", "samples")
    for unit in units:
        if all(unit in row.rates for row in rows):
            return unit
    raise RequestError(
        "these studies count other things: not all of them have tokens, and not all have samples, "
        "a second. Compare studies of one kind of data."
    )


def _records(studies: Sequence[StudyTable], size: int) -> list[RunRecord]:
    runs = [study.run(size) for study in studies]
    return [read_run(run) for run in runs if run is not None]


def _rate(studies: Sequence[StudyTable], size: int, unit: Unit) -> float | None:
    rates = [study.rows[size].rates[unit] for study in studies if size in study.rows]
    return fmean(rates) if rates else None


def _speeds(
    records: Mapping[tuple[int, int], list[RunRecord]],
) -> dict[tuple[int, int], SpeedComparison]:
    """Compare each side but the first at each size; leave out sizes where either has no run."""
    paces: dict[tuple[int, int], list[Pace]] = {
        place: [pace_of(record, summarize(record).attempts)[0] for record in found]
        for place, found in records.items()
    }
    return {
        (side, size): compare_speed(paces[0, size], pace)
        for (side, size), pace in paces.items()
        if side and pace and paces[0, size]
    }


def _scaling(speed: SpeedComparison | None, base: SpeedComparison | None) -> Scaling | None:
    """Compute scaling from the speed ratios of a size and of the smallest one to the baseline.

    The two are of other runs, so that their errors are independent; their intervals are even on
    the logarithm.
    """
    if speed is None or base is None or speed.ratio is None or base.ratio is None:
        return None
    half = math.hypot(_half(speed), _half(base))
    ratio = base.ratio / speed.ratio
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    if low <= 1 <= high or max(ratio, 1 / ratio) < 1 + SMALLEST_EFFECT:
        return Scaling(verdict="inconclusive", ratio=ratio, low=low, high=high)
    return Scaling(verdict="better" if ratio > 1 else "worse", ratio=ratio, low=low, high=high)


def _half(speed: SpeedComparison) -> float:
    assert speed.low is not None and speed.high is not None
    return math.log(speed.high / speed.low) / 2


# Studies beside each other in words: the same cells in the terminal and on the page.


def sizes_table(comparison: StudyComparison) -> Table:
    """A row a side and a size that it has."""
    heads = [
        "#accelerators", "study", f"#{comparison.unit}/s", "#efficiency", "speed", "#step time",
        "#interval", "scaling", "#its share", "#interval",
    ]  # fmt: skip
    return heads, [
        _comparison_cells(comparison, size) for size in comparison.sizes if size.rate is not None
    ]


def _comparison_cells(comparison: StudyComparison, size: SizeComparison) -> list[str]:
    return [
        str(size.accelerators),
        comparison.name(size.side),
        ABSENT if size.rate is None else format_count(size.rate),
        ABSENT if size.efficiency is None else f"{100 * size.efficiency:.1f} %",
        *_speed(size),
        *_scaling_cells(size.scaling),
    ]


def _speed(size: SizeComparison) -> list[str]:
    speed = size.speed
    if speed is None:
        return ["", "", ""]
    if speed.ratio is None or speed.low is None or speed.high is None:
        return [speed.verdict, ABSENT, ABSENT]
    return [speed.verdict, f"{speed.ratio:.3f}", f"{speed.low:.3f} to {speed.high:.3f}"]


def _scaling_cells(scaling: Scaling | None) -> list[str]:
    if scaling is None:
        return ["", "", ""]
    ends = f"{scaling.low:.3f} to {scaling.high:.3f}"
    return [scaling.verdict, f"{scaling.ratio:.3f}", ends]


def settings_table(comparison: StudyComparison) -> Table:
    """A row a setting that differs between the runs of the smallest size."""
    return ["setting", *comparison.settings_of], [[e.name, *e.values] for e in comparison.settings]


def method_notes(comparison: StudyComparison) -> list[str]:
    """Explain the numbers: speed, scaling and intervals."""
    first = comparison.name(0)
    return [
        f"Speed: step time at a size beside that of {first} at the same size; 1.05 is 5 % slower. "
        f"Scaling: efficiency beside that of {first}, both against their {comparison.base} "
        "accelerators; 1.05 scales 5 % better. Intervals hold 95 % of the time, each by itself; "
        "inconclusive is not equal.",
        *_reasons(comparison),
    ]


def _reasons(comparison: StudyComparison) -> list[str]:
    """Why a speed has no verdict, or no number."""
    said = [
        f"{comparison.name(size.side)} on {size.accelerators}: {size.speed.why}"
        + (f"; {size.speed.how}." if size.speed.how else ".")
        for size in comparison.sizes
        if size.speed is not None and size.speed.verdict == "inconclusive"
    ]
    missing = [
        f"{comparison.name(size.side)} on {size.accelerators}"
        for size in comparison.sizes
        if size.side and size.speed is None and size.rate is not None
    ]
    if missing:
        said.append(
            f"No speed is judged of {'; '.join(missing)}: that takes the run of this size on both "
            "sides, and one has published numbers alone, or its run's folder is gone."
        )
    return said


# The page of studies beside each other: one file that opens from disk.


def write_study_comparison(sides: Sequence[Sequence[StudyTable]], page: Path) -> StudyComparison:
    """Compare studies and write the page; without pictures where drawing is impossible.

    Raises:
        RequestError: The studies cannot be compared.
        StorageError: The page cannot be written.
    """
    beside = compare_studies(sides)
    why_none = charts_unavailable_reason()
    pictures = {} if why_none else _render_charts(beside)
    write_text(page, render_study_comparison(beside, pictures, no_charts_reason=why_none))
    if why_none:
        warn(why_none)
    return beside


def _render_charts(comparison: StudyComparison) -> dict[str, str]:
    from shardyard.report.study.compare_charts import comparison_panels

    return comparison_panels(comparison)


def render_study_comparison(
    comparison: StudyComparison, charts: Mapping[str, str], *, no_charts_reason: str = ""
) -> str:
    """The whole page.

    Args:
        charts: SVG by name.
        no_charts_reason: Why there are none; empty where there are.
    """
    first = comparison.name(0)
    head = (
        f'<header><p class="eyebrow">Scaling studies</p><h1>{len(comparison.sides)} studies</h1>'
        f'<p class="lead">Held to the first: {esc(first)}.</p></header>'
    )
    figures = "".join(f'<figure id="{esc(name)}">{svg}</figure>' for name, svg in charts.items())
    curves = (
        f'<div class="panels">{figures}</div>'
        if figures
        else f'<p class="muted">{esc(no_charts_reason)}</p>'
    )
    notes = "".join(f'<p class="note">{esc(text)}</p>' for text in method_notes(comparison))
    parts = [
        head,
        render_section("sizes", "Sizes", _card(sizes_table(comparison)) + notes),
        render_section("curves", "Curves", curves),
        _settings(comparison),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    footer = f"Written {written} by <code>shardyard compare</code>, from table.json and the runs."
    return render_page(f"{first} and other studies, compared", "\n".join(parts), footer=footer)


def _settings(comparison: StudyComparison) -> str:
    heads, rows = settings_table(comparison)
    if not comparison.settings_of:
        body = '<p class="muted">No runs are there to read settings from.</p>'
    elif not rows:
        body = '<p class="muted">No setting differs.</p>'
    else:
        body = _card((heads, rows))
    text = f"Of the runs on {comparison.base} accelerators, every default resolved."
    note = f'<p class="note">{text}</p>'
    return render_section("settings", "What differs", body + note)


def _card(table: Table) -> str:
    heads, rows = table
    cells = [[esc(cell) for cell in row] for row in rows]
    return f'<div class="card">{render_table(heads, cells)}</div>'

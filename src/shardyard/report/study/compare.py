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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from shardyard.errors import JsonFileError, RequestError
from shardyard.io.files import read_json_object
from shardyard.report.compare.differences import Difference, settings_that_differ
from shardyard.report.compare.statistics import (
    SMALLEST_EFFECT,
    Pace,
    SpeedComparison,
    compare_speed,
    pace_of,
)
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.study.page import JSON, PAGE
from shardyard.report.study.table import VERSION
from shardyard.report.summary import summarize
from shardyard.rundir.layout import RunDir

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

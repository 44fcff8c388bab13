"""Comparisons and scaling studies for Python: values with tables and charts for notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.load import Source
from shardyard.control.api import Job, Result, Run
from shardyard.control.study import StudyOptions
from shardyard.control.study_phases import studies_of
from shardyard.report.compare.comparison import RunComparison
from shardyard.report.compare.comparison import compare as compare_records
from shardyard.report.compare.page import write_comparison
from shardyard.report.notebook import MetricsTable, NotebookCurve, cell, chart_html, table_html
from shardyard.report.run_data import read_run
from shardyard.report.study.rows import Hold, ScalingSeries
from shardyard.report.study.table import columns_of
from shardyard.report.study.values import values_of
from shardyard.rundir.layout import RunDir, find_run

AnyRun = Job | Run | Result | str | Path
_NUMBERS = ("state", "steps", "loss", "eval_loss", "tokens_per_s", "usd")
_MOST_FIRST = 2
"""Settings in front of the results, or in place of a run's id."""


@dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """Runs side by side: their results, and the settings that differ."""

    details: RunComparison
    """Speeds, targets and environments, as `shardyard compare` prints them."""

    def rows(self) -> MetricsTable:
        """Return a dict for each run: id, its results, and the settings that differ."""
        rows = MetricsTable()
        for number, run in enumerate(self.details.runs):
            results = _results(run.to_json())
            rows.append({"run": run.id, **{name: results[name] for name in _NUMBERS}})
            rows[-1].update({each.name: each.values[number] for each in self.details.settings})
        return rows

    @property
    def best(self) -> str:
        """Id of the run with the least validation loss; of training loss, if one has no other."""
        rows = self.rows()
        is_evaluated = all(row["eval_loss"] is not None for row in rows)
        key = "eval_loss" if is_evaluated else "loss"
        known = [row for row in rows if row[key] is not None] or rows
        return str(min(known, key=lambda row: row[key] or 0.0)["run"])

    def __repr__(self) -> str:
        return f"<ComparedRuns of {', '.join(run.id for run in self.details.runs)}>"

    def _repr_html_(self) -> str:
        charts = ""
        for title, metric in (("Training loss", "loss"), ("Validation loss", "eval_loss")):
            curves = [
                NotebookCurve(self._name(number), *_points(run.curves, metric))
                for number, run in enumerate(self.details.runs)
            ]
            charts += chart_html(curves, title=title, x_title="step")
        rows = self.rows()
        first = [each.name for each in self.details.settings][:_MOST_FIRST]
        found = dict.fromkeys(["run", *first, *rows[0]])
        names = [name for name in found if any(row[name] is not None for row in rows)]
        table = table_html(names, [[cell(row[name]) for name in names] for row in rows])
        return table + charts

    def _name(self, number: int) -> str:
        """Return a short name of a run: its differing settings, where these are few."""
        settings = self.details.settings
        if 0 < len(settings) <= _MOST_FIRST:
            return ", ".join(f"{each.name}={each.values[number]}" for each in settings)
        return self.details.runs[number].id


def _results(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "eval_loss": content["eval"]["loss"]}


def _points(curves: Any, metric: str) -> tuple[list[float], list[float]]:
    curve = curves.of_evaluations("loss") if metric == "eval_loss" else curves.of_steps(metric)
    points = [point for segment in curve.segments("steps") for point in segment]
    return [x for x, _ in points], [y for _, y in points]


def compare(
    *sides: AnyRun | Sequence[AnyRun],
    target: Mapping[str, float] | None = None,
    page: str | Path | None = None,
    runs_dir: str | Path = "runs",
) -> ComparedRuns:
    """Compare runs, as `shardyard compare` does.

    Args:
        sides: Jobs, runs, results, or paths or ids of runs; a list for repeats of one
            configuration. The first is the baseline.
        target: Metric -> value to reach; default: each run's ``run.target``.
        page: Page to write.
        runs_dir: Folder of runs that are named by id.

    Raises:
        RequestError: A run does not exist, has not begun, or is named twice.
    """
    found = []
    for side in sides:
        if isinstance(side, Job | Run | Result | str | Path):
            side = [side]
        found.append([_run_dir(each, Path(runs_dir)) for each in side])
    wanted = dict(target or {})
    if page is not None:
        return ComparedRuns(details=write_comparison(found, Path(page), target=wanted))
    records = [[read_run(run) for run in side] for side in found]
    return ComparedRuns(details=compare_records(records, target=wanted))


def _run_dir(run: Any, runs_dir: Path) -> RunDir:
    if isinstance(run, Job | Run):
        return run.run_dir
    if isinstance(run, Result):
        return RunDir(run.run_dir)
    return find_run(str(run), runs_dir)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One recipe on several numbers of nodes."""

    series: tuple[ScalingSeries, ...]
    """One; of a recipe with phases, one for each."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each size: numbers by name, None where one is not known."""
        return [row for each in self.series for row in values_of(each)]

    def __repr__(self) -> str:
        sizes = ", ".join(str(row["nodes"]) for row in values_of(self.series[0]))
        return f"<Scaling of {self.series[0].name} on {sizes} nodes>"

    def _repr_html_(self) -> str:
        parts = []
        for series in self.series:
            rows = values_of(series)
            columns = columns_of(rows)
            cells = [[text(row) for _, _, text in columns] for row in rows]
            heads = [head for head, _, _ in columns]
            parts.append(table_html(heads, cells, note=f"{series.name}: predicted."))
        return "".join(parts)


def study(
    recipe: Source, *overrides: Source, nodes: Sequence[int], hold: Hold | None = None
) -> Scaling:
    """Predict how a recipe scales, as `shardyard study --predict` does; run and write nothing.

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``.
        overrides: ``section.key=value``, or more of the recipe; later ones win.
        nodes: Numbers of nodes; of this machine, of devices or CPU processes.
        hold: ``batch-per-device`` or ``global-batch``: weak or strong scaling. Default: the one
            that the recipe sets.

    Raises:
        RequestError: The recipe is wrong, or no size can be planned.
    """
    options = StudyOptions(sizes=tuple(nodes), hold=hold)
    return Scaling(series=tuple(studies_of((recipe, *overrides), options, None).predicted(None)))

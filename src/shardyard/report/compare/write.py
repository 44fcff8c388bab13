"""From run folders to a comparison, and to its page."""

from collections.abc import Sequence
from pathlib import Path

from shardyard.errors import RequestError
from shardyard.io.files import write_text
from shardyard.log import warn
from shardyard.report.compare.comparison import Comparison, compare
from shardyard.report.compare.page import Pictures, render_comparison
from shardyard.report.compare.targets import Target
from shardyard.report.pictures import no_pictures
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir


def write_comparison(
    sides: Sequence[Sequence[RunDir]], page: Path, *, target: Target
) -> Comparison:
    """Compare runs and write the page; without pictures where none can be drawn.

    Args:
        sides: The runs of each side, the baseline first.
        target: Metric -> value; empty: what the runs' own run.target asks for.

    Raises:
        RequestError: There is nothing to compare, a run is named twice or has not begun, or none
            is evaluated by a metric of the target.
        StorageError: The page cannot be written.
    """
    _refuse(sides)
    records = [[read_run(run) for run in side] for side in sides]
    comparison = compare(records, target=target)
    why_none = no_pictures()
    drawn = {} if why_none else _pictures(comparison)
    write_text(page, render_comparison(comparison, drawn, no_pictures=why_none))
    if why_none:
        warn(why_none)
    return comparison


def _refuse(sides: Sequence[Sequence[RunDir]]) -> None:
    if len(sides) < 2:
        raise RequestError(
            "one side alone cannot be compared. Name another run after a space; "
            "`shardyard report RUN` shows a single one."
        )
    named: set[Path] = set()
    for run in (run for side in sides for run in side):
        if run.path in named:
            raise RequestError(
                f"RUN {run.run_id} is named twice, and it would differ from itself in nothing. "
                "Name each run once."
            )
        named.add(run.path)


def _pictures(comparison: Comparison) -> Pictures:
    from shardyard.report.compare.pictures import pictures  # matplotlib: half a second

    return pictures(comparison)

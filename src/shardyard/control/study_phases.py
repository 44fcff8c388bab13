"""The studies of a recipe: one, or of a run with phases one for each phase.

Phases differ in their step (samples, batch), so each has a table of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardyard.config.load import Source
from shardyard.config.phases import of_phases
from shardyard.control.request import Request
from shardyard.control.study import Study, StudyOptions, add_forecasts, planned_rows, study_of
from shardyard.launchers.base import Launcher
from shardyard.report.study.rows import ScalingSeries

_NAME_CHARACTERS = 19
"""Characters of the run's name in the name of a phase, which ends in ``-phase-1``."""


@dataclass(frozen=True, kw_only=True)
class Studies:
    """The study of each phase, in order; of a run without phases, its only one."""

    id: str
    folder: Path
    """Folder of what is predicted of all of them. A study that runs has a folder of its own."""
    each: tuple[Study, ...]

    def predicted(self, published: ScalingSeries | None) -> list[ScalingSeries]:
        """The plan of every size, a series for each study.

        Args:
            published: A table to show next to each plan.

        Raises:
            RequestError: No size of a study can be planned, or one is not in the table.
        """
        found = []
        for number, study in enumerate(self.each, 1):
            rows = planned_rows(study)
            if published is None:
                found.append(study.series(rows))
                continue
            series = add_forecasts(published, rows)
            is_only = len(self.each) == 1
            name = series.name if is_only else f"{series.name}, phase {number}"
            found.append(replace(series, name=name))
        return found


def studies_of(
    words: Sequence[Source], options: StudyOptions, launcher: Launcher | None
) -> Studies:
    """Settle what is held over all sizes, phase by phase, without creating anything.

    Args:
        launcher: Launcher that runs them; None: they are only planned.

    Raises:
        RequestError: The recipe is wrong, or cannot be studied as it is.
    """
    request = Request.read(
        words, to_train=launcher is not None, needs_weights=False, only_looks=True,
        sees=None if launcher is None else launcher.node_paths,
    )  # fmt: skip
    if not request.recipe.phases:
        study = study_of(words, options, launcher)
        return Studies(id=study.id, folder=study.folder, each=(study,))
    run_name, run_id = str(request.preview().recipe.run.name), request.recipe.run.id
    start = run_name[:_NAME_CHARACTERS].strip("-")
    each = []
    for number, phase in enumerate(of_phases(request.as_written), 1):
        names = [f"run.name={start}-phase-{number}"]
        names += [] if run_id is None else [f"run.id={run_id}-phase-{number}"]
        each.append(study_of((phase, *names), options, launcher))
    keys = hashlib.sha256("".join(study.key for study in each).encode()).hexdigest()[:8]
    whole = run_id or f"{start}-study-{keys}"
    return Studies(id=whole, folder=each[0].folder.parent / whole, each=tuple(each))

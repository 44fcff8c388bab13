"""Run the sizes of a study, one after the other; a repeated call continues it.

What has been done is read only from the folders of the runs, so that a kill at any moment
loses no work. A size that is finished is read, one that runs is followed, and only what is
missing or failed is submitted.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from shardyard.control.hub_access import access_errors
from shardyard.control.job import LaunchedJob, launched_of, wait_until
from shardyard.control.launch import proposal_of, submitted
from shardyard.control.plan import predict
from shardyard.control.study import (
    Study,
    check_same_study,
    failed_row,
    planned_row,
)
from shardyard.control.submission import Launchers, Proposal, refusals
from shardyard.control_groups import usable_cores
from shardyard.errors import JsonFileError, RequestError, ShardyardError
from shardyard.io.files import (
    FILE_MODE,
    close_locked,
    make_folder,
    read_json_object,
    take_lock,
    write_json,
)
from shardyard.launchers.base import JobState, Launcher
from shardyard.launchers.ledger import Ledger
from shardyard.log import info
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.study.forecast import row_of
from shardyard.report.study.measured import measured_row
from shardyard.report.study.page import write_study
from shardyard.report.study.rows import SeriesRow
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_spending
from shardyard.units import format_usd

KILLED_UNCOUNTED_S = 60.0
"""Seconds of a killed node that may go uncounted: up to the last minute."""


@dataclass(kw_only=True)
class Size:
    """Size of a study, and its status."""

    nodes: int
    planned: SeriesRow
    proposal: Proposal | None = None
    """Proposal that would be submitted; None: no submission is needed."""
    job: LaunchedJob | None = None
    """Job that runs already."""
    row: SeriesRow | None = None
    """Result of the size; None: it is still to be done."""
    run_dirs: list[RunDir] = field(default_factory=list)

    @property
    def words(self) -> str:
        """``1 node``, ``4 nodes``."""
        return f"{self.nodes} node{'' if self.nodes == 1 else 's'}"

    @property
    def usd(self) -> float | None:
        """Predicted price of what is to be submitted; None: not known."""
        return None if self.proposal is None else self.proposal.most_usd


@dataclass(kw_only=True)
class Runs:
    """All sizes of a study on a launcher."""

    study: Study
    launcher: Launcher
    sizes: list[Size]
    max_usd: float | None = None

    @property
    def open(self) -> list[Size]:
        """Sizes that are to be submitted."""
        return [size for size in self.sizes if size.row is None and size.job is None]

    @property
    def open_usd(self) -> float | None:
        """Predicted price of these; None: one is not known."""
        prices = [size.usd for size in self.open]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def rows(self) -> list[SeriesRow]:
        """Rows known so far; a size that is still to be done has not run."""
        return [
            size.row or replace(size.planned, origin="not run", note="it is still to be done.")
            for size in self.sizes
        ]

    @property
    def failed(self) -> list[SeriesRow]:
        """Sizes that failed."""
        return [row for row in self.rows if row.origin == "failed"]

    def spent_usd(self) -> float:
        """Return the cost of all runs of this study so far, including failed ones."""
        found = [read_spending(run_dir) for run_dir in runs_of(self.study)]
        return sum(spending.usd for spending in found if spending is not None)

    def notes(self) -> list[str]:
        """Return the notes of the study itself."""
        done = sum(size.row is not None for size in self.sizes)
        said = [f"{done} of {len(self.sizes)} sizes are done, on {self.launcher.name}."]
        said += [*self.equal_threads(), *self.sharing_cores()]
        spent = self.spent_usd()
        return [*said, f"Its runs have cost {format_usd(spent)}."] if spent else said

    def equal_threads(self) -> list[str]:
        """Note how many threads each process has at every size; empty: no CPU processes here."""
        threads = self.study.threads
        if threads is None:
            return []
        return [f"Every process of every size has {threads} thread{'s' * (threads > 1)}."]

    def sharing_cores(self) -> list[str]:
        """Note sizes with more CPU processes than this machine has cores; empty: none."""
        if not (self.study.is_local and self.study.is_cpu):
            return []
        cores = usable_cores()
        above = [size.nodes for size in self.sizes if size.nodes > cores]
        if not above:
            return []
        named = ", ".join(map(str, above))
        return [
            f"This machine has {cores} core{'' if cores == 1 else 's'}: the processes of size "
            f"{named} share them, so that its efficiency says how they share and not how the "
            "recipe scales. Leave it out of --nodes, or run on more machines with --on."
        ]

    def write(self) -> None:
        """Write the folder in its current state."""
        write_study(self.study.folder, self.study.id, [self.study.series(self.rows)], self.notes())


def runs_of(study: Study) -> list[RunDir]:
    """Folders of all runs of a study that were begun, of any size."""
    parent = study.folder.parent
    if not parent.is_dir():
        return []
    named = re.compile(rf"{re.escape(study.id)}-n\d+(-try\d+)?")
    found = [RunDir(path) for path in sorted(parent.iterdir()) if named.fullmatch(path.name)]
    return [run_dir for run_dir in found if run_dir.exists]


def plan_runs(
    study: Study, launcher: Launcher, launchers: Launchers | None, *, max_usd: float | None,
    is_dry_run: bool = False,
) -> Runs:  # fmt: skip
    """Return the status of each size and what would be submitted, without creating anything.

    Raises:
        RequestError: No size can be submitted, or the price is above the limit.
    """
    _read_before(study)
    sizes = [
        _size(study, nodes, launcher, launchers, is_dry_run=is_dry_run) for nodes in study.sizes
    ]
    runs = Runs(study=study, launcher=launcher, sizes=sizes, max_usd=max_usd)
    if all(size.row is not None and size.row.origin == "failed" for size in sizes):
        notes = "\n".join(f"{size.nodes}: {size.row.note}" for size in sizes if size.row)
        raise RequestError(f"no size of this study can be run:\n{notes}")
    _check_price(runs)
    return runs


def _read_before(study: Study) -> None:
    file = study.folder / "study.json"
    try:
        before = read_json_object(file)
    except FileNotFoundError:
        return
    except JsonFileError as error:
        raise RequestError(
            f"{error} The file describes the study of the runs next to it. Restore it, or choose "
            "another run.id."
        ) from error
    check_same_study(study, before)


def _size(
    study: Study, nodes: int, launcher: Launcher, launchers: Launchers | None, *, is_dry_run: bool
) -> Size:
    size = Size(nodes=nodes, planned=failed_row(study, nodes, ""))
    size.run_dirs = _run_dirs_of(study, nodes)
    try:
        proposal = _proposal(study, nodes, len(size.run_dirs) + 1, launcher, is_dry_run=is_dry_run)
    except RequestError as error:
        size.row = failed_row(study, nodes, str(error))
        return size
    size.planned = _planned(study, nodes, proposal)
    if size.run_dirs:
        row = _finished(size.run_dirs[-1], size.planned)
        size.row = row if row is not None and row.origin == "measured" else None
        size.job = _live(size.run_dirs[-1], launchers) if size.row is None else None
    if size.row is None and size.job is None:
        size.proposal = proposal
        against = refusals(proposal)
        if not is_dry_run:
            against += access_errors(proposal.request.recipe, launcher)
        if against:
            size.row = replace(size.planned, origin="failed", note=" ".join(against))
    return size


def _run_dirs_of(study: Study, nodes: int) -> list[RunDir]:
    run_dirs: list[RunDir] = []
    while True:
        run_dir = RunDir(study.folder.parent / study.run_id(nodes, len(run_dirs) + 1))
        if not run_dir.exists:
            return run_dirs
        run_dirs.append(run_dir)


def _proposal(
    study: Study, nodes: int, number: int, launcher: Launcher, *,
    limit_usd: float | None = None, is_dry_run: bool = False,
) -> Proposal:  # fmt: skip
    limit = () if limit_usd is None else (f"launch.max_usd={limit_usd!r}",)
    words = (
        *study.measured_words(nodes), f"run.id={study.run_id(nodes, number)}",
        f"run.dir={study.folder.parent}", *limit,
    )  # fmt: skip
    return proposal_of(words, launcher, is_dry_run=is_dry_run)


def _planned(study: Study, nodes: int, proposal: Proposal) -> SeriesRow:
    """Return the plan of a size, with a speed only where its machines are named."""
    if study.names_machines and proposal.plan is not None:
        with suppress(RequestError):  # the model may be where only nodes see it
            return planned_row(predict(study.measured_words(nodes), layouts=0))
    if proposal.plan is None:
        devices = proposal.request.nodes * proposal.request.devices_per_node
        return SeriesRow(
            nodes=nodes, accelerators=devices, origin="predicted", note=proposal.no_plan_reason
        )
    return replace(row_of(proposal.plan, None, None), nodes=proposal.request.nodes)


def _finished(run_dir: RunDir, planned: SeriesRow) -> SeriesRow | None:
    """The row of a run that reached its end; None: it has not."""
    record = _record(run_dir)
    if record is None or record.state != "finished":
        return None
    return measured_row(record, planned)


def _record(run_dir: RunDir) -> RunRecord | None:
    try:
        return read_run(run_dir)
    except RequestError:  # no attempt yet
        return None


def _live(run_dir: RunDir, launchers: Launchers | None) -> LaunchedJob | None:
    """The job of a run that is not over; None: there is none, and another try may begin."""
    if not Ledger(run_dir.ledger).jobs() and not Ledger(run_dir.ledger).live():
        return None
    job = launched_of(run_dir, launchers)
    return None if job.state().is_over else job


def _check_price(runs: Runs) -> None:
    limit = runs.max_usd
    if limit is None:
        return
    unknown = [str(size.nodes) for size in runs.open if size.usd is None]
    if unknown:
        raise RequestError(
            f"--max-usd {limit:g}, but the price of {', '.join(unknown)} nodes is not known, so "
            "the limit cannot be checked. Name the machines with cluster.instance, say what they "
            "cost with cluster.usd_per_node_hour, or leave the limit out."
        )
    spent, predicted = runs.spent_usd(), runs.open_usd or 0.0
    if spent + predicted > limit:
        before = f"{format_usd(spent)} are spent and " if spent else ""
        raise RequestError(
            f"--max-usd {limit:g}: {before}the sizes that are left are predicted to cost "
            f"{format_usd(predicted)}. No job was submitted. Ask for fewer sizes or steps, or "
            "raise the limit."
        )


# --- running ------------------------------------------------------------------------------------


def run_sizes(
    runs: Runs,
    *,
    print_line: Callable[[str], None] = info,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Do what is left, the smallest size first; write the folder again after each.

    Raises:
        RequestError: Another command works on this study.
        KeyboardInterrupt: This command was interrupted; the run that is followed continues.
    """
    with _study_lock(runs.study):
        write_json(runs.study.folder / "study.json", runs.study.to_json())
        runs.write()
        for size in runs.sizes:
            if size.row is not None:
                continue
            try:
                _run_size(runs, size, print_line=print_line, sleep=sleep)
            except KeyboardInterrupt:
                print_line(
                    "following ended; the run continues. The same command continues the study, "
                    "and skips sizes that are done"
                )
                raise
            except ShardyardError as error:
                size.row = replace(size.planned, origin="failed", forecast=None, note=str(error))
            print_line(_result_line(size))
            runs.write()


def _run_size(
    runs: Runs, size: Size, *, print_line: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    if size.job is None:
        proposal = _within_limit(runs, size)
        if proposal is None:
            return
        size.job = submitted(proposal)
        size.run_dirs.append(size.job.run_dir)
    job = size.job
    print_line(f"{size.words}: job {job.id} ({job.name}) on {job.on}, run {job.run_id}")
    status = wait_until(job, lambda now: now.state.is_over, sleep=sleep)
    job.fetch()
    size.row = _finished(job.run_dir, size.planned)
    if size.row is None:
        word = (
            "was drained before its end" if status.state == JobState.DRAINED else "did not end well"
        )
        size.row = replace(
            size.planned,
            origin="failed",
            run_id=job.run_id,
            note=f"its job {word} ({status.state.value}: {status.reason}). `shardyard logs "
            f"{job.run_dir.handle}` shows what it said; the same command tries it again.",
        )


def _within_limit(runs: Runs, size: Size) -> Proposal | None:
    """Return what is submitted now, within the remaining budget.

    None: the budget is too small, and the size says so.
    """
    assert size.proposal is not None
    study, launcher = runs.study, runs.launcher
    if runs.max_usd is None:
        if launcher.capabilities.is_this_machine:
            return size.proposal
        # proposed anew: what is left of a capacity block is less by now
        return _proposal(study, size.nodes, len(size.run_dirs) + 1, launcher)
    plan, predicted = size.proposal.plan, size.usd or 0.0
    rate = None if plan is None else plan.price.usd_per_hour
    if rate is None:
        return size.proposal  # of this machine: it costs nothing
    # a drain costs too, and so does the minute that nobody counts
    drain_s = size.proposal.request.recipe.elastic.drain_timeout_s + KILLED_UNCOUNTED_S
    left = runs.max_usd - runs.spent_usd() - drain_s / 3600 * rate
    if predicted > left:
        size.row = replace(
            size.planned,
            origin="not run",
            note=f"{format_usd(max(0.0, left))} are left of --max-usd {runs.max_usd:g}, without "
            f"what a drain costs, and it is predicted to cost {format_usd(predicted)}.",
        )
        return None
    return _proposal(study, size.nodes, len(size.run_dirs) + 1, launcher, limit_usd=left)


def _result_line(size: Size) -> str:
    row = size.row
    assert row is not None
    if row.rate is None:
        return f"{size.words}: {row.origin}: {row.note}"
    rate = row.rate
    text = f"{rate.samples_per_s:,.4g} samples/s" if rate.samples_per_s else "done"
    return f"{size.words}: {text}"


@contextmanager
def _study_lock(study: Study) -> Iterator[None]:
    """Hold the study: a second command would submit the same sizes."""
    make_folder(study.folder)
    path = study.folder / "study.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if not take_lock(descriptor):
            raise RequestError(
                f"another command works on study {study.id} already. Two would run its sizes at "
                "the same time and measure each other. Wait for it, or end it with Ctrl-C."
            )
        yield
    finally:
        close_locked(descriptor)


def describe(runs: Runs) -> list[str]:
    """Describe what would be done, and its total price, before the user confirms."""
    lines = []
    for size in runs.sizes:
        if size.row is not None and size.row.origin == "failed":
            lines.append(f"{size.words}: cannot be run: {size.row.note}")
        elif size.row is not None:
            lines.append(f"{size.words}: {size.row.origin} already")
        elif size.job is not None:
            lines.append(f"{size.words}: runs already as job {size.job.id}; it is followed")
        else:
            lines.append(f"{size.words}: {_plan_line(size)}")
    lines += [*runs.equal_threads(), *runs.sharing_cores()]
    if not runs.open:
        return lines
    total = runs.open_usd
    price = "not known" if total is None else f"about {format_usd(total)}"
    if runs.launcher.capabilities.is_this_machine and not total:
        return lines
    limit = "" if runs.max_usd is None else f"; never above {format_usd(runs.max_usd)} in sum"
    return [*lines, f"price of {len(runs.open)} sizes: {price}{limit}"]


def _plan_line(size: Size) -> str:
    proposal = size.proposal
    if proposal is None or proposal.plan is None:
        why = "" if proposal is None else proposal.no_plan_reason
        return f"no prediction: {why}"
    price = "" if not size.usd else f", about {format_usd(size.usd)}"
    return f"{proposal.plan.line().removeprefix('plan: ')}{price}"


def proposals(runs: Runs) -> Sequence[Proposal]:
    """All that would be submitted."""
    return [size.proposal for size in runs.open if size.proposal is not None]

"""The public API for launched runs: submit recipes, control their jobs, read results, list runs.

It is built on the modules of the verbs: ``control/job.py`` has the data of a job.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from shardyard.config.load import Source
from shardyard.config.resolved import RollbackTarget
from shardyard.control.aux_jobs import SideTerms
from shardyard.control.export import export_run
from shardyard.control.job import LaunchedJob, job_of, reject_bench, wait_until
from shardyard.control.launch import check_proposal, proposal_of, resume_proposal, submitted
from shardyard.control.run_location import locate_run
from shardyard.control.runs import ListedRun, list_runs
from shardyard.control.scale import scale
from shardyard.control.submission import Launchers, Proposal, describe, launcher_named
from shardyard.control.suggestions import levers_of_run
from shardyard.errors import RequestError, ShardyardError, StorageError
from shardyard.launchers.base import JobState, JobStatus
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.log_markers import parse
from shardyard.log import info, warn
from shardyard.report.notebook import (
    MetricsTable,
    NotebookCurve,
    cell,
    chart_html,
    details_html,
    table_html,
)
from shardyard.report.page import tiles, write_report
from shardyard.report.summary import Summary
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import read_state, resume_words


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run that came to its end."""

    run_dir: Path
    checkpoint: Path | None
    """The newest durable one. None: none was saved, or it is where only the nodes see it:
    `shardyard fetch` brings it."""
    evaluation: dict[str, Any] | None
    """Metrics of the last evaluation, by name; None: there was no validation split."""
    report: Path
    """A page that opens from disk."""
    summary: Summary
    """The report's numbers."""

    def __repr__(self) -> str:
        return f"<Result of {self.summary.sentence()}>"

    def _repr_html_(self) -> str:
        chart = _loss_chart(RunDir(self.run_dir))
        facts = details_html(f"Result of {self.summary.run_id}", tiles(self.summary))
        return f"{facts}{chart}"


@dataclass(frozen=True, kw_only=True)
class Job(LaunchedJob):
    """Newest job of a run, a training or a side job, and its launcher."""

    def __repr__(self) -> str:
        return f"<Job {self.id} of run {self.run_id} on {self.on}>"

    def _repr_html_(self) -> str:
        facts = [("job", self.id, f"on {self.on}"), ("state", read_state(self.run_dir).state, "")]
        return details_html(f"Job of run {self.run_id}", facts) + _loss_chart(self.run_dir)

    def wait(self, timeout_s: float = math.inf) -> JobStatus:
        """Wait until the job is over, or so many seconds.

        Returns:
            The last status, which is not over where the time was.
        """
        return wait_until(self, lambda now: now.state.is_over, give_up_after_s=timeout_s)

    def logs(self, *, node: int | None = 0, follow: bool = False) -> Iterator[str]:
        """Lines of output for people.

        Args:
            node: None: of all nodes merged, each line with its source.
            follow: Until the job is over.
        """
        for line in self.launcher.logs(self.submission, node=node, follow=follow):
            if parse(line.text, nonce=self.nonce) is None:
                yield line.text if node is not None else f"{line.source} | {line.text}"

    def metrics(self) -> MetricsTable:
        """A line for each step done so far, as metrics.jsonl has it; lost steps are left out."""
        self.fetch()
        return MetricsTable(read_steps(self.run_dir.metrics))

    def evaluations(self) -> list[dict[str, Any]]:
        """A line for each evaluation so far: step, epoch, and ``eval`` with its metrics."""
        self.fetch()
        return read_evaluations(self.run_dir.metrics)

    def cancel(self) -> None:
        """Ask the job to make its last step durable and end; safe to repeat."""
        self.launcher.cancel(self.submission)

    def scale(self, nodes: int) -> "Job":
        """Continue the run with another number of nodes; return the job that continues it.

        Raises:
            RequestError: The job is over, or cannot have so many.
        """
        scaled = scale(self, nodes)
        assert scaled is not None  # it is None only where ``agree`` says no
        return _public(scaled.job)

    def resume(
        self,
        *overrides: str,
        on: str | None = None,
        step: int | None = None,
        skip_steps: int = 0,
    ) -> "Job":
        """Continue the run by another job, from its newest durable checkpoint or an earlier one.

        Args:
            overrides: ``section.key=value``: how it runs and how long, not what is learnt; with
                ``step`` also ``optim.lr`` and ``optim.grad_clip``.
            on: Another launcher.
            step: Go back to the checkpoint of this step; later ones are replaced.
            skip_steps: With ``step``: pass over the data of so many steps after it.

        Raises:
            RequestError: The job is not over, there is no checkpoint of the step, or this cannot be
                changed.
        """
        if skip_steps and step is None:
            raise RequestError(
                f"skip_steps={skip_steps} needs the step to go back to: "
                f"job.resume(step=100, skip_steps={skip_steps})."
            )
        if (step is not None and step < 1) or skip_steps < 0:
            raise RequestError(
                f"step={step}, skip_steps={skip_steps}: steps are counted from 1, and none can be "
                "passed over backwards. Give job.resume(step=100, skip_steps=40)."
            )
        back_to = (
            None
            if step is None
            else RollbackTarget(step=step, skip_steps=skip_steps, is_requested=True)
        )
        ours = {self.on: self.launcher} if on is None else None
        proposal = resume_proposal(self.run_dir, overrides, on=on, launchers=ours, back_to=back_to)
        check_proposal(proposal)
        return _public(submitted(proposal))

    def result(self) -> Result:
        """Wait for the end of the job; what came of it.

        Raises:
            ShardyardError: It failed, was cancelled, or is not known any more.
        """
        reject_bench(self.run_dir)
        status = self.wait()
        if status.state is not JobState.SUCCEEDED:
            raise ShardyardError(
                f"job {self.id} of run {self.run_id} has no result: it is {status.state.value} "
                f"({status.reason}). `shardyard logs {self.run_dir.handle}` shows its output. "
                f"{resume_words(self.run_dir)}."
            )
        evaluations = self.evaluations()
        summary = write_report(self.run_dir, suggest=levers_of_run)
        return Result(
            run_dir=self.run_dir.path,
            checkpoint=self.run_dir.latest_checkpoint(),
            evaluation=evaluations[-1]["eval"] if evaluations else None,
            report=self.run_dir.report_html,
            summary=summary,
        )


def _public(launched: LaunchedJob) -> Job:
    return Job(
        run_dir=launched.run_dir,
        submission=launched.submission,
        launcher=launched.launcher,
        ledger=launched.ledger,
    )


@overload
def launch(
    recipe: Source,
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> Job: ...


@overload
def launch(
    recipe: list[Any],
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> list[Job]: ...


def launch(
    recipe: Source | list[Any],
    *overrides: Source,
    on: str = "local",
    max_usd: float | None = None,
    force: bool = False,
    launchers: Launchers | None = None,
) -> Job | list[Job]:
    """Submit a recipe to a launcher, as `shardyard launch` does, without confirmation.

    Plan and price are logged (`shardyard`, level INFO).

    Args:
        recipe: The path of a YAML file, a dict of sections, or a ``Recipe``. Or a list of these,
            or of tuples of one with its overrides: a job for each. All of them are checked before
            the first is submitted.
        overrides: ``section.key=value``, or more of the recipe; later ones win.
        on: Name of the launcher.
        max_usd: The most each may cost, as ``launch.max_usd``.
        force: Submit even if the plan or the price speaks against it.
        launchers: Name -> launcher, in place of all that there are.

    Raises:
        RequestError: A recipe is wrong, or the plan or the price speaks against it.
        ShardyardError: The launcher's own.
    """
    limit = () if max_usd is None else (f"launch.max_usd={max_usd!r}",)
    launcher = launcher_named(on, launchers)
    many = recipe if isinstance(recipe, list) else [recipe]
    proposals = []
    for each in many:
        words = each if isinstance(each, tuple) else (each,)
        proposals.append(proposal_of((*words, *overrides, *limit), launcher))
        info("\n".join(describe(proposals[-1])))
        if not force:
            check_proposal(proposals[-1])
    jobs = _submit_all(proposals)
    return jobs if isinstance(recipe, list) else jobs[0]


def _submit_all(proposals: Sequence[Proposal]) -> list[Job]:
    jobs: list[Job] = []
    for proposal in proposals:
        try:
            jobs.append(_public(submitted(proposal)))
        except ShardyardError:
            if jobs:
                warn(f"submitted before this: {', '.join(job.run_id for job in jobs)}")
            raise
    return jobs


@dataclass(frozen=True, kw_only=True)
class Run(ListedRun):
    """One run of a folder."""

    launchers: Launchers | None = None

    def __repr__(self) -> str:
        step = "" if self.state.step is None else f", step {self.state.step:,}"
        return f"<Run {self.id}: {self.state.state}{step}>"

    def _repr_html_(self) -> str:
        return RunList([self])._repr_html_() + _loss_chart(self.run_dir)

    @property
    def id(self) -> str:
        """Its id, which every verb of the command line takes."""
        return self.run_dir.run_id

    def metrics(self) -> MetricsTable:
        """A line for each step done so far; lost steps are left out."""
        return MetricsTable(read_steps(self.run_dir.metrics))

    def evaluations(self) -> list[dict[str, Any]]:
        """A line for each evaluation so far: step, epoch, and ``eval`` with its metrics."""
        return read_evaluations(self.run_dir.metrics)

    def report(self) -> Path:
        """Write the report and return its page."""
        write_report(self.run_dir, suggest=levers_of_run)
        return self.run_dir.report_html

    def export(
        self,
        to: str | Path,
        *,
        step: str | int = "latest",
        dtype: str | None = None,
        merged: bool = False,
        is_public: bool = False,
    ) -> dict[str, Any] | None:
        """Write a checkpoint as a Hugging Face folder, as `shardyard export` does, unasked.

        Args:
            to: A folder, a location in S3, or ``hf://owner/name``.
            step: Checkpoint to export: a step, ``latest`` or ``best``.
            dtype: float32, bfloat16 or float16; None: as saved.
            merged: Of a LoRA run: merge the adapters into the weights.
            is_public: Make a new repository of the Hugging Face hub public.

        Returns:
            What was written.

        Raises:
            ShardyardError: The export's own.
        """  # fmt: skip
        wanted = {"step": str(step), "dtype": dtype, "merged": merged}
        terms = SideTerms(agree=lambda _: None)
        home = locate_run(self.run_dir, self.launchers)
        return export_run(home, str(to), wanted, terms, is_public=is_public)

    @property
    def job(self) -> Job | None:
        """Its newest job; None: it was not launched.

        Raises:
            RequestError: Its launcher is not here.
        """
        if self.entry is None:
            return None
        submission = job_of(self.run_dir, self.entry)
        return Job(
            run_dir=self.run_dir,
            submission=submission,
            launcher=launcher_named(submission.launcher, self.launchers),
            ledger=Ledger(self.run_dir.ledger),
        )


class RunList(list[Run]):
    """Runs of a folder."""

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self))}]"

    def _repr_html_(self) -> str:
        heads = ("run", "state", "step", "loss", "tokens/s", "job")
        rows = [
            [run.id, run.state.state, cell(run.state.step), cell(run.state.loss),
             cell(run.state.tokens_per_s), run.job_state or ""]
            for run in reversed(self)
        ]  # fmt: skip
        return table_html(heads, rows)


def _loss_chart(run_dir: RunDir) -> str:
    """Return the chart of the training loss of a run; empty: it has no step yet."""
    try:
        lines = read_steps(run_dir.metrics)
    except (OSError, StorageError):  # a value is shown, and not what is wrong with a file
        return ""
    points = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    curve = NotebookCurve("loss", [float(x) for x, _ in points], [y for _, y in points])
    return chart_html([curve], title="Training loss", x_title="step")


def runs(
    runs_dir: str | Path = "runs", *, launchers: Launchers | None = None, within_s: float = 1.0
) -> RunList:
    """The runs in a folder, the most recently changed last.

    Args:
        runs_dir: ``run.dir`` of their recipes.
        launchers: Name -> launcher, in place of all that there are.
        within_s: How long launchers are asked for the states of jobs.
    """
    return RunList(
        Run(
            run_dir=listed.run_dir,
            state=listed.state,
            entry=listed.entry,
            job_state=listed.job_state,
            launchers=launchers,
        )
        for listed in list_runs(Path(runs_dir), launchers=launchers, within_s=within_s)
    )

"""Continue a run from its newest or an earlier checkpoint: checks, and the next attempt or job.

To go back, newer checkpoints are renamed to ``step-N.replaced``, so that every reader takes the
earlier one for the newest. They are removed once the run has a durable checkpoint as far on.
"""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardyard.config.formulas import first_batch
from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata, Resolved, RollbackTarget
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.launch import Launch
from shardyard.config.schema.recipe import Recipe
from shardyard.control.job import job_of, latest_job_recipe, script_of
from shardyard.control.launch_script import check_script_settings
from shardyard.control.request import Request
from shardyard.control.submission import Launchers, Proposal, launcher_named, propose
from shardyard.errors import RequestError, StorageError
from shardyard.io.files import flush_folder, write_text
from shardyard.launchers.base import Launcher
from shardyard.launchers.ledger import SIDE_DETAIL, Ledger, LedgerEntry
from shardyard.log import info
from shardyard.rundir.attempt_files import latest_resolved
from shardyard.rundir.jsonl import read_lines_backwards, read_steps
from shardyard.rundir.layout import REPLACED, RunDir
from shardyard.rundir.script import check_has_recipe
from shardyard.rundir.state import read_spending, read_state
from shardyard.units import format_usd


def propose_resume(
    run_dir: RunDir,
    overrides: Sequence[str],
    launcher: Launcher,
    *,
    is_dry_run: bool,
    back_to: RollbackTarget | None = None,
) -> Proposal:
    """Return the next job of a run: what its newest one was asked, with overrides.

    Creates no job.

    Args:
        back_to: An earlier step; node 0 looks for its checkpoint where none can be seen here.
    """
    script = script_of(run_dir)
    if script is not None:
        check_script_settings(overrides)
        if back_to is not None:
            raise RequestError(
                f"--step {back_to.step}: run {run_dir.run_id} is a script, which continues from "
                "its newest checkpoint. To go back, remove the later ones: rm -r "
                f"{shlex.quote(str(run_dir.checkpoints))}/step-..."
            )
    _, previous, asked = latest_attempt(run_dir)
    if back_to is not None and run_dir.checkpoints.is_dir():
        check_step_exists(run_dir, back_to)
    if back_to is not None and previous is not None:
        previous = replace(previous, back_to=back_to)
    if Ledger(run_dir.ledger).jobs():
        asked = latest_job_recipe(run_dir)
    recipe = load_checked_recipe([asked], overrides, of_run=True)
    check_same_run(run_dir, asked, recipe)
    check_cost_limit(run_dir, recipe.launch)
    return propose(
        Request.of(
            recipe,
            name=run_dir.run_id,
            needs_weights=False,
            shape_only=True,
            node_paths=launcher.node_paths(recipe),
            previous=previous,
        ),
        launcher,
        run_dir=run_dir,
        previous=previous,
        is_resume=True,
        is_dry_run=is_dry_run,
        back_to=back_to,
        script=script,
    )


def check_has_training(run_dir: RunDir) -> None:
    """Raise if the folder is that of a script's loop without a job, or of a side job."""
    if script_of(run_dir) is not None:
        return
    steps = run_dir.checkpoint_steps()
    where = f" from step {steps[-1]}" if steps else ""
    check_has_recipe(
        run_dir,
        verb="`resume`",
        instead=f"Start the script again as you started it: it continues this run{where}.",
    )
    ledger = Ledger(run_dir.ledger)
    if not ledger.side_jobs() or ledger.jobs() or run_dir.attempts():
        return
    kind = ledger.side_jobs()[-1].details[SIDE_DETAIL].partition("-")[0]
    raise RequestError(
        f"run {run_dir.run_id} has no training to continue: its folder is that of a side job "
        f"({kind}). Repeat `shardyard {kind} ... --on LAUNCHER` to continue it, or start the "
        "training with `shardyard launch`."
    )


def check_same_run(run_dir: RunDir, requested: Path, recipe: Recipe) -> None:
    """Raise if overrides name another run or folder than the one that continues."""
    before, now = load_recipe([requested], of_run=True).run, recipe.run
    is_parent = Path(now.dir).expanduser().resolve() == run_dir.path.parent
    given = {
        f"run.name={now.name}": now.name == before.name,
        f"run.id={now.id}": now.id in (before.id, run_dir.run_id),
        f"run.dir={now.dir}": now.dir == before.dir or is_parent,
    }
    wrong = [setting for setting, is_kept in given.items() if not is_kept]
    if wrong:
        raise RequestError(
            f"{', '.join(wrong)}: run {run_dir.run_id} continues in its own folder, "
            f"{run_dir.path}, and a resume cannot give it another name or place. Leave that out. "
            "To have it elsewhere, move the folder and give its new path for RUN; `shardyard "
            "train` begins another run."
        )


def check_job_over(run_dir: RunDir, entry: LedgerEntry, launchers: Launchers | None) -> None:
    """Raise if the last job is not over: two at once would train one run."""
    job = job_of(run_dir, entry)
    status = launcher_named(job.launcher, launchers).status(job)
    if not status.state.is_over:
        raise RequestError(
            f"job {job.id} of run {run_dir.run_id} is {status.state.value} on {job.launcher}. Two "
            "at once would overwrite each other's checkpoints. Follow it with `shardyard watch "
            f"{run_dir.handle}`, or stop it with `shardyard cancel {run_dir.handle}`."
        )


def latest_attempt(run_dir: RunDir) -> tuple[int, Resolved | None, Path]:
    """Number of the next attempt, what the last one resolved, and what it was asked.

    A torn resolved.json costs no run: what was asked is resolved again, and the checkpoint is
    compared with it before it is loaded.
    """
    made = run_dir.attempts()
    number = made[-1] + 1 if made else 0
    newest = latest_resolved(run_dir)
    for torn in newest.torn:
        info(f"{torn}; what that attempt was asked is resolved again")
    begun = [each for each in made if run_dir.resolved(each).is_file()]
    asked = run_dir.attempt_recipe(begun[-1]) if begun else run_dir.recipe
    return number, newest.resolved, asked if asked.is_file() else run_dir.recipe


def data_as_before(previous: Resolved, overrides: Sequence[str]) -> DatasetMetadata | None:
    """The data set that the run reads already; its text may have changed, or be gone, since."""
    asks_for_other = any(override.startswith("data.") for override in overrides)
    is_there = all(Path(folder).is_dir() for folder in previous.data.fingerprints)
    return previous.data if is_there and not asks_for_other else None


def is_finished(
    run_dir: RunDir, previous: Resolved | None, now: Resolved, *, step: int | None = None
) -> bool:
    """Return whether a run has no work left, unless more is requested.

    Args:
        step: Step of the checkpoint that it continues from; None: the newest.
    """
    done = run_dir.checkpoint_steps()
    if not done:
        return False
    newest = done[-1] if step is None else step
    if now.recipe.checkpoint.to is not None and not _is_uploaded(run_dir, newest):
        return False
    is_complete = _samples_done(run_dir, newest, now) >= sum(
        phase.samples for phase in now.of_phases
    )
    return is_complete or _has_ended_early(run_dir, previous, now, latest_step=newest)


def _is_uploaded(run_dir: RunDir, step: int) -> bool:
    """Whether the checkpoint with which a run ended has reached its bucket."""
    events = read_lines_backwards(run_dir.events, with_any=("checkpoint_uploaded",))
    uploaded = (each for each in events if each.get("kind") == "checkpoint_uploaded")
    return any(each.get("step") == step for each in uploaded)


def _samples_done(run_dir: RunDir, step: int, now: Resolved) -> int:
    """Samples read up to a step, in all phases."""
    if now.recipe.optim.batch_per_device is None and not now.phases:
        return step * first_batch(now.recipe.optim)
    lines = (line for line in read_steps(run_dir.metrics) if line["step"] == step)
    return next((int(line["samples"]) for line in lines), 0)


def _has_ended_early(
    run_dir: RunDir, previous: Resolved | None, now: Resolved, *, latest_step: int
) -> bool:
    """Whether run.target or run.patience ended the run, and the same are asked for again."""
    state = read_state(run_dir)
    if previous is None or state.state != "finished":
        return False
    if state.step is not None and latest_step < state.step:
        return False  # the checkpoint with which it ended was removed, or is gone back from
    asked = [
        (
            each.steps,
            [(phase.recipe.run.target, phase.recipe.run.patience) for phase in each.of_phases],
        )
        for each in (previous, now)
    ]
    return asked[0] == asked[1]


def check_cost_limit(run_dir: RunDir, launch: Launch) -> None:
    """Raise if a run has cost all that it may.

    Raises:
        RequestError: It would be stopped as soon as it had begun.
    """
    spending, limit = read_spending(run_dir), launch.max_usd
    if spending is None or limit is None or spending.usd < limit:
        return
    usd = format_usd(spending.usd)
    raise RequestError(
        f"run {run_dir.run_id} has cost {usd}, and launch.max_usd={limit:g} is the most that it "
        f"may cost, all its jobs together. Raise it above {usd} to continue: `shardyard resume "
        f"{run_dir.handle} launch.max_usd=USD`."
    )


def check_step_exists(run_dir: RunDir, back_to: RollbackTarget) -> None:
    """Raise if there is no whole checkpoint of the step.

    Raises:
        RequestError: There is none.
    """
    steps = run_dir.checkpoint_steps()
    if back_to.step in steps:
        return
    there = ", ".join(map(str, steps)) or "none"
    raise RequestError(
        f"--step {back_to.step}: run {run_dir.run_id} has no such checkpoint. It has those of "
        f"steps {there}. checkpoint.keep_last says how many are kept."
    )


def go_back(run_dir: RunDir, back_to: RollbackTarget) -> list[int]:
    """Put the checkpoints after a step aside; returns their steps. The caller holds the lease.

    Raises:
        StorageError: A checkpoint cannot be renamed.
    """
    newer = [step for step in run_dir.checkpoint_steps() if step > back_to.step]
    try:
        for step in reversed(newer):  # a kill in between leaves the older ones in use
            _put_aside(run_dir.checkpoint(step))
        write_text(run_dir.latest, run_dir.checkpoint(back_to.step).name + "\n")
        flush_folder(run_dir.checkpoints)
    except OSError as error:
        raise StorageError(
            f"{error.filename} cannot be renamed: {error.strerror}. No step was trained. Check "
            "that the folder is yours and can be written."
        ) from error
    return newer


def _put_aside(folder: Path) -> None:
    """In place of one that was put aside before."""
    aside = folder.with_name(folder.name + REPLACED)
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)

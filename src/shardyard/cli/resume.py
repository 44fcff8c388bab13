"""`shardyard resume`: a new attempt of a run, from its newest sound checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shardyard.cli.attempt import Attempt, resolve_here, run_attempt
from shardyard.cli.launch import Terms, submit_proposal
from shardyard.cli.launched import (
    fetch_progress,
    job_of,
    launched_of,
    launchers_in,
    newest_asked,
)
from shardyard.cli.launching import Launchers, Proposal, launcher_named, propose
from shardyard.cli.limits import refuse_spent
from shardyard.cli.options import (
    as_override,
    json_option,
    launch_options,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.request import Request, take_secrets
from shardyard.cli.terminal import say, tell
from shardyard.cli.train import refuse_other_nodes
from shardyard.config.anchor import anchor_paths
from shardyard.config.check import load_checked_recipe
from shardyard.config.compatibility import check_packages, engines_for
from shardyard.config.load import load_recipe
from shardyard.config.resolved import DataFacts, Resolved
from shardyard.config.schema import Recipe
from shardyard.errors import RequestError
from shardyard.launch.base import Launcher
from shardyard.launch.ledger import SIDE_DETAIL, Entry, Ledger
from shardyard.launch.trust import refuse_untrusted
from shardyard.rundir.layout import RunDir, find_run
from shardyard.rundir.lease import Lease
from shardyard.rundir.resolved import newest_resolved
from shardyard.rundir.state import read_state


@click.command()
@run_argument
@click.argument("overrides", nargs=-1)
@runs_dir_option
@click.option("--on", metavar="LAUNCHER", help="Launch it there; default: where it was launched.")
@launch_options
@trust_option
@click.option("--dry-run", is_flag=True, help="Say what would be continued; start nothing.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    run: str,
    overrides: tuple[str, ...],
    *,
    runs_dir: Path,
    on: str | None,
    max_usd: float | None,
    trusts_folder: bool,
    **terms: Any,
) -> int:
    """Continue RUN (a path, an id, or the beginning of one): a launched one by a new job.

    OVERRIDES (section.key=value) may change how it runs - processes, strategy, memory, length -
    but not what is learnt: model, data, order and optimisation.
    """
    run_dir = find_run(run, runs_dir)
    refuse_untrusted(run_dir.ledger, trusts_folder=trusts_folder)  # it submits what stands there
    _refuse_side_alone(run_dir)
    if on is not None or Ledger(run_dir.ledger).jobs():
        return _submit_again(
            run_dir,
            (*overrides, *as_override(max_usd)),
            on=on,
            terms=Terms(**terms),
            launchers=launchers_in(context),
        )
    return _train_on(run_dir, overrides, dry_run=terms["dry_run"], as_json=terms["as_json"])


def _train_on(run_dir: RunDir, overrides: tuple[str, ...], *, dry_run: bool, as_json: bool) -> int:
    """Continue a run here."""
    Lease(run_dir.lease).close()  # refuse at once, not after a minute of preparation
    number, previous, asked = newest_attempt(run_dir)
    recipe = anchor_paths(load_checked_recipe([asked], overrides, of_run=True))
    _refuse_other_run(run_dir, asked, recipe)
    check_packages(engines_for(recipe))
    refuse_other_nodes(recipe)
    take_secrets(recipe)
    machine, resolved = resolve_here(
        Request.of(recipe, name=run_dir.run_id, previous=previous),
        previous=previous,
        data=None if previous is None else _data_as_before(previous, overrides),
    )
    done = run_dir.checkpoint_steps()
    is_over = is_finished(run_dir, previous, resolved)
    if dry_run or is_over:
        words = _words(run_dir, done, resolved.steps, is_finished=is_over)
        tell(_as_json(run_dir, done, resolved.steps, words) if as_json else words)
        return 0
    attempt = Attempt(
        run_dir=run_dir, number=number, asked=recipe, resolved=resolved, machine=machine
    )
    return run_attempt(attempt, as_json=as_json)


def _submit_again(
    run_dir: RunDir,
    overrides: tuple[str, ...],
    *,
    on: str | None,
    terms: Terms,
    launchers: Launchers | None,
) -> int:
    """Continue a run by another job, where its last one was or elsewhere."""
    jobs = Ledger(run_dir.ledger).jobs()
    if jobs:
        _refuse_live(run_dir, jobs[-1], launchers)
        fetch_progress(launched_of(run_dir, launchers))
    launcher = launcher_named(on or jobs[-1].launcher, launchers)
    Lease(run_dir.lease).close()  # no process of this machine trains it either
    proposal = propose_again(run_dir, overrides, launcher, is_dry_run=terms.dry_run)
    return submit_proposal(proposal, terms)


def propose_again(
    run_dir: RunDir, overrides: Sequence[str], launcher: Launcher, *, is_dry_run: bool
) -> Proposal:
    """The next job of a run: what its newest one was asked, with overrides. Creates nothing."""
    _, previous, asked = newest_attempt(run_dir)
    if Ledger(run_dir.ledger).jobs():
        asked = newest_asked(run_dir)
    recipe = load_checked_recipe([asked], overrides, of_run=True)
    _refuse_other_run(run_dir, asked, recipe)
    refuse_spent(run_dir, recipe.launch)
    return propose(
        Request.of(
            recipe,
            name=run_dir.run_id,
            needs_weights=False,
            only_looks=True,
            sight=launcher.sees(recipe),
            previous=previous,
        ),
        launcher,
        run_dir=run_dir,
        previous=previous,
        is_resume=True,
        is_dry_run=is_dry_run,
    )


def _refuse_side_alone(run_dir: RunDir) -> None:
    """Raise if the folder is that of a side job, which has no training to go on with."""
    ledger = Ledger(run_dir.ledger)
    if not ledger.side_jobs() or ledger.jobs() or run_dir.attempts():
        return
    kind = ledger.side_jobs()[-1].details[SIDE_DETAIL].partition("-")[0]
    raise RequestError(
        f"run {run_dir.run_id} has no training to continue: its folder is that of a side job "
        f"({kind}). Repeat `shardyard {kind} ... --on LAUNCHER` to go on with it, or start the "
        "training with `shardyard launch`."
    )


def _refuse_other_run(run_dir: RunDir, asked: Path, recipe: Recipe) -> None:
    """Raise if overrides name another run or place than the one that goes on."""
    before, now = load_recipe([asked], of_run=True).run, recipe.run
    is_parent = Path(now.dir).expanduser().resolve() == run_dir.path.parent
    given = {
        f"run.name={now.name}": now.name == before.name,
        f"run.id={now.id}": now.id in (before.id, run_dir.run_id),
        f"run.dir={now.dir}": now.dir == before.dir or is_parent,
    }
    wrong = [setting for setting, is_kept in given.items() if not is_kept]
    if wrong:
        raise RequestError(
            f"{', '.join(wrong)}: run {run_dir.run_id} goes on in its own folder, {run_dir.path}, "
            "and a resume cannot give it another name or place. Leave that out. To have it "
            "elsewhere, move the folder and give its new path for RUN; `shardyard train` begins "
            "another run."
        )


def _refuse_live(run_dir: RunDir, entry: Entry, launchers: Launchers | None) -> None:
    """Raise if the last job is not over: two at once would train one run."""
    job = job_of(run_dir, entry)
    status = launcher_named(job.launcher, launchers).status(job)
    if not status.state.is_over:
        raise RequestError(
            f"job {job.id} of run {run_dir.run_id} is {status.state.value} on {job.launcher}. Two "
            "at once would overwrite each other's checkpoints. Follow it with `shardyard watch "
            f"{run_dir.handle}`, or stop it with `shardyard cancel {run_dir.handle}`."
        )


def newest_attempt(run_dir: RunDir) -> tuple[int, Resolved | None, Path]:
    """Number of the next attempt, what the last one resolved, and what it was asked.

    A torn resolved.json costs no run: what was asked is resolved again, and the checkpoint is
    compared with it before it is loaded.
    """
    made = run_dir.attempts()
    number = made[-1] + 1 if made else 0
    newest = newest_resolved(run_dir)
    for torn in newest.torn:
        say(f"{torn}; what that attempt was asked is resolved again")
    begun = [each for each in made if run_dir.resolved(each).is_file()]
    asked = run_dir.asked(begun[-1]) if begun else run_dir.recipe
    return number, newest.resolved, asked if asked.is_file() else run_dir.recipe


def _data_as_before(previous: Resolved, overrides: Sequence[str]) -> DataFacts | None:
    """The data set that the run reads already; its text may have changed, or be gone, since."""
    asks_for_other = any(override.startswith("data.") for override in overrides)
    is_there = Path(previous.data.dir).is_dir()
    return previous.data if is_there and not asks_for_other else None


def is_finished(run_dir: RunDir, previous: Resolved | None, now: Resolved) -> bool:
    """Whether a run has nothing left to do, unless more is asked of it."""
    done = run_dir.checkpoint_steps()
    return bool(done) and (done[-1] >= now.steps or _has_met_its_target(run_dir, previous, now))


def _has_met_its_target(run_dir: RunDir, previous: Resolved | None, now: Resolved) -> bool:
    """Whether the run ended early at run.target, and the same target and length are asked."""
    if previous is None or read_state(run_dir).state != "finished":
        return False
    asked = [(each.steps, each.recipe.run.target) for each in (previous, now)]
    return asked[0] == asked[1]


def _as_json(run_dir: RunDir, done: list[int], steps: int, words: str) -> str:
    last = done[-1] if done else 0
    content = {"run_id": run_dir.run_id, "steps_done": last, "steps": steps, "message": words}
    return json.dumps(content, indent=1)


def _words(run_dir: RunDir, done: list[int], steps: int, *, is_finished: bool) -> str:
    if not done:
        return f"{run_dir.run_id} has no checkpoint yet: it would begin at step 0 of {steps}"
    if not is_finished:
        return f"{run_dir.run_id} would continue from step {done[-1]} of {steps}"
    return (
        f"{run_dir.run_id} is finished: step {done[-1]} of {steps}. To train on, give a new "
        f"length or target, such as run.steps={2 * done[-1]}."
    )

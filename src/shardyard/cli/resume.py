"""`shardyard resume`: a new attempt of a run, from its newest sound checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import click

from shardyard.cli.completion import by, launchers
from shardyard.cli.launch import SubmitOptions, submit_proposal
from shardyard.cli.options import (
    as_override,
    json_option,
    launch_options,
    launchers_in,
    overrides_argument,
    run_argument,
    runs_dir_option,
    trust_option,
)
from shardyard.cli.run_attempt import run_attempt
from shardyard.config.resolved import RollbackTarget
from shardyard.control.launch import resume_proposal
from shardyard.control.resume import (
    check_has_training,
    go_back,
)
from shardyard.control.submission import Launchers
from shardyard.control.train import next_attempt
from shardyard.io.terminal import echo
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.log import info
from shardyard.rundir.layout import RunDir, find_run


@click.command()
@run_argument
@overrides_argument
@runs_dir_option
@click.option(
    "--on",
    metavar="LAUNCHER",
    shell_complete=by(launchers),
    help="Launcher. Default: the one that it was launched with.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Roll back to the checkpoint of step N, such as after a loss spike.",
)
@click.option(
    "--skip-steps",
    type=click.IntRange(min=1),
    metavar="K",
    help="With --step: skip the data of the K steps after N.",
)
@launch_options
@trust_option
@click.option("--dry-run", is_flag=True, help="Show what would be continued, without starting it.")
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
    step: int | None,
    skip_steps: int | None,
    max_usd: float | None,
    trusts_folder: bool,
    **terms: Any,
) -> int:
    """Continue RUN (path, id or its beginning) from its newest good checkpoint.

    A launched run gets a new job. OVERRIDES (section.key=value) may change nodes, parallelism,
    memory and length, but not model, data, their order and the optimizer. With --step, you may
    also change optim.lr and optim.grad_clip.
    """
    if skip_steps is not None and step is None:
        raise click.UsageError("--skip-steps needs --step N, the step to go back to.")
    back_to = (
        None
        if step is None
        else RollbackTarget(step=step, skip_steps=skip_steps or 0, is_requested=True)
    )
    run_dir = find_run(run, runs_dir)
    check_trusted(run_dir.ledger, trusts_folder=trusts_folder)  # it submits what stands there
    check_has_training(run_dir)
    if on is not None or Ledger(run_dir.ledger).jobs():
        return _submit_resume(
            run_dir,
            (*overrides, *as_override(max_usd)),
            on=on,
            terms=SubmitOptions(**terms),
            launchers=launchers_in(context),
            back_to=back_to,
        )
    is_dry_run, as_json = terms["dry_run"], terms["as_json"]
    return _train_on(
        run_dir,
        overrides,
        back_to,
        dry_run=is_dry_run,
        is_forced=terms["is_forced"],
        as_json=as_json,
    )


def _train_on(
    run_dir: RunDir,
    overrides: tuple[str, ...],
    back_to: RollbackTarget | None,
    *,
    dry_run: bool,
    is_forced: bool,
    as_json: bool,
) -> int:
    """Continue a run here."""
    attempt, is_over = next_attempt(
        run_dir, overrides, back_to=back_to, is_forced=is_forced or dry_run
    )
    if dry_run or is_over:
        if attempt.lease is not None:
            attempt.lease.close()
        last = math.inf if back_to is None else back_to.step
        done = [step for step in run_dir.checkpoint_steps() if step <= last]
        steps = attempt.resolved.steps
        words = _words(run_dir, done, steps, is_finished=is_over)
        echo(_as_json(run_dir, done, steps, words) if as_json else words)
        return 0
    if back_to is not None:
        replaced = ", ".join(map(str, go_back(run_dir, back_to))) or "none"
        info(f"going back to step {back_to.step}; checkpoints replaced: {replaced}")
    return run_attempt(attempt, as_json=as_json)


def _submit_resume(
    run_dir: RunDir,
    overrides: tuple[str, ...],
    *,
    on: str | None,
    terms: SubmitOptions,
    launchers: Launchers | None,
    back_to: RollbackTarget | None,
) -> int:
    """Continue a run by another job, where its last one was or elsewhere."""
    proposal = resume_proposal(
        run_dir,
        overrides,
        on=on,
        launchers=launchers,
        is_dry_run=terms.dry_run,
        back_to=back_to,
    )
    return submit_proposal(proposal, terms)


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

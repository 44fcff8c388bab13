"""One attempt of a run on this machine: written down, started, followed, summed up."""

import json
import sys
from dataclasses import dataclass

from shardyard.cli.agent_process import run_agent_process
from shardyard.cli.last_report import write_last_report
from shardyard.cli.prepare import prepare_data
from shardyard.cli.request import Request
from shardyard.cli.tables import print_table
from shardyard.cli.terminal import say, tell
from shardyard.config.load import dump_recipe
from shardyard.config.own_module import NO_SHAPE
from shardyard.config.plug_in_settings import plug_ins_of
from shardyard.config.resolved import DataFacts, Resolved
from shardyard.config.schema import Recipe
from shardyard.files import write_json, write_text
from shardyard.hardware.machine import Machine
from shardyard.hardware.probe import probe
from shardyard.plan.plan import Plan, plan
from shardyard.report.summary import Summary
from shardyard.rundir.layout import RunDir
from shardyard.rundir.manifest import write_manifest
from shardyard.rundir.resolved import write_resolved
from shardyard.units import format_count, format_seconds


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Everything that is known before an attempt starts."""

    run_dir: RunDir
    number: int
    asked: Recipe
    """With the overrides of this attempt, before resolving."""
    resolved: Resolved
    machine: Machine

    def plan(self) -> Plan | None:
        """The prediction for this attempt; None for a module of the user's own."""
        if self.resolved.shape is None:
            return None
        devices = self.resolved.recipe.cluster.devices
        assert isinstance(devices, int)
        return plan(
            self.resolved,
            world_size=devices * self.resolved.recipe.cluster.nodes,
            devices_per_node=devices,
            machine=self.machine,
        )


def resolve_here(
    request: Request, *, previous: Resolved | None = None, data: DataFacts | None = None
) -> tuple[Machine, Resolved]:
    """Look at this machine, refuse what it cannot do, prepare the data, resolve everything.

    In this order: what is wrong is told before anything is tokenised.

    Args:
        previous: The last attempt, on a resume.
        data: A data set that is prepared already; None: prepare it, or find it prepared.

    Raises:
        RecipeError: Recipe, machine, model and data do not fit each other or ``previous``.
    """
    machine = probe()
    request.refuse_misfits(machine, previous)
    data = data or prepare_data(request, previous=previous)
    return machine, request.resolve(machine, data, previous=previous)


def run_attempt(attempt: Attempt, *, as_json: bool) -> int:
    """Write the attempt's files, train, and print what came of it. Returns the exit code."""
    prediction = attempt.plan()
    write_down(attempt, prediction)
    say(no_plan() if prediction is None else prediction.line())
    answer = run_agent_process(attempt.run_dir, attempt.number)
    summary = write_last_report(attempt.run_dir, attempt.number, attempt.resolved.recipe)
    if as_json:
        numbers = {} if summary is None else summary.to_json()
        tell(json.dumps({**_paths(attempt.run_dir), **numbers, **answer}, indent=1))
    elif summary is not None and summary.steps_done:
        _show(attempt.run_dir, summary)
    if answer["exit_code"] != 0:
        is_error = answer["outcome"] == "failed"
        say(f"{'error: ' if is_error else ''}{answer['message']}")
    return int(answer["exit_code"])


def no_plan() -> str:
    """What stands where a plan would."""
    return f"no plan: {NO_SHAPE}"


def write_down(attempt: Attempt, prediction: Plan | None) -> None:
    """Write the attempt's files; resolved.json last: an attempt that has it is whole."""
    run_dir, number = attempt.run_dir, attempt.number
    write_text(run_dir.asked(number), dump_recipe(attempt.asked))
    if prediction is not None:
        write_json(run_dir.plan(number), prediction.to_json())
    used = plug_ins_of(attempt.resolved.recipe, attempt.resolved.shape)
    write_manifest(run_dir, number, command=sys.argv, machine=attempt.machine, plug_ins=used)
    write_resolved(run_dir.resolved(number), attempt.resolved)


def _paths(run_dir: RunDir) -> dict[str, str | None]:
    latest = run_dir.latest_checkpoint()
    checkpoint = None if latest is None else str(latest)
    report = str(run_dir.report_html) if run_dir.report_html.is_file() else None
    return {"checkpoint": checkpoint, "report_html": report}


def _show(run_dir: RunDir, summary: Summary) -> None:
    rows = [
        ("step", f"{summary.steps_done:,} of {summary.steps_planned:,}", summary.state),
        ("loss", _nats(summary.loss), "of the last step"),
    ]
    if summary.eval_loss is not None:
        scores = (
            f"{name.replace('_', ' ')} {'-' if value is None else f'{value:,.4g}'}"
            for name, value in summary.scores.items()
        )
        rows.append(("evaluation", _nats(summary.eval_loss), ", ".join(scores)))
    rows += [
        ("unigram entropy", _nats(summary.unigram_entropy), "what ignoring all context reaches"),
        ("tokens", format_count(summary.tokens or 0), "read in training"),
        (
            "speed",
            f"{format_count(summary.tokens_per_s or 0)} tokens/s",
            f"median; a step takes {format_seconds(summary.step_time_s or 0)}",
        ),
        (
            "MFU",
            "-" if summary.mfu is None else f"{summary.mfu['full']:.1%}",
            summary.mfu_note,
        ),
        ("wall time", format_seconds(summary.wall_s), "from start to end of all processes"),
    ]
    print_table(("result", "", ""), rows)
    if run_dir.sample.is_file():
        tell("\na sample of generated text:\n")
        for line in run_dir.sample.read_text().splitlines():
            tell(f"    {line}")
    tell()
    for name, path in _paths(run_dir).items():
        if path is not None:  # without one it was said why
            tell(f"{name}: {path}")


def _nats(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f} nats a token"

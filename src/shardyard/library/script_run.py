"""A training loop of the user's own as a run: its folder, which every verb that reads runs reads.

Rank 0 writes events and metrics in the form of every run's, with the lease of the run held.
The script decides everything else. A script that is started again continues its run.
"""

import json
import operator
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardyard.config.rules.observe import check_exporters, services_of
from shardyard.config.rules.tags import check_tags
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secrets import HIDDEN, redact
from shardyard.config.validate import recipe_of
from shardyard.config.versions import EXPORTERS, check_packages
from shardyard.errors import (
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    RecipeError,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import parse_json
from shardyard.library.run_recorder import RunRecorder, activate, active_recorder
from shardyard.library.termination import BeforeTermination
from shardyard.log import info, warn
from shardyard.own_processes import python_program
from shardyard.rundir.jsonl import METRIC_KEYS
from shardyard.rundir.layout import RUNS_DIR, RunDir, is_run, new_run_id
from shardyard.rundir.lease import Lease, is_locked
from shardyard.rundir.manifest import write_manifest
from shardyard.rundir.script import RUN_DIR_VARIABLE, ScriptRequest, latest_script, write_script
from shardyard.rundir.state import read_state_in_list

_MEASURED = frozenset(
    {"attempt", "checkpoint_blocked_s", "generation", "phase", "step_time_s", "world_size"}
)
"""Keys of a step's line that Shardyard writes by itself."""
_OF_LINES = frozenset({"eval", "kind", "t"})
"""Keys by which readers know lines of another kind."""
_COUNTS = ("tokens", "samples")


class ScriptRun:
    """A run whose loop is a script's; made by ``shardyard.run``."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def __repr__(self) -> str:
        return f"<ScriptRun {self.id}>"

    @property
    def id(self) -> str:
        """Id of the run, for the verbs."""
        return self._recorder.run_dir.run_id

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._recorder.run_dir.path

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints, for ``steps`` and ``save_checkpoint``."""
        return self._recorder.run_dir.checkpoints

    def log(self, *, step: int, loss: float, **numbers: float | None) -> None:
        """Write the numbers of a step. All ranks may call it: those of rank 0 are written.

        Args:
            step: Number of the step, from 1.
            loss: Loss of the step over all ranks.
            numbers: Any others. Of those named as in metrics.jsonl, ``tokens`` and ``samples``
                count from the beginning of the run, and give the speed.

        Raises:
            RequestError: A value is no number, or a name is one that Shardyard writes.
            StorageError: The run folder cannot be written.
        """
        for name in numbers:
            if name in _MEASURED:
                raise RequestError(
                    f"run.log({name}=...): Shardyard writes {name} itself. Leave it out, or give "
                    f"it another name: my_{name}=..."
                )
            if name in _OF_LINES:
                raise RequestError(
                    f"run.log({name}=...): metrics.jsonl uses {name} for other lines. Give it "
                    f"another name: my_{name}=..."
                )
        plain = {name: _number("log", name, value) for name, value in numbers.items()}
        for name in set(METRIC_KEYS) & plain.keys():
            if plain[name] is None:
                del plain[name]
        if loss is None:
            raise RequestError("run.log(loss=None): give a number.")
        plain["loss"] = _number("log", "loss", loss)
        self._recorder.log(_step("log", step), plain)

    def log_evaluation(self, *, step: int, **scores: float | None) -> None:
        """Write the scores of an evaluation after a step, such as ``loss=`` or ``accuracy=``.

        Call it after the step's ``log``: the time since then counts as evaluation.

        Raises:
            RequestError: A value is no number.
            StorageError: The run folder cannot be written.
        """
        plain = {name: _number("log_evaluation", name, value) for name, value in scores.items()}
        self._recorder.log_evaluation(_step("log_evaluation", step), plain)

    def finish(self, reason: str) -> None:
        """End the run before the last step of ``steps``, such as by early stopping.

        The next start of the script then begins a new run. Lines that are logged later are lost.
        """
        self._recorder.finish(reason)


@contextmanager
def run(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    id: str | None = None,
    dir: str | Path = RUNS_DIR,
    tags: Mapping[str, str] | None = None,
    observe: Mapping[str, Any] | None = None,
) -> Iterator[ScriptRun]:
    """A block whose loop is a run of the verbs: runs, status, logs, report, serve, compare.

    All ranks enter it, with a process group if there are several. A script that is started again
    with the same name and config continues its newest run, by another attempt, unless that
    finished or is being trained. Started by ``shardyard launch``, the run is that of the job.

    Args:
        name: First part of the id of a new run.
        config: Settings of the script to keep with the run: what JSON can hold. Values that hold
            a credential are left out.
        id: Id of the run, new or to be continued, even if it has finished.
        dir: Parent folder of run folders, seen by all ranks.
        tags: As ``run.tags`` of a recipe.
        observe: ``wandb`` and ``mlflow``, as in a recipe: ``{"wandb": {"project": "..."}}``.

    Raises:
        RequestError: An argument cannot be used, a recipe's run has this id, or another process
            trains it. The same on every rank.
        StorageError: The run folder cannot be written.
    """
    script, recipe = _checked(name, config or {}, id, tags or {}, observe or {})
    launched = os.environ.pop(RUN_DIR_VARIABLE, None)  # of the first run of a process only
    if launched is not None:
        id, dir = Path(launched).name, Path(launched).parent
    parent = Path(dir).expanduser().resolve()
    started = _begin(script, recipe, id=id, parent=parent, is_launched=launched is not None)
    recorder = started.recorder
    activate(recorder)

    def stop() -> None:
        recorder.stop("SIGTERM", exit_code=EXIT_DRAINED)
        started.end(waits=False)

    try:
        with BeforeTermination(stop):
            yield ScriptRun(recorder)
            recorder.leave()
    except KeyboardInterrupt:
        recorder.stop("Ctrl-C", exit_code=EXIT_INTERRUPTED)
        raise
    except SystemExit as error:
        if error.code in (None, 0):
            recorder.leave()
        else:
            recorder.fail(error, exit_code=error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, ShardyardError) else 1
        recorder.fail(error, exit_code=code)
        raise
    finally:
        activate(None)
        started.end(waits=True)


_TRACKERS_WAIT_S = 40.0
"""Seconds that the end of a script waits; the program itself gives up earlier."""


class _TrackerProcess:
    """Sends one attempt to W&B and MLflow, until ``end`` or until this process is gone.

    It is a program of the other half, which holds their clients. Training does not depend on it.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        program = python_program("shardyard.trackers", str(run.path), "all")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [*program, f"--attempt={attempt}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the script, which ends first
            )
        except OSError as error:  # never why a run fails
            warn(f"no results are sent to W&B or MLflow: {error.strerror}")

    def end(self, *, waits: bool) -> None:
        """Have it send what is left.

        Args:
            waits: Whether to wait for that; if not, it continues by itself.
        """
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        if waits:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TRACKERS_WAIT_S)


@dataclass(kw_only=True)
class _StartedAttempt:
    """An attempt that has started, with what its end gives back."""

    recorder: RunRecorder
    lease: Lease | None
    """Lock of the run, on rank 0."""
    tracker: _TrackerProcess | None
    """Sends the run to its services; None: there are none, or this is another rank."""
    owner: int

    def end(self, *, waits: bool) -> None:
        """Give the lease back, and have the services get what is left; safe to repeat."""
        if os.getpid() != self.owner:
            return
        self.recorder.close()
        if self.tracker is not None:
            self.tracker.end(waits=waits)
            self.tracker = None
        if self.lease is not None:
            self.lease.close()


def _begin(
    script: ScriptRequest, recipe: Recipe, *, id: str | None, parent: Path, is_launched: bool
) -> _StartedAttempt:
    """Choose the run on rank 0, and begin its attempt on all ranks."""
    inside = active_recorder()
    if inside is not None:
        raise RequestError(
            f"shardyard.run({script.name!r}): this process is in the run {inside.run_dir.run_id} "
            "already. Leave that block first."
        )
    rank, ranks = _rank_and_ranks(script.name)
    lease, chosen, problem = None, ("", 0), ""
    if rank == 0:
        try:
            if services_of(recipe):
                check_packages(tuple(EXPORTERS[each] for each in services_of(recipe)))
            run_dir, lease, attempt = _choose(script, id=id, parent=parent, is_launched=is_launched)
            write_manifest(run_dir, attempt, command=[sys.executable, *sys.argv], machine=None)
            write_script(run_dir, attempt, script)
            chosen = run_dir.run_id, attempt
        except ShardyardError as error:
            if ranks == 1:
                raise
            problem = str(error)
    mine = {"rank": rank, "node": socket.gethostname(), "pid": os.getpid()}
    facts = _exchanged({"worker": mine, "chosen": chosen, "problem": problem}, ranks)
    if facts[0]["problem"]:
        raise RequestError(facts[0]["problem"])
    run_id, attempt = facts[0]["chosen"]
    run_dir = RunDir(parent / run_id)
    workers = [fact["worker"] for fact in facts]
    recorder = RunRecorder(run_dir, attempt, workers=workers, rank=rank)
    recorder.begin(name=script.name, tags=script.tags)
    tracker = None
    if rank == 0:
        info(f"run {run_id}, attempt {attempt}: {run_dir.path}")
        if attempt > 0 and id is None:
            warn(
                f"run {run_id} continues with attempt {attempt}: it has this config, and has not "
                "finished. For a new run give shardyard.run(..., id=...)."
            )
        if services_of(recipe):
            tracker = _TrackerProcess(run_dir, attempt)
    return _StartedAttempt(recorder=recorder, lease=lease, tracker=tracker, owner=os.getpid())


def _choose(
    script: ScriptRequest, *, id: str | None, parent: Path, is_launched: bool
) -> tuple[RunDir, Lease, int]:
    """Return the run, its lease and the number of the attempt to begin.

    Args:
        is_launched: Whether the command line made the folder for this script.

    Raises:
        RequestError: A recipe's run has the id, or another process trains it.
    """
    if id is not None:
        run_dir = RunDir(parent / id)
        if not is_launched and is_run(run_dir.path) and latest_script(run_dir) is None:
            raise RequestError(
                f"shardyard.run(id={id!r}): a recipe made that run. Continue it with `shardyard "
                f"resume {run_dir.handle}`, or give another id."
            )
        return run_dir, Lease(run_dir.lease), _next_attempt(run_dir)
    unfinished = _latest_unfinished(script, parent)
    if unfinished is not None:
        try:
            return unfinished, Lease(unfinished.lease), _next_attempt(unfinished)
        except RequestError:
            pass  # another start of the script has just taken it: this one begins a new run
    run_dir = RunDir(parent / new_run_id(script.name))
    return run_dir, Lease(run_dir.lease), _next_attempt(run_dir)


def _next_attempt(run_dir: RunDir) -> int:
    return max(run_dir.attempts(), default=-1) + 1


def _latest_unfinished(script: ScriptRequest, parent: Path) -> RunDir | None:
    """Return the newest run of a script's name and config, if it has ended before its end."""
    if not parent.is_dir():
        return None
    form = re.compile(rf"{re.escape(script.name)}-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", re.ASCII)
    names = sorted(each.name for each in parent.iterdir() if form.fullmatch(each.name))
    for run_dir in (RunDir(parent / each) for each in reversed(names)):
        found = latest_script(run_dir)
        if found is not None and found.config == script.config:
            is_over = read_state_in_list(run_dir).state in ("finished", "unreadable")
            return None if is_over or is_locked(run_dir.lease) else run_dir
    return None


def _rank_and_ranks(name: str) -> tuple[int, int]:
    """Rank and number of ranks, of the process group.

    Raises:
        RequestError: There are several ranks, and no process group.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise RequestError(
            f"shardyard.run({name!r}) on {ranks} ranks before there is a process group: each would "
            "make a run of its own. Call torch.distributed.init_process_group() or "
            "shardyard.wrap() first."
        )
    return 0, 1


def _exchanged(fact: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return a fact of every rank, by rank. All ranks call it."""
    if ranks == 1:
        return [fact]
    found: list[Any] = [None] * ranks
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(found, fact, group=group)
    dist.destroy_process_group(group)
    return found


def _checked(
    name: str,
    config: Mapping[str, Any],
    id: str | None,
    tags: Mapping[str, str],
    observe: Mapping[str, Any],
) -> tuple[ScriptRequest, Recipe]:
    """Return the script's facts, and a recipe that has the settings they share with one.

    Raises:
        RequestError: An argument cannot be used; all that cannot.
    """
    other = sorted(set(observe) - EXPORTERS.keys())
    if other:
        raise RequestError(
            f"shardyard.run(observe=...) takes {' and '.join(EXPORTERS)}, not {other[0]}. The rest "
            "of a recipe's observe is for loops that Shardyard runs."
        )
    try:
        recipe = recipe_of(
            {"run": {"name": name, "id": id, "tags": dict(tags)}, "observe": dict(observe)}
        )
        problems = [*check_tags(recipe), *check_exporters(recipe)]
    except RecipeError as error:
        raise RecipeError(error.problems, "shardyard.run()") from None
    if problems:
        raise RecipeError(problems, "shardyard.run()")
    try:
        content: dict[str, Any] = parse_json(json.dumps(dict(config), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"shardyard.run(config=...) cannot be written as JSON: {error}. Give numbers, texts, "
            "lists and dicts; of an argparse namespace vars(args)."
        ) from error
    sections = recipe.observe.model_dump(mode="json", include=set(EXPORTERS))
    script = ScriptRequest(
        name=name, config=_without_credentials(content), tags=dict(tags), observe=sections
    )
    return script, recipe


def _without_credentials(value: Any, name: str = "") -> Any:
    match value:
        case str():
            return HIDDEN if is_called_a_secret(name, value) else redact(value)
        case dict():
            return {key: _without_credentials(each, str(key)) for key, each in value.items()}
        case list():
            return [_without_credentials(each, name) for each in value]
        case _:
            return value


def _step(method: str, step: Any) -> int:
    """A number of a step, of any type that is one.

    Raises:
        RequestError: It is none.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise RequestError(f"run.{method}(step={step!r}): give a whole number.") from error
    if number < 1:
        raise RequestError(
            f"run.{method}(step={number}): steps count from 1. In `for step in "
            f"shardyard.steps(...)`: run.{method}(step=step + 1, ...)."
        )
    return number


def _number(method: str, name: str, value: Any) -> float | None:
    """A number of any type: Python's, numpy's, or a tensor with one element.

    Raises:
        RequestError: It is none.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        return operator.index(value) if name in _COUNTS else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = "a whole number" if name in _COUNTS else "a number"
        raise RequestError(f"run.{method}({name}={value!r:.80}): give {kind}.") from error

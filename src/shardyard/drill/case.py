"""One case: the drill starts a run of the recipe, breaks it once, and follows it to its end.

The commands are those that a user types, started as processes. They are `train` on one node,
`launch --on local` on several, and `resume` where a person has to.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardyard.drill.case_state import CaseState, MissedInjection
from shardyard.drill.faults import Fault
from shardyard.drill.network import clock_of, network_of
from shardyard.drill.observations import (
    Baseline,
    BitDiff,
    CommandExit,
    RunObservations,
    compare_bits,
    read_observations,
)
from shardyard.drill.recipe import DrillRecipe
from shardyard.drill.sandbox import mount_own, unmount
from shardyard.drill.scene import TaggedProcesses
from shardyard.errors import RequestError
from shardyard.io.polling import wait_for
from shardyard.own_processes import python_program
from shardyard.rundir.contracts import FAULTS_VARIABLE
from shardyard.rundir.jsonl import read_lines, read_lines_backwards
from shardyard.rundir.layout import RunDir

_POLL_S = 0.01
_START = 10
"""A start, with imports and the preparation of data, may take so many times the patience."""
_BEFORE_A_START, _STARTED = ("run_started", "attempt_ended"), "attempt_started"
"""Kinds of events after which the next processes are started, and when they are; others may come
in between."""
_MOST_RESUMES = 2
_LAST_WORDS = 600
_EARLY, _MIDDLE = (0.1, 0.2), (0.35, 0.6)
"""Share of the run's steps between which a fault strikes."""


@dataclass(frozen=True, kw_only=True)
class DrillWorkspace:
    """Folder of a drill's runs, and how long the drill waits for one."""

    folder: Path
    patience_s: float
    """Without a step or an event for so long, a run is ended: it has not noticed."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def check_unused(self) -> None:
        """Raise where another drill has been.

        Raises:
            RequestError: It has.
        """
        if self.runs.exists():
            raise RequestError(
                f"--dir {self.folder}: a drill has been there, and its runs would be taken for "
                "this one's. Give another folder, or remove that one."
            )


@dataclass
class Commands:
    """The commands of one run of a drill, and all that they leave running."""

    workspace: DrillWorkspace
    drilled: DrillRecipe
    run: RunDir
    scratch: Path
    faults: str
    """``SHARDYARD_FAULTS`` of the first command."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all commands, in addition to inherited ones."""
    marked: TaggedProcesses = field(default_factory=TaggedProcesses)
    ends: list[CommandExit] = field(default_factory=list)
    abort_reason: str = ""
    _at_start: list[int] = field(default_factory=list)

    @contextmanager
    def started(self, words: Sequence[str], *, faults: str = "") -> Iterator[Callable[[], bool]]:
        """Start a verb; yields whether it and all that it left running has ended.

        After the block none of its processes run, in any case.
        """
        log = self.workspace.folder / "talk" / f"{self.run.run_id}-{len(self.ends)}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ, **self.environment, **self.marked.environment,
            "TMPDIR": str(self.scratch), FAULTS_VARIABLE: faults,
        }  # fmt: skip
        self._at_start = self._progress()
        with log.open("wb") as talk:
            process = subprocess.Popen(
                python_program("shardyard", *words),
                stdin=subprocess.DEVNULL, stdout=talk, stderr=talk, env=environment,
                start_new_session=True,  # Ctrl-C reaches the drill alone, which ends this
            )  # fmt: skip
        ended_t: list[float] = []

        def is_over() -> bool:
            if process.poll() is None:
                return False
            ended_t.append(time.time())
            return not self.marked.pids()

        try:
            yield is_over
        finally:
            self.marked.kill_all()
            code = process.wait()
            text = log.read_text(errors="replace").strip()
            self.ends.append(
                CommandExit(
                    command=" ".join(["shardyard", words[0]]),
                    t=ended_t[0] if ended_t else time.time(),
                    exit_code=code,
                    last_words=text[-_LAST_WORDS:],
                )
            )

    def wait_for_end(self, is_over: Callable[[], bool]) -> None:
        """Wait until all has ended, or the run made no progress for the patience of the drill."""
        self._wait(is_over)
        if not is_over():
            self.abort_reason = (
                f"no progress for {self.workspace.patience_s:g} s: the drill ended the run"
            )

    def wait_for_step(self, step: int, is_over: Callable[[], bool], state: CaseState) -> bool:
        """Wait until a step is done; False: the run is over, or has stalled, before it."""
        self._wait(lambda: state.last_step() >= step or is_over())
        return state.last_step() >= step

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so, or the run makes no more progress; a start may take longer."""
        seen, since_s = self._progress(), time.monotonic()

        def is_done() -> bool:
            nonlocal seen, since_s
            if is_so():
                return True
            if (now := self._progress()) != seen:
                seen, since_s = now, time.monotonic()
            quiet_s = time.monotonic() - since_s
            if quiet_s <= self.workspace.patience_s:
                return False
            return quiet_s > _START * self.workspace.patience_s or not self._is_starting()

        wait_for(is_done, every_s=_POLL_S)

    def _is_starting(self) -> bool:
        """Whether processes are being started: by the command, or by a supervisor once more."""
        kinds = (event["kind"] for event in read_lines_backwards(self.run.events))
        told = next((kind for kind in kinds if kind in (*_BEFORE_A_START, _STARTED)), None)
        return self._progress() == self._at_start or told in _BEFORE_A_START

    def _progress(self) -> list[int]:
        files = (self.run.events, self.run.metrics)
        return [path.stat().st_size if path.is_file() else -1 for path in files]


def run_reference(drilled: DrillRecipe, workspace: DrillWorkspace) -> RunObservations:
    """Run the undisturbed twin, by which all others are judged; its checkpoints stay."""
    return run_case(drilled, workspace, fault=None, name="twin", number=0, seed=0)


def run_of(workspace: DrillWorkspace, name: str, number: int) -> RunDir:
    """Return the run folder of a case."""
    return RunDir(workspace.runs / f"{name}-{number}")


def run_case(
    drilled: DrillRecipe, workspace: DrillWorkspace, *, fault: Fault | None, name: str,
    number: int, seed: int,
    reference: RunObservations | None = None,
) -> RunObservations:  # fmt: skip
    """Run the recipe once, with one fault or none, and read its results.

    Args:
        number: Number among the repetitions of this fault.
        reference: Results of the undisturbed run.
        seed: Seed of the moment and the target.
    """
    draw = random.Random(f"{seed} {name} {number}")
    world = drilled.nodes * drilled.devices
    rank = _target(fault, draw, world=world, devices=drilled.devices)
    share = draw.uniform(*(_EARLY if fault is not None and fault.is_early else _MIDDLE))
    step = max(3, round(share * drilled.steps))
    with tempfile.TemporaryDirectory(prefix="drill-") as scratch:  # short: sockets are made in it
        case = Commands(
            workspace=workspace, drilled=drilled, run=run_of(workspace, name, number),
            scratch=Path(scratch), faults=_inside(fault, step=step, rank=rank),
        )  # fmt: skip
        before = Baseline()
        scene = CaseState(
            run=case.run, marked=case.marked, scratch=case.scratch, draw=draw, rank=rank,
            node=rank // drilled.devices, is_launched=drilled.nodes > 1,
            within_s=workspace.patience_s,
        )  # fmt: skip
        with (
            _own_disk(fault, scene),
            _fault_environment(fault, scene, drilled.nodes) as environment,
        ):
            case.environment = environment
            struck = _break(case, scene, fault, step=step)
            resumes = _resume(case, scene, fault)
            facts = RunObservations(
                fault=name, number=number, seed=seed, rank=scene.rank, node=scene.node,
                asked_step=step, **struck, notes=scene.notes, ends=tuple(case.ends),
                resumes=resumes, given_up=case.abort_reason,
                left=before.leftovers(case.run, case.marked, case.scratch),
                **read_observations(case.run),
            )  # fmt: skip
            if reference is not None:
                facts = replace(
                    facts, bits=_bits(facts, reference, run_of(workspace, "twin", 0), case.run)
                )
    if reference is not None:
        forget_checkpoints(case.run)
    return facts


def forget_checkpoints(run: RunDir) -> None:
    """Remove them: they are many, and what they say is known."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def _bits(
    observations: RunObservations, reference: RunObservations, undisturbed: RunDir, run: RunDir
) -> BitDiff | None:
    """Compare tensors with the twin where files cannot: other ranks cut the files otherwise."""
    is_same = (observations.losses, observations.digests) == (reference.losses, reference.digests)
    return compare_bits(undisturbed, run) if observations.digests and not is_same else None


@contextmanager
def _own_disk(fault: Fault | None, state: CaseState) -> Iterator[None]:
    """A file system for what the fault fills; what was on it goes with it."""
    places = {"run": state.run.path, "scratch": state.scratch}
    folder = None if fault is None or fault.own_disk is None else places.get(fault.own_disk)
    if folder is None:  # /dev/shm is one already
        yield
        return
    mount_own(folder)
    try:
        yield
    finally:
        unmount(folder)


@contextmanager
def _fault_environment(
    fault: Fault | None, state: CaseState, nodes: int
) -> Iterator[Mapping[str, str]]:
    """Set up the surroundings that the fault breaks; yield the variables for the run."""
    if fault is not None and fault.needs_network:
        with network_of(nodes) as state.network:
            yield state.network.environment
    elif fault is not None and fault.needs_clock:
        with clock_of(nodes) as (state.clock, environment):
            yield environment
    else:
        yield {}


def _target(fault: Fault | None, draw: random.Random, *, world: int, devices: int) -> int:
    """Any rank; of faults of nodes, the first of the node that they mean."""
    if fault is not None and fault.node is not None:
        return (world // devices - 1 if fault.node == "last" else 0) * devices
    return draw.randrange(world)


def _inside(fault: Fault | None, *, step: int, rank: int) -> str:
    if fault is None or not fault.inside:
        return ""
    return f"{fault.inside}@{step}" + ("" if fault.is_everywhere else f":{rank}")


def _break(case: Commands, state: CaseState, fault: Fault | None, *, step: int) -> dict[str, Any]:
    """Start the run, let the fault strike, wait for the end. Returns when it struck, or why not."""
    words = ("launch", "--on", "local", "--yes", "--force") if state.is_launched else ("train",)
    struck_t, missed = None, ""
    asked = (*words, *case.drilled.of(case.workspace.runs, case.run.run_id))
    with case.started(asked, faults=case.faults) as is_over:
        if fault is not None and fault.strike is not None:
            try:
                if not case.wait_for_step(step - 1, is_over, state):
                    raise MissedInjection(f"the run did not reach step {step}")
                state.aim(at_node=fault.node is not None)
                struck_t = time.time()
                fault.strike(state)
                struck_t = state.injected_t or struck_t
            except MissedInjection as why:
                struck_t, missed = None, str(why)
        case.wait_for_end(is_over)
    if fault is not None and fault.inside:
        line = state.injection_line()
        struck_t, missed = (line["t"], "") if line else (None, "no rank said that it struck")
    return {"struck_t": struck_t, "missed": missed}


def _resume(case: Commands, state: CaseState, fault: Fault | None) -> int:
    """Do what a person would: fix the fault, and resume until the run has finished."""
    if fault is not None and fault.repair is not None:
        fault.repair(state)
    resumes = 0
    while not case.abort_reason and not _has_finished(case.run) and resumes < _MOST_RESUMES:
        if not case.run.recipe.is_file():
            break  # it never began: the first command's words say why
        resumes += 1
        words = ["resume", str(case.run.path)]
        words += ["--yes", "--force"] if state.is_launched else []
        with case.started(words) as is_over:
            case.wait_for_end(is_over)
    return resumes


def _has_finished(run: RunDir) -> bool:
    return any(event["kind"] == "run_finished" for event in read_lines(run.events))

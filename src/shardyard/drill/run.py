"""A whole drill: the twin, then every fault so many times, each judged as soon as it is over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.drill.case import DrillWorkspace, forget_checkpoints, run_case, run_of, run_reference
from shardyard.drill.faults import FAULTS, REMOVED
from shardyard.drill.observations import OUTCOMES, Outcome, RunObservations
from shardyard.drill.recipe import DrillRecipe
from shardyard.drill.verdict import PHASES, CaseResult, evaluate
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import make_folder
from shardyard.log import info
from shardyard.units import format_seconds

_MOST_CASES = 2_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that was broken, and its judgement."""

    observations: RunObservations
    result: CaseResult


@dataclass(frozen=True, kw_only=True)
class FaultSummary:
    """All cases of one fault."""

    fault: str
    cases: tuple[Case, ...]

    def count(self, name: str) -> int:
        """Cases of which a field of the verdict is true."""
        return sum(bool(getattr(case.result, name)) for case in self.cases)

    def exact(self, outcome: Outcome) -> int:
        return sum(case.result.exact == outcome for case in self.cases)

    @property
    def bits(self) -> str:
        """Count the cases that are equal to the twin, different, or not proven to be either."""
        counts = {outcome: self.exact(outcome) for outcome in OUTCOMES}
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)

    def median(self, name: str) -> float | None:
        """Return the median over cases that have a value."""
        values = [getattr(case.result, name) for case in self.cases]
        found = [value for value in values if value is not None]
        return median(found) if found else None

    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, over the cases that went on."""
        found = [case.result.phases for case in self.cases if case.result.phases]
        return {name: median(each[name] for each in found) for name in PHASES} if found else {}

    @property
    def needs_resume(self) -> bool:
        """Whether a person had to resume any of them."""
        return any(case.observations.resumes for case in self.cases)

    @property
    def failure_counts(self) -> dict[str, int]:
        """Return each problem, and in how many cases it occurred."""
        all_ = [problem for case in self.cases for problem in case.result.problems]
        return {problem: all_.count(problem) for problem in all_}


@dataclass
class Drill:
    """Findings of a drill so far."""

    drilled: DrillRecipe
    folder: Path
    seed: int
    reference: RunObservations
    impossible: dict[str, str] = field(default_factory=dict)
    """Fault -> why it cannot be tried."""
    cases: list[Case] = field(default_factory=list)

    @property
    def rows(self) -> list[FaultSummary]:
        """By fault, in the order of the table."""
        by_name = {name: [c for c in self.cases if c.observations.fault == name] for name in FAULTS}
        return [
            FaultSummary(fault=name, cases=tuple(found)) for name, found in by_name.items() if found
        ]

    @property
    def is_good(self) -> bool:
        return bool(self.cases) and all(case.result.is_good for case in self.cases)

    @property
    def result_file(self) -> Path:
        return self.folder / "drill.json"

    @property
    def page_file(self) -> Path:
        return self.folder / "drill.html"

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": list(self.drilled.words),
            "nodes": self.drilled.nodes,
            "ranks_per_node": self.drilled.devices,
            "steps": self.drilled.steps,
            "seed": self.seed,
            "is_good": self.is_good,
            "impossible": self.impossible,
            "rows": [_row_json(row) for row in self.rows],
            "twin": self.reference.to_json(),
            "cases": [
                {"verdict": case.result.to_json(), **case.observations.to_json()}
                for case in self.cases
            ],
        }


def _row_json(row: FaultSummary) -> dict[str, Any]:
    return {
        "fault": row.fault,
        "cases": len(row.cases),
        "noticed": row.count("is_noticed"),
        "noticed_s": row.median("noticed_s"),
        "cause_right": row.count("is_cause_right"),
        "steps_lost": row.median("steps_lost"),
        "next_step_s": row.median("next_step_s"),
        "phases": row.phases(),
        **{outcome.replace(" ", "_"): row.exact(outcome) for outcome in OUTCOMES},
        "recovered": row.count("has_recovered"),
        "good": row.count("is_good"),
        "problems": row.failure_counts,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FaultSelection:
    """Faults to try."""

    names: tuple[str, ...]
    impossible: dict[str, str]
    """Fault that was asked for -> why it is not possible."""
    repeat: int

    def outside(self, reason: str) -> "FaultSelection":
        """Keep the faults that are possible outside of namespaces."""
        return self._without(
            {
                name: f"it needs {needs} of its own: {reason}"
                for name in self.names
                if (needs := FAULTS[name].needs_namespaces)
            }
        )

    def after_reference(self, drilled: DrillRecipe) -> "FaultSelection":
        """Keep the faults that are possible in the layout that the twin has shown."""
        return self._without(
            {name: why for name in self.names if (why := FAULTS[name].impossible_reason(drilled))}
        )

    def _without(self, rejected: dict[str, str]) -> "FaultSelection":
        return replace(
            self,
            names=tuple(name for name in self.names if name not in rejected),
            impossible={**self.impossible, **rejected},
        )


def select_faults(requested: str | None, drilled: DrillRecipe, *, repeat: int) -> FaultSelection:
    """The faults to try, so many times each.

    Args:
        requested: Names, joined by commas; None: all that are possible.

    Raises:
        RequestError: There is no such fault, none is possible, or they are too many.
    """
    names = [*FAULTS] if requested is None else list(filter(None, requested.split(",")))
    if wrong := [name for name in names if name not in FAULTS]:
        if instead := REMOVED.get(wrong[0]):
            raise RequestError(
                f"--faults: a drill no longer has {wrong[0]}, which only tested Shardyard itself. "
                f"Use {instead}. Developers have it in `python -m benchmarks.timed_kills`."
            )
        raise RequestError(
            f"--faults: unknown fault {wrong[0]!r}. Use some of {', '.join(FAULTS)}."
        )
    impossible = {name: why for name in names if (why := FAULTS[name].impossible_reason(drilled))}
    names = [name for name in dict.fromkeys(names) if name not in impossible]
    if len(names) * repeat > _MOST_CASES:
        raise RequestError(
            f"{len(names)} faults {repeat} times each are more runs than the {_MOST_CASES:,} that "
            "one drill makes. Ask for fewer faults with --faults, or a smaller --repeat."
        )
    if not names:
        why = "; ".join(f"{name}: {reason}" for name, reason in impossible.items())
        raise RequestError(f"--faults: none of these can be tried ({why}). Change the recipe.")
    return FaultSelection(names=tuple(names), impossible=impossible, repeat=repeat)


def run_drill(
    drilled: DrillRecipe,
    workspace: DrillWorkspace,
    selection: FaultSelection,
    *,
    seed: int,
    on_case: Callable[[Drill], None],
) -> Drill:
    """Run the twin and all cases.

    Args:
        on_case: Called after each case, so that an interrupted drill leaves its findings.

    Raises:
        ShardyardError: The undisturbed run did not finish, so there is no reference.
    """
    make_folder(workspace.runs)
    info("twin: the undisturbed run")
    twin = run_reference(drilled, workspace)
    if not twin.has_finished:
        words = twin.ends[-1].last_words if twin.ends else twin.given_up
        raise ShardyardError(
            "the undisturbed run did not finish, so others cannot be compared with it. Make "
            f"`shardyard train` of this recipe work first. Its last lines: {words}"
        )
    world = next(iter(twin.worlds.values()))
    ready = next(event for event in twin.events if event["kind"] == "model_ready")
    replicas = ready["layout"]["dp_replicate"]
    drilled = replace(drilled, devices=world // drilled.nodes, replicas=replicas)
    selection = selection.after_reference(drilled)
    drill = Drill(
        drilled=drilled,
        folder=workspace.folder,
        seed=seed,
        reference=twin,
        impossible=selection.impossible,
    )
    try:
        for number in range(selection.repeat):
            for name in selection.names:
                drill.cases.append(_try(drill, workspace, name, number))
                on_case(drill)
    finally:
        forget_checkpoints(run_of(workspace, "twin", 0))
    return drill


def _try(drill: Drill, workspace: DrillWorkspace, name: str, number: int) -> Case:
    began_s = time.monotonic()
    fault = FAULTS[name]
    facts = run_case(
        drill.drilled, workspace, fault=fault, name=name, number=number, seed=drill.seed,
        reference=drill.reference,
    )  # fmt: skip
    verdict = evaluate(fault, facts, drill.reference, is_exact_requested=drill.drilled.is_exact)
    seconds = format_seconds(time.monotonic() - began_s)
    info(f"{name} {number}: {'; '.join(verdict.problems) or 'good'} ({seconds})")
    return Case(observations=facts, result=verdict)


def default_folder(words: Sequence[str]) -> Path:
    """``drills/<name>-<date>-<time>``, named after the recipe."""
    files = [Path(word).stem for word in words if "=" not in word]
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path("drills") / f"{'-'.join(files) or 'drill'}-{stamp}"

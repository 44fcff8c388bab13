"""Verdict on a fault: noticed, named, fixed, exact; from facts of its run and its twin.

This module is pure: it does not read or start anything.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.drill.faults import BY_COMMAND, ExpectedReport, Fault
from shardyard.drill.observations import BitDiff, Outcome, RunObservations
from shardyard.rundir.jsonl import LOSSES

NOTICES = (
    *LOSSES,
    "straggler",
    "device_problem",
    "draining",
    "checkpoint_abandoned",
    "attempt_ended",
)
"""Kinds of events by which a run says that something is wrong."""

PHASES = ("detect", "restart", "rendezvous", "init", "load", "first step")
"""From the fault to the next finished step, in their order; named as in the report."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The judgement of one case."""

    noticed_s: float | None
    """Seconds from the fault to the first word about it; None: there was none, or none is due."""
    is_noticed: bool
    is_cause_right: bool
    said: str
    """First words that the run logged."""
    steps_lost: int
    """Finished steps that were done again."""
    phases: dict[str, float]
    """Seconds of ``PHASES``; empty where no step came after the fault."""
    exact: Outcome
    why: str
    """Details of exactness: what is equal, where it differs first, or why it is not proven."""
    differs: dict[str, Any] | None
    """First step, rank and tensor that differ, as far as they are known; None: all are equal."""
    has_recovered: bool
    left: str
    problems: tuple[str, ...]
    """Why the case is not good; empty: it is."""

    @property
    def is_good(self) -> bool:
        return not self.problems

    @property
    def next_step_s(self) -> float | None:
        """From the fault to the next finished step."""
        return sum(self.phases.values()) if self.phases else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_good": self.is_good, "next_step_s": self.next_step_s}


def evaluate(
    fault: Fault,
    observations: RunObservations,
    reference: RunObservations,
    *,
    is_exact_requested: bool,
) -> CaseResult:
    """Judge a case.

    Args:
        is_exact_requested: Whether the recipe promises the same bits for any number of ranks.
    """
    notices = list(_fault_events(fault, observations))
    exact, why = compare(observations, reference, is_exact_requested=is_exact_requested)
    is_struck = observations.struck_t is not None
    is_right = is_struck and _is_right(fault.named, notices, observations)
    is_noticed = is_struck and (bool(notices) or fault.named is None)
    problems = [] if is_struck else [f"it never struck: {observations.missed}"]
    if is_struck and not is_noticed:
        problems.append("not noticed")
    elif is_struck and not is_right:
        problems.append(
            "another cause was named" if fault.named else "a loss was reported, but none happened"
        )
    if not observations.has_finished:
        problems.append(observations.given_up or "the run did not come to its end")
    if exact == "different" or (
        exact == "not proven" and observations.has_finished and is_exact_requested
    ):
        problems.append(f"{exact}: {why}")
    left = (
        "" if observations.given_up else observations.left.words()
    )  # what the drill killed could not tidy up
    if left:
        problems.append(f"left over: {left}")
    first = notices[0] if notices else None
    return CaseResult(
        noticed_s=None if first is None else max(0.0, first["t"] - (observations.struck_t or 0.0)),
        is_noticed=is_noticed,
        is_cause_right=is_right,
        said="" if first is None else _words(first),
        steps_lost=observations.steps_again,
        phases=phases(observations, None if first is None else first["t"]),
        exact=exact,
        why=why,
        differs=_first_difference(observations.bits) if exact == "different" else None,
        has_recovered=observations.has_finished,
        left=left,
        problems=tuple(problems),
    )


def compare(
    observations: RunObservations, reference: RunObservations, *, is_exact_requested: bool
) -> tuple[Outcome, str]:
    """Losses, samples and final weights against the twin's, bit for bit."""
    where = (
        ""
        if observations.bits is None or observations.bits.tensor is None
        else f"; {observations.bits.why}"
    )
    world = next(iter(reference.worlds.values()), None)
    resized = min(
        (step for step, ranks in observations.worlds.items() if ranks != world), default=None
    )
    for step in sorted(observations.losses):
        if resized is not None and step >= resized and not is_exact_requested:
            break
        if step not in reference.losses or observations.losses[step] != reference.losses[step]:
            return "different", f"losses from step {step} on{where}"
    if resized is not None and not is_exact_requested:
        return "not proven", (
            f"{observations.worlds[resized]} ranks instead of {world} from step {resized} on: "
            "rounding differs without precision.reduce=exact"
        )
    if not observations.has_finished:
        newest = max(observations.losses, default=0)
        return "not proven", f"the run ended at step {newest} of {max(reference.losses, default=0)}"
    if observations.samples != reference.samples:
        wrong = [
            p for p, sample in reference.samples.items() if observations.samples.get(p) != sample
        ]
        where = f"from position {wrong[0]} on" if wrong else "more than the twin's"
        return "different", f"samples {where}"
    if not observations.digests or observations.last_checkpoint != reference.last_checkpoint:
        return "not proven", "no last checkpoint to compare"
    if observations.digests == reference.digests:
        return "equal", "losses, samples, weights and states of the optimizer"
    if observations.bits is None:
        return "not proven", "the last checkpoints were not compared"
    if observations.bits.outcome == "equal":  # by other ranks, which cut the same tensors otherwise
        return "equal", f"losses, samples, and {observations.bits.why}"
    return observations.bits.outcome, observations.bits.why


def _first_difference(bits: BitDiff | None) -> dict[str, Any]:
    return {} if bits is None else {"step": bits.step, "rank": bits.rank, "tensor": bits.tensor}


def phases(observations: RunObservations, noticed_t: float | None) -> dict[str, float]:
    """Seconds from the fault to the next finished step, by phase; they add up to it."""
    struck_t = observations.struck_t
    if struck_t is None:
        return {}
    after = [event for event in observations.events if event["t"] > struck_t]
    first_step = next((event for event in after if event["kind"] == "first_step"), None)
    if first_step is None:
        return {}
    place = (first_step["attempt"], first_step["generation"])
    same = [e for e in observations.events if (e["attempt"], e["generation"]) == place]
    met = next((e for e in same if e["kind"] == "rendezvous"), first_step)
    ready = next((e for e in same if e["kind"] == "model_ready"), first_step)
    loaded = next((e for e in same if e["kind"] == "checkpoint_loaded"), {})
    load_s = min(float(loaded.get("seconds") or 0.0), max(0.0, ready["t"] - met["t"]))
    began_t = met["t"] - float(met.get("seconds") or 0.0)
    noticed_t = began_t if noticed_t is None else min(noticed_t, began_t)
    ends = {
        "detect": noticed_t,
        "restart": began_t,
        "rendezvous": met["t"],
        "init": ready["t"] - load_s,
        "load": ready["t"],
        "first step": first_step["t"],
    }
    found, clock_t = {}, struck_t
    for name in PHASES:
        found[name] = max(0.0, ends[name] - clock_t)
        clock_t = max(clock_t, ends[name])
    return found


def _fault_events(fault: Fault, observations: RunObservations) -> Iterable[dict[str, Any]]:
    """List the run's reports of the fault by time: events, and last words of a failed command."""
    if observations.struck_t is None:
        return []
    since_t = (
        -math.inf if fault.needs_clock else observations.struck_t
    )  # events have that clock's time
    kinds = {*NOTICES, *(fault.named.kinds if fault.named else ())} - {"checkpoint_loaded"}
    found = [
        event
        for event in observations.events
        if event["t"] >= since_t and (event["kind"] in kinds or event.get("damaged"))
        if not (event["kind"] == "attempt_ended" and event.get("exit_code") == 0)
    ]
    if observations.ends:
        end = observations.ends[0]
        if (
            end.exit_code > 0 and end.t >= observations.struck_t
        ):  # negative: killed, by the drill too
            found.append({"kind": BY_COMMAND, "t": end.t, "said": end.last_words})
    return sorted(found, key=lambda event: float(event["t"]))


def _is_right(
    named: ExpectedReport | None, events: list[dict[str, Any]], observations: RunObservations
) -> bool:
    """Whether the fault was named, with its target and no other."""
    if named is None:
        return not any(event["kind"] in LOSSES for event in events)
    telling = [event for event in events if event["kind"] in named.kinds]
    if not any(re.search(named.words, _words(event), re.DOTALL) for event in telling):
        return False
    if named.who == "rank":
        return {event.get("rank") for event in events if event["kind"] in LOSSES or
                event["kind"] in named.kinds} == {observations.rank}  # fmt: skip
    if named.who == "node":
        return {event.get("node_rank") for event in telling} == {observations.node}
    return True


def _words(event: dict[str, Any]) -> str:
    """All that an event says, but when and where in the run."""
    skipped = ("t", "attempt", "generation", "workers", "pid", "exit_code")
    said = [
        f"{key} {value}" for key, value in event.items() if key not in skipped and value is not None
    ]
    return ", ".join(said).removeprefix("kind ")

"""Breakdown of a run's wall time, each part measured from events and metrics.

Step lines carry durations and no clock. So a generation's loop is laid out from the moment
its model was ready: its steps, evaluations and blocked saves one after the other. Time left
between that and the next event is named by the event that follows. Unexplained time is
reported as such.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.report.run_data import AttemptRecord, Line, RunRecord
from shardyard.rundir.jsonl import LOSSES

PHASES = {
    "productive": "steps whose result counts, without waiting for data",
    "compile": "torch compiled blocks, in the first step of each start",
    "data wait": "of those steps: waiting for micro-batches",
    "evaluation": "validation, and text generated before the end",
    "checkpoint-blocked": "training stood still for a save, the last one until it was durable",
    "paused": "the processes were stopped, or the machine was suspended",
    "profile": "profiles were begun and written",
    "sample": "text generated at the end",
    "init": "start of the processes, imports, model and optimizer",
    "rendezvous": "all processes meet",
    "load": "a checkpoint is verified and read",
    "lost work": "steps and evaluations that no checkpoint held when a process was lost",
    "detect": "from the last finished step to the notice of a lost process; its step under way too",
    "restart": "from that notice to the next rendezvous",
    "waiting": "between two attempts: from the last thing known of one to the start of the next",
    "teardown": "from the last durable state to the end of all processes",
    "unexplained": "not measured by the rows above",
}
"""Name of each phase and what it is, in the order in which they are shown."""

TRAINED = ("productive", "data wait")
"""Phases of the time trained."""

WAITING = "waiting"
"""Phase between two attempts; all others together are the running time."""

EFFECTIVE_DEFINITION = (
    "Effective share = time trained / running time. Time trained is productive time and data wait: "
    "steps whose result counts. Running time is the wall time without the waits between attempts."
)
"""Definition that every form of the report prints."""

_ALSO_LATER = ("tracked", "not_sent")
"""Kinds of events that `report --send` writes, too, long after an attempt."""

_ROUNDING_S = 1e-3
"""Below this the rest is noise: unix seconds as floats resolve 2e-7, and hundreds are summed."""


@dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """Wall time of one attempt and of the wait before it, split; the phases add up to it."""

    number: int
    began_t: float
    """Unix seconds; where the attempt before it ended."""
    seconds: float
    phases: dict[str, float]
    """Seconds by name; a phase that did not happen may be missing."""
    has_ended: bool


def account(record: RunRecord) -> list[AttemptTime]:
    """Split the wall time of each attempt that left any event.

    Together they are the run's, from the start of the first to the end of the last.
    """
    counted = {id(each) for each in (*record.steps, *_validated(record))}
    times: list[AttemptTime] = []
    for attempt in record.attempts:
        if attempt.events:
            since_t = times[-1].began_t + times[-1].seconds if times else None
            times.append(_split(attempt, counted, since_t=since_t))
    return times


def _validated(record: RunRecord) -> list[Line]:
    """Return events of validations and generated texts that count."""
    return [*record.counted_events("evaluated"), *record.counted_events("generated")]


def total_phases(attempts: list[AttemptTime]) -> dict[str, float]:
    """Seconds by phase over all attempts, in the order of ``PHASES``."""
    sums = {name: sum(a.phases.get(name, 0.0) for a in attempts) for name in PHASES}
    return {name: seconds for name, seconds in sums.items() if seconds or name == "unexplained"}


def effective_share(phases: Mapping[str, float]) -> float | None:
    """Return the share of wall time in steps whose result counts (ETTR); None: there was no time.

    Waiting between attempts is left out. A wait for a node, or for a person, is no measure of
    how the run copes with failures, and the plan predicts none of it.
    """
    seconds = running_s(phases)
    return trained_s(phases) / seconds if seconds > 0 else None


def trained_s(phases: Mapping[str, float]) -> float:
    """Return the time trained: seconds in steps whose result counts, with their data wait."""
    return sum(phases.get(name, 0.0) for name in TRAINED)


def running_s(phases: Mapping[str, float]) -> float:
    """Return the running time: the wall time without the waits between attempts."""
    return sum(phases.values()) - phases.get(WAITING, 0.0)


class _Sum(dict[str, float]):
    def add(self, phase: str, seconds: float) -> None:
        self[phase] = self.get(phase, 0.0) + seconds


def _split(attempt: AttemptRecord, counted: set[int], *, since_t: float | None) -> AttemptTime:
    """Args:
    since_t: Where the attempt before it ended; None: it is the first.
    """
    started_t = _beginning(attempt)
    began_t = started_t if since_t is None else since_t
    phases, clock_t = _Sum(), max(began_t, started_t)
    if since_t is not None:
        phases.add("waiting", clock_t - since_t)
    for generation in attempt.generations:
        clock_t = _add_start(phases, attempt, generation, clock_t)
        clock_t = _add_loop(phases, attempt, generation, clock_t, counted)
        clock_t = _add_end(phases, attempt, generation, clock_t)
    ended = attempt.last("attempt_ended")
    if ended is not None:
        phases.add("teardown", max(0.0, ended["t"] - clock_t))
    seen_t = [event["t"] for event in attempt.events if event["kind"] not in _ALSO_LATER]
    end_t = ended["t"] if ended is not None else max(clock_t, *seen_t, began_t)
    seconds = end_t - began_t
    rest_s = seconds - sum(phases.values())
    phases["unexplained"] = rest_s if abs(rest_s) > _ROUNDING_S else 0.0
    return AttemptTime(
        number=attempt.number,
        began_t=began_t,
        seconds=seconds,
        phases={name: phases[name] for name in PHASES if name in phases},
        has_ended=ended is not None,
    )


def _beginning(attempt: AttemptRecord) -> float:
    """When its manifest says, or the first event, or the meeting before that: the earliest."""
    first_t = attempt.events[0]["t"]
    rendezvous = attempt.first("rendezvous")
    if rendezvous is not None:
        first_t = min(first_t, rendezvous["t"] - rendezvous.get("seconds", 0.0))
    started_at = attempt.manifest.get("started_at")
    return float(min(first_t, started_at) if isinstance(started_at, float) else first_t)


def _add_start(phases: _Sum, attempt: AttemptRecord, generation: int, clock_t: float) -> float:
    """From the end of the generation before to the first step; returns the clock there."""
    rendezvous = attempt.first("rendezvous", generation)
    if rendezvous is not None:
        meeting_s = rendezvous.get("seconds", 0.0)
        before_s = max(0.0, rendezvous["t"] - meeting_s - clock_t)
        phases.add("rendezvous", meeting_s)
        phases.add("restart" if generation > min(attempt.generations) else "init", before_s)
        clock_t = max(clock_t, rendezvous["t"])
    ready = attempt.first("model_ready", generation)
    if ready is None:
        return clock_t
    loaded = attempt.first("checkpoint_loaded", generation) or attempt.first(
        "snapshot_restored", generation
    )
    load_s = min(loaded.get("seconds", 0.0) if loaded else 0.0, max(0.0, ready["t"] - clock_t))
    phases.add("load", load_s)
    phases.add("init", max(0.0, ready["t"] - clock_t - load_s))
    return float(max(clock_t, ready["t"]))


def _add_loop(
    phases: _Sum,
    attempt: AttemptRecord,
    generation: int,
    clock_t: float,
    counted: set[int],
) -> float:
    """Steps, evaluations and blocked saves; returns the clock after the last of them."""
    first, before = attempt.first("first_step", generation) or {}, None
    for line in attempt.lines:
        if line.get("generation", 0) != generation:
            continue
        step_s, wait_s = line.get("step_time_s") or 0.0, line.get("data_wait_s") or 0.0
        if before is not None:  # a script may write a line every few steps
            step_s *= max(1, line["step"] - before)
        elif line["step"] == first.get("step"):
            step_s = max(step_s, first.get("seconds") or 0.0)
        before = line["step"]
        clock_t += step_s
        if line["step"] == first.get("step") and "compile_s" in first:
            compile_s = max(0.0, min(first["compile_s"], step_s - wait_s))
            phases.add("compile", compile_s)
            step_s -= compile_s
        if id(line) in counted:
            phases.add("productive", step_s - wait_s)
            phases.add("data wait", wait_s)
        else:
            phases.add("lost work", step_s)
    for event in [*attempt.all("evaluated", generation), *attempt.all("generated", generation)]:
        phase = "evaluation" if id(event) in counted else "lost work"
        phases.add(phase, event.get("seconds", 0.0))
        clock_t += event.get("seconds", 0.0)
    for event in attempt.all("profiled", generation):
        profile_s = (event.get("profile") or {}).get("stood_still_s") or 0.0
        phases.add("profile", profile_s)
        clock_t += profile_s
    for event in attempt.all("paused", generation):  # the times of steps do not have it
        phases.add("paused", event.get("seconds", 0.0))
        clock_t += event.get("seconds", 0.0)
    for event in attempt.all("phase_started", generation):  # from the last step of one before it
        phases.add("init", event.get("seconds", 0.0))
        clock_t += event.get("seconds", 0.0)
    for event in attempt.all("checkpoint_started", generation):
        phases.add("checkpoint-blocked", event.get("blocked_s", 0.0))
        clock_t += event.get("blocked_s", 0.0)
    return clock_t


def _add_end(phases: _Sum, attempt: AttemptRecord, generation: int, clock_t: float) -> float:
    """Add the end of the generation: a loss, or its last step durable. Return the clock."""
    losses = [event for kind in LOSSES for event in attempt.all(kind, generation)]
    if losses:
        noticed_t = float(min(event["t"] for event in losses))
        if attempt.first("model_ready", generation) is None:
            phases.add("init", max(0.0, noticed_t - clock_t))
        else:
            phases.add("detect", max(0.0, noticed_t - clock_t))
        return max(clock_t, noticed_t)
    started = attempt.last("checkpoint_started", generation)
    durable = attempt.last("checkpoint_durable", generation)
    steps = [line["step"] for line in attempt.lines if line.get("generation", 0) == generation]
    if started and durable and steps and durable.get("step") == max(steps):
        # no step followed this save, so the loop waited for it
        phases.add("checkpoint-blocked", max(0.0, durable["t"] - started["t"]))
        clock_t = max(clock_t, durable["t"])
    finished = attempt.last("run_finished", generation)
    if finished is not None:
        phases.add("sample", finished.get("seconds", 0.0))
        clock_t = max(clock_t, finished["t"])
    return clock_t

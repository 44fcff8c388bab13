"""Report what happens in an attempt to a view, as it happens.

The command line has a view that draws (cli/progress.py); the view of plain lines is here.
Only events.jsonl and metrics.jsonl are read, as they grow. That costs the training no time,
and works for a run that was started elsewhere.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any, Protocol

from shardyard.config.resolved import Resolved
from shardyard.config.schema.observe import Observe
from shardyard.config.tasks import BITS_PER_BYTE, unit_of
from shardyard.io.files import open_plain, parse_json
from shardyard.io.polling import poll_until
from shardyard.log import info
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.rundir.script import read_script
from shardyard.trackers.service import WORDS
from shardyard.units import format_count, format_seconds

_POLL_S = 0.15
_RECENT_STEPS = 20

_PHASES = {
    "attempt_started": "loading",
    "rendezvous": "loading",
    "data_ready": "building the model",
    "reference_started": "the reference's log-probabilities",
    "reference_ready": "building the model",
    "model_ready": "first step",
    "checkpoint_loaded": "first step",
    "snapshot_restored": "first step",
    "first_step": "training",
    "worker_lost": "restarting",
    "worker_hung": "restarting",
    "node_lost": "restarting",
    "resized": "loading",
    "draining": "draining",
    "run_finished": "finished",
}
"""Activity of a run after an event of each kind."""

_BEFORE_THEIR_STEP = ("first_step",)
_AFTER_ALL_STEPS = ("worker_lost", "worker_hung", "node_lost", "run_finished", "attempt_ended")


def follow(
    run_dir: RunDir,
    attempt: int,
    process: Popen[Any] | None,
    *,
    view_factory: "ViewFactory",
    notes: deque[str] | None = None,
) -> None:
    """Show an attempt until its process ends; without a process, until it says that it ended.

    Args:
        view_factory: Makes the view that shows it.
        notes: Lines to show in between, taken from the left; a signal handler may append to it.
    """
    view = view_factory(read_resolved(run_dir.resolved(attempt)))
    story = AttemptReporter(attempt, view)
    events, metrics = Tail(run_dir.events), Tail(run_dir.metrics)

    def has_ended() -> bool:
        return process.poll() is not None if process else story.has_ended

    try:
        for _ in poll_until(has_ended, every_s=_POLL_S):
            while notes:
                view.line(notes.popleft())
            story.report(events.read(), metrics.read())
    finally:
        view.close()


def replay(run_dir: RunDir, print_line: Callable[[str], None], *, is_followed: bool) -> None:
    """Print the log lines of a run's newest attempt again, whether it runs or has ended.

    Args:
        is_followed: Whether to continue until the attempt ends.
    """
    numbers = run_dir.attempts()
    if not numbers:
        print_line("no step was trained yet")
        return
    view: View
    if read_script(run_dir, numbers[-1]) is not None:
        view = LogView(print_line, None, every=Observe().log_every)
    elif run_dir.resolved(numbers[-1]).is_file():
        view = log_view(read_resolved(run_dir.resolved(numbers[-1])), print_line)
    else:
        print_line("no step was trained yet")
        return
    story = AttemptReporter(numbers[-1], view)
    events, metrics = Tail(run_dir.events), Tail(run_dir.metrics)

    def has_ended() -> bool:
        return not is_followed or story.has_ended or not is_locked(run_dir.lease)

    for _ in poll_until(has_ended, every_s=_POLL_S):
        story.report(events.read(), metrics.read())


class Tail:
    """Reader of lines that were appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The objects of whole new lines; one that is no JSON is passed over."""
        return [content for line in self.lines() if (content := _parse(line))]

    def lines(self) -> list[bytes]:
        """Whole new lines; one still being written waits."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with os.fdopen(open_plain(self._path), "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return data[:whole].splitlines()


class View(Protocol):
    """Interface that shows a run."""

    def phase(self, words: str, *, is_logged: bool) -> None:
        """Show the run's current activity; ``is_logged`` where a line says the same."""

    def step(self, line: dict[str, Any], *, step_s: float | None) -> None:
        """A step was done; ``line`` is its line of metrics.jsonl, ``step_s`` what one takes now."""

    def length(self, steps: int) -> None:
        """The run ends at this step, on as many devices as it has now."""

    def evaluation(self, step: int, scores: Mapping[str, float | None]) -> None:
        """An evaluation was done; ``scores`` are its metrics by name."""

    def line(self, text: str) -> None:
        """Something worth a line of its own happened."""

    def close(self) -> None:
        """End the view: no more calls will come."""


ViewFactory = Callable[[Resolved], View]
"""Makes the view of an attempt that resolved to this."""


class AttemptReporter:
    """Turns events and metrics of one attempt into what a view shows."""

    def __init__(self, attempt: int, view: View) -> None:
        self.has_ended = False
        self._attempt = attempt
        self._view = view
        self._step_times_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._is_training = False
        view.phase("starting workers", is_logged=False)

    def report(self, events: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
        """Tell what two files say in the order in which it happened.

        Args:
            events: New lines of events.jsonl.
            lines: New lines of metrics.jsonl, read after the events.
        """
        waiting = deque(lines)
        for event in events:
            while waiting and _was_before(waiting[0], event):
                self.report_metrics(waiting.popleft())
            self.report_event(event)
        for line in waiting:
            self.report_metrics(line)

    def report_event(self, event: dict[str, Any]) -> None:
        if event.get("attempt") != self._attempt:
            return
        kind = event["kind"]
        text = describe_event(event)
        phase = _last_word(event) if kind == "attempt_ended" else _PHASES.get(kind)
        if event.get("compiles"):
            phase = f"{phase}, compiling the blocks (minutes, or seconds where torch has them)"
        if phase is not None:
            self._view.phase(phase, is_logged=text is not None)
        if text is not None:
            self._view.line(text)
        if "last_step" in event:
            self._view.length(event["last_step"])
        self.has_ended = self.has_ended or kind == "attempt_ended"

    def report_metrics(self, line: dict[str, Any]) -> None:
        if "eval" in line:
            if self._is_training:  # evaluations name no attempt; earlier ones come before it
                named = line.get("eval_sources", {}).items()
                of_sources = dict(_first_score(name, scores) for name, scores in named)
                self._view.evaluation(line["step"], {**line["eval"], **of_sources})
        elif line.get("attempt") == self._attempt:
            self._is_training = True
            if line["step_time_s"] is not None:
                self._step_times_s.append(line["step_time_s"])
            self._view.step(line, step_s=self._step_s())

    def _step_s(self) -> float | None:
        return median(self._step_times_s) if self._step_times_s else None


def _first_score(name: str, scores: dict[str, Any]) -> tuple[str, Any]:
    """Return what is shown of a set or a task: its loss, else its first metric."""
    metric = "loss" if "loss" in scores else next(iter(scores), "loss")
    return f"{name}/{metric}", scores.get(metric)


def _was_before(line: dict[str, Any], event: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl was written before an event; lines carry no time."""
    kind, step = event["kind"], event.get("step", -1)
    if kind in _AFTER_ALL_STEPS:
        step = math.inf
    elif kind in _BEFORE_THEIR_STEP:
        step -= 1
    if "eval" in line:  # names no generation; it follows a line of its own
        return bool(line["step"] <= step)
    ours = (line.get("attempt") or 0, line.get("generation") or 0, line["step"])
    return ours <= (event["attempt"], event["generation"], step)


def _last_word(attempt_ended: dict[str, Any]) -> str:
    code = attempt_ended.get("exit_code")
    return str(attempt_ended.get("outcome", "failed" if code else "finished"))


_TOLD_COMPILE_S = 5.0
"""From here on it is worth a line; torch keeps what it compiled, so a restart takes less."""
_STOPPED = "its processes were stopped (SIGSTOP, Ctrl-Z or a frozen container)"
_GAPS = {
    "not_compared": "it does not record these settings, so check yourself that they are unchanged",
    "lacked_buffers": "it was written before buffers were saved, and lacks",
}
"""Limits of an older checkpoint, in words."""


def describe_event(event: dict[str, Any]) -> str | None:
    """One line for an event that a person should see; None for the others."""
    match event["kind"]:
        case "worker_lost":
            cause = _first_sentence(event["cause"])  # all of it comes with the end, or the log
            return f"lost rank {event['rank']} on {event['node']}: {cause}"
        case "node_lost" | "node_left_out" | "store_moved" | "snapshot_not_copied":
            return _describe_node(event)
        case "worker_hung":
            who = "all ranks" if event["rank"] is None else f"rank {event['rank']}"
            where = f" on {event['node']}" if event["rank"] is not None else ""
            return f"{who}{where} hung in step {event['step']}: {event['reason']}"
        case "straggler":
            return describe_straggler(event)
        case "slow_link":
            return describe_slow_link(event)
        case "router_collapsed" | "callback_failed" | "not_sent":
            return _describe_warning(event)
        case "device_problem" | "device_well" | "program_error":
            return _describe_device(event)
        case "rendezvous" if event["generation"] > 0:
            return f"restarted with {event['world_size']} processes"
        case "resized":
            return f"resized from {event['world_size_before']} to {event['world_size']} processes"
        case "paused" | "stalled" | "stopping" | "draining":
            return _describe_pause(event)
        case "checkpoint_loaded" | "snapshot_restored":
            return _describe_begin(event)
        case "phase_started" | "first_step" | "run_finished":
            return _describe_start_or_end(event)
        case (
            "checkpoint_durable"
            | "checkpoint_abandoned"
            | "checkpoint_uploaded"
            | "checkpoint_not_uploaded"
            | "checkpoint_interval"
            | "snapshots_left_out"
        ):
            return _describe_save(event)
        case "profiled" | "profile_abandoned":
            return _describe_profile(event)
    return None


def _describe_start_or_end(event: dict[str, Any]) -> str | None:
    """Describe the start of a phase, a first step that compiled for long, or an early end."""
    if event["kind"] == "run_finished":
        is_early = event.get("is_out_of_patience")
        return f"stopped early at step {event['step']} by run.patience" if is_early else None
    if event["kind"] == "phase_started":
        length = f", samples of {event['seq_len']} tokens" if event.get("seq_len") else ""
        return f"phase {event['phase']} of {event['phases']}{length}"
    compile_s = event.get("compile_s", 0.0)
    if compile_s < _TOLD_COMPILE_S:
        return None
    took, of_it = format_seconds(event["seconds"]), format_seconds(compile_s)
    return f"the first step took {took}, {of_it} of it compilation; torch keeps it for restarts"


def _describe_pause(event: dict[str, Any]) -> str:
    """Why no step came, comes or is to come."""
    if event["kind"] == "paused":
        cause = "the machine was suspended" if event["what"] == "suspended" else _STOPPED
        return f"paused for {format_seconds(event['seconds'])} in step {event['step']}: {cause}"
    if event["kind"] == "stalled":
        return describe_stall(event["seconds"], event["usual_s"])
    if event["kind"] == "stopping":
        return f"stopping: {event['reason']}"
    return f"draining after {event['signal']}"


def _describe_profile(event: dict[str, Any]) -> str:
    if event["kind"] == "profiled":
        return f"a profile was taken from step {event['step']} on"
    return f"no profile was taken: {event['reason']}"


def _describe_warning(event: dict[str, Any]) -> str:
    """Describe what a run reports about itself, or what W&B or MLflow rejects."""
    if event["kind"] != "not_sent":
        return f"warning: {event['reason']}"
    service = WORDS.get(event["service"], event["service"])
    if not event.get("is_end"):
        return f"{service} accepts no data now: {event['reason']}"
    lines = event.get("lines")
    missing = "may not have all of the run" if lines is None else f"lacks {lines:,} lines of it"
    return f"{service} {missing}: {event['reason']}"


def _describe_save(event: dict[str, Any]) -> str:
    if event["kind"] == "checkpoint_durable":
        kept = event.get("not_removed")
        warning = f"\nwarning: {kept}" if kept else ""
        return f"checkpoint of step {event['step']} is durable{warning}"
    if event["kind"] == "checkpoint_uploaded":
        kept = event.get("not_removed")
        return f"checkpoint of step {event['step']} is in {event['to']}" + (
            f"\nwarning: {kept}" if kept else ""
        )
    if event["kind"] == "checkpoint_not_uploaded":
        return f"warning: step {event['step']} was saved here but not uploaded: {event['reason']}"
    if event["kind"] == "checkpoint_interval":
        return f"a checkpoint every {event['every']:,} steps from now on loses the least time"
    if event["kind"] == "snapshots_left_out":
        return f"no snapshots, checkpoints only: {event['reason']}"
    return f"step {event['step']} was not saved: it is not finite ({event['reason']})"


def _describe_begin(event: dict[str, Any]) -> str:
    """Describe from which step training continues, and what was skipped for it."""
    is_snapshot = event["kind"] == "snapshot_restored"
    where = f", whose state was in {_memory(event)}" if is_snapshot else ""
    note = f"; {event['note']}" if event.get("note") else ""
    damaged = "".join(
        f"; the checkpoint of step {each['step']} is damaged and was passed over "
        f"({'; '.join(each['reasons'])})"
        for each in event.get("damaged") or ()
    )
    gaps = "".join(
        f"; {words}: {', '.join(event[key])}" for key, words in _GAPS.items() if event.get(key)
    )
    begun = f"continuing from step {event['step']}{where}"
    return f"{begun}{damaged}{note}{gaps}{_rejected_snapshots(event)}"


def _memory(event: dict[str, Any]) -> str:
    return "another node's memory" if event.get("source") == "neighbour" else "memory"


def _rejected_snapshots(event: dict[str, Any]) -> str:
    return "".join(
        f"; the snapshot of step {refused['step']} is damaged and was passed over "
        f"({refused['reason']})"
        for refused in event.get("snapshots_refused") or ()
    )


def _describe_device(event: dict[str, Any]) -> str:
    """A rank whose numbers are wrong, or what a node's telemetry says of one of its devices."""
    if event.get("rank") is not None:
        return f"rank {event['rank']} on {event['node']} is odd: {event['cause']}"
    device = event.get("device")
    who = f"node {event['node']}" if device is None else f"device {device} on {event['node']}"
    if event["kind"] == "device_well":
        return f"{who} is well again: {event['cause']} no more"
    is_programs = event["kind"] == "program_error"
    words = "; mostly the program's fault, not the device's" if is_programs else ""
    return f"{who}: {event['cause']}{words}{_not_excluded_reason(event)}"


def describe_straggler(event: dict[str, Any]) -> str:
    """Describe how long a rank computes, or waits for samples, compared with its peers.

    Or describe that it is stopped now and then.
    """
    who = f"rank {event['rank']} on {event['node']}"
    if event.get("what") == "stopped":
        if event["is_over"]:
            return f"{who} is not a straggler any more: its process is not paused any more"
        times = f"its process is stopped now and then, {event['stopped_share']:.0%} of the time"
        return (
            f"{who} is a straggler: {times} (SIGSTOP, or job control){_not_excluded_reason(event)}"
        )
    compute, peers = (format_seconds(event[key]) for key in ("compute_s", "peers_s"))
    held_up = " on average, held up now and then" if event.get("is_held_up") else ""
    is_data = event.get("what") == "data"
    does = "computes and waits for samples for" if is_data else "computes"
    times = f"it {does} {compute} a step{held_up}, its peers {peers}"
    if event["is_over"]:
        return f"{who} is not a straggler any more: {times}"
    since = ", since the start" if event.get("is_since_start") else ""
    stays = _not_excluded_reason(event)
    return f"{who} is a straggler, {event['factor']:.1f} times as slow{since}: {times}{stays}"


def describe_slow_link(event: dict[str, Any]) -> str:
    """Describe the time of a group's collectives compared with those of similar groups."""
    who = f"the link between ranks {span(event['ranks'])} on {', '.join(event['nodes'])}"
    took, peers = (format_seconds(event[key]) for key in ("exchange_s", "peers_s"))
    times = f"their collectives take {took} a step, those of their peers {peers}"
    if event["is_over"]:
        return f"{who} is as quick as others again: {times}"
    since = ", since the start" if event.get("is_since_start") else ""
    return f"{who} is slow, {event['factor']:.1f} times as long{since}: {times}"


def span(ranks: Sequence[int]) -> str:
    """Ranks that are evenly apart, in few words: 0 to 7, or 0, 8, ... 56."""
    if len(ranks) <= 3:
        return ", ".join(map(str, ranks))
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _not_excluded_reason(event: dict[str, Any]) -> str:
    """Why a rule of elastic.leave_out_for was not followed."""
    return f"; not left out: {event['stays']}" if event.get("stays") else ""


def _describe_node(event: dict[str, Any]) -> str:
    who = f"node {event['node_rank']} ({event['node']})"
    if event["kind"] == "node_lost":
        return f"lost {who}: {event['cause']}"
    if event["kind"] == "node_left_out":
        return f"{who} is left out: {event['cause']}"
    if event["kind"] == "snapshot_not_copied":
        return f"snapshots of {who} are only on that node: {event['reason']}"
    return f"{who} takes the place of the lost one"


def describe_stall(seconds: float, typical_s: float | None) -> str:
    """Describe how long no step has come, and how long one usually takes."""
    if not seconds:
        return "steps come again"
    usual = "" if typical_s is None else f" (usual {format_seconds(typical_s)})"
    return f"no step for {format_seconds(seconds)}{usual}"


_TOLD_BY_LOSS = ("perplexity", BITS_PER_BYTE)
"""Metrics of an evaluation that are the loss in another unit."""


class LogView:
    """Plain lines, one every so many steps."""

    def __init__(
        self,
        print_line: Callable[[str], None],
        total_steps: int | None,
        *,
        every: int,
        unit: str = "token",
    ) -> None:
        """Args:
        total_steps: None: not known, of a script's loop.
        unit: Unit in which the speed is reported.
        """
        self._print_line = print_line
        self._unit = unit
        self._total_steps = total_steps
        self._every = every
        self._phase = ""
        self._seen: int | None = None
        """Step of the newest line."""

    def phase(self, words: str, *, is_logged: bool) -> None:
        is_new, self._phase = words != self._phase, words
        if is_new and not is_logged:
            self.line(words)

    def step(self, line: dict[str, Any], *, step_s: float | None) -> None:
        step = line["step"]
        before = step - 1 if self._seen is None else min(self._seen, step - 1)
        self._seen = step
        # a script may write a line every few steps
        if step // self._every > before // self._every or step == self._total_steps:
            facts = "  ".join(describe_step(line, self._total_steps, step_s, self._unit))
            self.line(f"{self._place(step)}  {facts}")

    def length(self, steps: int) -> None:
        self._total_steps = steps

    def evaluation(self, step: int, scores: Mapping[str, float | None]) -> None:
        facts = "  ".join(describe_scores(scores))
        self.line(f"{self._place(step)}  evaluation {facts}")

    def line(self, text: str) -> None:
        self._print_line(text)

    def close(self) -> None:
        """End the view, which holds no resources."""

    def _place(self, step: int) -> str:
        return f"step {step}" if self._total_steps is None else f"step {step}/{self._total_steps}"


def log_view(resolved: Resolved, print_line: Callable[[str], None] = info) -> View:
    """A view whose lines are logged, as everything else is."""
    recipe = resolved.recipe
    unit = unit_of(recipe.task.name)
    return LogView(print_line, resolved.steps, every=recipe.observe.log_every, unit=unit)


def describe_step(
    line: dict[str, Any], total_steps: int | None, step_s: float | None, unit: str = "token"
) -> list[str]:
    """Loss, speed and remaining time of a line of metrics.jsonl, in a few words each."""
    facts = [f"loss {number_text(line['loss'])}"]
    scale = line.get("loss_scale")
    if scale is not None:  # of a step whose gradients overflowed it says why there is no norm
        skipped = ", skipped" if line.get("grad_norm", 0.0) is None else ""
        facts.append(f"loss scale {scale:,.6g}{skipped}")
    steps_left = 0 if total_steps is None else total_steps - line["step"]
    if line["tokens_per_s"] is not None and step_s:
        # of a step like this one, but as long as most are: single steps jump
        rate = line["tokens_per_s"] * line["step_time_s"] / step_s
        facts.append(f"{format_count(rate)} {unit}s/s")
    if step_s is not None:
        facts.append(f"{format_seconds(step_s)}/step")
    if step_s is not None and steps_left > 0:
        facts.append(f"{format_seconds(step_s * steps_left)} left")
    return facts


def describe_scores(scores: Mapping[str, float | None]) -> list[str]:
    """An evaluation in a few words each: its loss, and what a loss does not tell."""
    shown = [name for name in scores if name not in ("loss", *_TOLD_BY_LOSS)]
    return [f"{name} {number_text(scores.get(name))}" for name in ("loss", *shown)]


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].partition(". ")[0].rstrip(".:")


def number_text(value: float | None) -> str:
    """A loss in few words."""
    return "not finite" if value is None else f"{value:.4g}"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None

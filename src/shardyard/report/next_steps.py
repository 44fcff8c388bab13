"""What to change after a run: findings with their thresholds, levers with their gain, commands.

``control/suggestions.py`` plans the levers, because the report imports nothing above it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardyard.report.against_plan import memory_attempt, memory_by_rank
from shardyard.report.run_data import Line, RunRecord
from shardyard.units import format_bytes, format_percent, format_seconds

DATA_WAIT_SHARE = 0.05
"""Share of the step time from which waiting for data is a finding."""

COMMUNICATION_SHARE = 0.15
"""Share of the step time from which exposed communication is a finding."""

FULL_SHARE = 0.92
"""Share of a device's memory from which its peak is a finding."""

EMPTY_SHARE = 0.5
"""Share of a device's memory below which its peak is a finding."""

_COMMUNICATION = (
    "tensor parallel", "context parallel", "expert parallel", "data parallel", "pipeline",
    "pipeline sends", "other collectives",
)  # fmt: skip
"""Terms of profiles and plans that are exposed communication."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A change of settings, and what it does by the plan, from what was measured."""

    name: str
    what: str
    settings: tuple[str, ...]
    """Overrides to paste."""
    step_time_s: float
    """Measured step time x planned step time with the change / planned step time of the run."""
    gain: float
    """Share by which a step takes less time."""
    device_bytes: int
    """Planned memory of a device."""
    note: str
    """Effect on the training result or on rounding; empty: none."""

    @property
    def effect(self) -> str:
        """Description, memory and effect on the result, in words."""
        note = f"; it {self.note}" if self.note else ""
        return f"{self.what}, {format_bytes(self.device_bytes)} of device memory{note}"

    def words(self, measured_s: float) -> str:
        """Gain and effect in words.

        Args:
            measured_s: Step time of the run.
        """
        return (
            f"{format_seconds(self.step_time_s)} a step predicted instead of "
            f"{format_seconds(measured_s)} measured (-{format_percent(self.gain)}): {self.effect}"
        )


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to copy."""

    purpose: str
    command: str


def findings(record: RunRecord, lines: tuple[Line, ...]) -> tuple[str, ...]:
    """Return a sentence on each of data wait, communication and memory that is a finding.

    Args:
        lines: Steps of the main number of ranks.
    """
    return (*_data_wait(record, lines), *_communication(record), *_memory(record))


def _data_wait(record: RunRecord, lines: tuple[Line, ...]) -> Iterator[str]:
    steps_s = sum(line.get("step_time_s") or 0.0 for line in lines)
    share = sum(line.get("data_wait_s") or 0.0 for line in lines) / steps_s if steps_s else 0.0
    if share >= DATA_WAIT_SHARE:
        yield (
            f"Data wait: {format_percent(share)} of the step time waited for samples (a finding "
            f"from {DATA_WAIT_SHARE:.0%}). Try more {_feed_setting(record)}, or faster storage."
        )


def _feed_setting(record: RunRecord) -> str:
    """The setting by which samples come faster."""
    resolved = record.resolved
    if resolved is None:
        return "data.prefetch_steps"
    if resolved.data.item_kind is not None:
        return "data.module_workers"
    return "data.prefetch_steps" if resolved.network is None else "data.images.threads"


def _communication(record: RunRecord) -> Iterator[str]:
    """The newest profile measured it; without a profile, the plan's prediction is named as such."""
    if record.profiles:
        newest = record.profiles[-1]
        terms = {term.name: term.measured_s for term in newest.terms if not term.is_part}
        step_s, source = newest.step_s, f"measured by the profile of step {newest.step}"
    elif record.plan is not None and record.plan.step_s is not None:
        terms = {term.name: term.seconds for term in record.plan.time}
        step_s, source = record.plan.step_s, "predicted by the plan, not measured"
    else:
        return
    exposed = {name: terms[name] for name in _COMMUNICATION if terms.get(name)}
    share = sum(exposed.values()) / step_s if step_s else 0.0
    if share >= COMMUNICATION_SHARE:
        most = max(exposed, key=exposed.__getitem__)
        yield (
            f"Communication: {format_percent(share)} of the step time is exposed communication, "
            f"most of it {most} ({source}; a finding from {COMMUNICATION_SHARE:.0%})."
        )


def _memory(record: RunRecord) -> Iterator[str]:
    limit = None if record.plan is None else record.plan.memory_limit_bytes
    rows = memory_by_rank(record, memory_attempt(record))
    peaks = [max(row.get("peak_bytes") or 0, row.get("reserved_bytes") or 0) for row in rows]
    if record.plan is None or not limit or not any(peaks):
        return
    share, words = max(peaks) / limit, f"{format_bytes(max(peaks))} at peak"
    if share >= FULL_SHARE:
        saving = next(iter(record.plan.memory_savings), None)
        fix = "" if saving is None else f" {saving.setting} takes {format_bytes(saving.bytes)} off."
        yield (
            f"Memory: {words} is {format_percent(share)} of a device's {format_bytes(limit)} (a "
            f"finding from {FULL_SHARE:.0%}).{fix}"
        )
    is_cpu = record.resolved is not None and record.resolved.recipe.cluster.device == "cpu"
    if share < EMPTY_SHARE and not is_cpu:
        yield (
            f"Memory: {words} is only {format_percent(share)} of a device's {format_bytes(limit)} "
            f"(a finding below {EMPTY_SHARE:.0%}). A larger optim.micro_batch or less "
            "recomputation may be faster."
        )


def commands(record: RunRecord) -> tuple[Command, ...]:
    """Return the commands to copy: resume if it can, export, compare, open the page."""
    return tuple(_commands(record))


def _commands(record: RunRecord) -> Iterator[Command]:
    run, handle = record.run, record.run.handle
    if record.state in ("drained", "failed", "lost") and record.script is None:
        yield Command(purpose="continue the run", command=f"shardyard resume {handle}")
    settings = None if record.resolved is None else record.resolved.recipe.run
    if record.state == "finished" and settings is not None and settings.steps is not None:
        more = f"shardyard resume {handle} run.steps={2 * settings.steps}"
        yield Command(purpose="train as many steps again", command=more)
    if run.latest_checkpoint() is not None and _can_export(record):
        export = f"shardyard export {handle} --to {run.run_id}-model"
        yield Command(purpose="export the model in Hugging Face format", command=export)
    other = f"shardyard compare {handle} OTHER_RUN"
    yield Command(purpose="compare it with another run", command=other)
    page = run.report_html.resolve().as_uri()
    yield Command(purpose="open this page", command=f"python3 -m webbrowser {page}")


def _can_export(record: RunRecord) -> bool:
    resolved = record.resolved
    return resolved is not None and (resolved.shape is not None or resolved.network is not None)

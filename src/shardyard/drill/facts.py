"""What one run of a drill has left, read from its folder: the raw material of the judgement."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardyard.drill.bits import Bits
from shardyard.io.files import parse_json, read_json_object
from shardyard.rundir.jsonl import read_counted, read_lines
from shardyard.rundir.layout import RunDir

_SAMPLES_MARK = "@shardyard-samples "
"""As observe/samples.py writes it into the ranks' logs."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one command of a case ended."""

    command: str
    t: float
    """Unix seconds at which it had ended."""
    exit_code: int
    last_words: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run left behind, outside of its folder and in it."""

    processes: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    scratch: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    half_written: tuple[str, ...] = ()
    """In the run's folder: half checkpoints that no later save removed."""

    def words(self) -> str:
        """What it is, or nothing."""
        found = {name.replace("_", " "): value for name, value in asdict(self).items() if value}
        return ", ".join(f"{len(value)} {name}" for name, value in found.items())


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One run: of a fault, or the twin that nothing disturbed."""

    fault: str
    number: int
    """Of the repetitions of this fault, from 0."""
    seed: int
    rank: int
    """The target, or one of the node that is the target."""
    node: int
    """Rank of the target's node."""
    asked_step: int
    """At which the fault was to strike."""
    struck_t: float | None
    """Unix seconds at which it struck; None: it never did."""
    missed: str = ""
    """Why it never did."""
    notes: dict[str, Any] = field(default_factory=dict)
    ends: tuple[Ended, ...] = ()
    resumes: int = 0
    """Times a person would have had to type `shardyard resume`."""
    given_up: str = ""
    """Why the drill ended the run by itself."""
    events: tuple[dict[str, Any], ...] = ()
    losses: dict[int, float | None] = field(default_factory=dict)
    """By step; the last line of a step stands."""
    worlds: dict[int, int] = field(default_factory=dict)
    """Ranks that computed a step."""
    steps_again: int = 0
    """Finished steps that were done again."""
    samples: dict[int, int] = field(default_factory=dict)
    """Position in the stream -> sample, as the ranks logged them."""
    digests: dict[str, str] = field(default_factory=dict)
    """File of the last checkpoint -> SHA-256."""
    last_checkpoint: int | None = None
    left: Left = Left()
    bits: Bits | None = None
    """Beside the twin, tensor by tensor; None: the files of the last checkpoint are the twin's, or
    there are none."""

    @property
    def has_finished(self) -> bool:
        """Whether the run came to its end."""
        return any(event["kind"] == "run_finished" for event in self.events)

    def to_json(self) -> dict[str, Any]:
        """All but the samples, which are many."""
        content = asdict(self)
        content["samples"] = len(self.samples)
        return content


def read_left_in(run: RunDir) -> dict[str, Any]:
    """The fields of ``Facts`` that stand in a run's folder."""
    lines = read_counted(run.metrics)
    saved = run.checkpoint_steps()
    return {
        "events": tuple(read_lines(run.events)),
        "losses": {line["step"]: line["loss"] for line in lines.steps},
        "worlds": {line["step"]: line["world_size"] for line in lines.steps},
        "steps_again": len(lines.lost),
        "samples": _samples(run.path.glob("logs/attempt-*/rank-*.log")),
        "digests": _digests(run.checkpoint(saved[-1])) if saved else {},
        "last_checkpoint": saved[-1] if saved else None,
    }


def _digests(checkpoint: Path) -> dict[str, str]:
    files = read_json_object(checkpoint / "manifest.json")["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def _samples(logs: Iterable[Path]) -> dict[int, int]:
    samples: dict[int, int] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(_SAMPLES_MARK) and line.endswith("}"):
                entry = parse_json(line.removeprefix(_SAMPLES_MARK))
                samples.update(zip(entry["positions"], entry["samples"], strict=True))
    return dict(sorted(samples.items()))

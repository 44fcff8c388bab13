"""Observations of a drilled run: its facts, its first differing bit, and its leftovers."""

import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shardyard.drill.sandbox import SHARED_MEMORY, is_in_namespaces
from shardyard.drill.scene import TaggedProcesses, words_of
from shardyard.errors import ShardyardError
from shardyard.io.files import parse_json, read_json_object
from shardyard.io.polling import wait_for
from shardyard.own_processes import python_program
from shardyard.rundir.jsonl import read_counted, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked

Outcome = Literal["equal", "different", "not proven"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_MODULE = "shardyard.checkpoint.bitwise_compare"


@dataclass(frozen=True, kw_only=True)
class BitDiff:
    """Comparison of two runs; the fields are those of the program's answer."""

    outcome: Outcome
    why: str
    step: int | None = None
    """The first that differs."""
    tensor: str | None = None
    """The first that differs in the checkpoint of that step, or in the first one after it."""
    rank: int | None = None
    """Rank that wrote its first element that differs."""


def compare_bits(reference: RunDir, run: RunDir) -> BitDiff:
    """Compare all steps and checkpoints that two runs both have.

    Raises:
        ShardyardError: A checkpoint cannot be read.
    """
    program = python_program(_MODULE, str(reference.path), str(run.path))
    answer = subprocess.run(
        program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        reply: dict[str, Any] = parse_json(answer.stdout)
    except ValueError as error:
        raise ShardyardError(
            f"{reference.path} and {run.path} cannot be compared: {answer.stderr.strip()[-300:]}"
        ) from error
    return BitDiff(**reply)


# What one run of a drill has left, read from its folder: the raw material of the judgement.

_SAMPLES_MARK = "@shardyard-samples "
"""Mark that observe/metrics.py writes into the ranks' logs."""


@dataclass(frozen=True, kw_only=True)
class CommandExit:
    """End of one command of a case."""

    command: str
    t: float
    """Unix seconds at which it had ended."""
    exit_code: int
    last_words: str


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """Leftovers of a run, outside of its folder and in it."""

    processes: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    scratch: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    half_written: tuple[str, ...] = ()
    """In the run's folder: half checkpoints that no later save removed."""

    def words(self) -> str:
        """Describe the leftovers; empty if there are none."""
        found = {name.replace("_", " "): value for name, value in asdict(self).items() if value}
        return ", ".join(f"{len(value)} {name}" for name, value in found.items())


@dataclass(frozen=True, kw_only=True)
class RunObservations:
    """One run: of a fault, or the undisturbed twin."""

    fault: str
    number: int
    """Number among the repetitions of this fault, from 0."""
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
    ends: tuple[CommandExit, ...] = ()
    resumes: int = 0
    """Times a person would have had to type `shardyard resume`."""
    given_up: str = ""
    """Why the drill ended the run by itself."""
    events: tuple[dict[str, Any], ...] = ()
    losses: dict[int, float | None] = field(default_factory=dict)
    """Loss by step; the last line of a step counts."""
    worlds: dict[int, int] = field(default_factory=dict)
    """Ranks that computed a step."""
    steps_again: int = 0
    """Finished steps that were done again."""
    samples: dict[int, int] = field(default_factory=dict)
    """Position in the stream -> sample, as the ranks logged them."""
    digests: dict[str, str] = field(default_factory=dict)
    """File of the last checkpoint -> SHA-256."""
    last_checkpoint: int | None = None
    left: Leftovers = Leftovers()
    bits: BitDiff | None = None
    """Comparison with the twin, tensor by tensor.

    None: the files of the last checkpoint are the twin's, or there are none.
    """

    @property
    def has_finished(self) -> bool:
        """Whether the run came to its end."""
        return any(event["kind"] == "run_finished" for event in self.events)

    def to_json(self) -> dict[str, Any]:
        """All but the samples, which are many."""
        content = asdict(self)
        content["samples"] = len(self.samples)
        return content


def read_observations(run: RunDir) -> dict[str, Any]:
    """Return the fields of ``RunObservations`` that are in a run's folder."""
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


# What a run leaves outside of its folder: looked for before it starts and after it ended.

_CACHES = ("torchinductor_",)
"""Beginnings of what engines keep in the scratch folder on purpose."""
_LEAVING_S = 20.0
"""For processes that end by themselves, and what goes with them."""
_POLL_S = 0.2
_LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


class Baseline:
    """State of the machine before the run."""

    def __init__(self) -> None:
        self._shared = _shared_names()
        self._ports = set(_listening())

    def leftovers(self, run: RunDir, marked: TaggedProcesses, scratch: Path) -> Leftovers:
        """Return new leftovers, after processes had time to end."""
        processes = marked.wait_for_end(_LEAVING_S)
        wait_for(
            lambda: not (self._new_names() or _scratch_names(scratch)),
            every_s=_POLL_S, within_s=_POLL_S * 10,
        )  # fmt: skip
        return Leftovers(
            processes=tuple(f"{pid}: {' '.join(words_of(pid))[:120]}" for pid in processes),
            shared_memory=tuple(self._new_names()),
            ports=tuple(sorted(_ports_of(processes) - self._ports)),
            scratch=tuple(_scratch_names(scratch)),
            locks=(run.lease.name,) if is_locked(run.lease) else (),
            half_written=tuple(path.name for path in run.checkpoints.glob("*.tmp")),
        )

    def _new_names(self) -> list[str]:
        """Return new names in /dev/shm; empty where others use it too, as owners are unknown."""
        return sorted(_shared_names() - self._shared) if is_in_namespaces() else []


def _shared_names() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _scratch_names(scratch: Path) -> list[str]:
    return sorted(entry.name for entry in scratch.iterdir() if not entry.name.startswith(_CACHES))


def _listening() -> dict[int, str]:
    """Port -> inode of each listening socket of TCP."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS:
                found[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return found


def _ports_of(pids: list[int]) -> set[int]:
    """Return the ports on which processes listen; the kernel closes ports without an owner."""
    by_inode = {f"socket:[{inode}]": port for port, inode in _listening().items()}
    found = set()
    for pid in pids:
        try:
            names = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {by_inode[name] for name in names if name in by_inode}
    return found

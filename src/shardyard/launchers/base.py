"""Interface of every launcher: it renders a request, submits it, and answers for the job.

``render`` is pure: it returns exactly what would be sent, `--dry-run` prints it, tests
compare it. ``submit`` writes each object into the ledger before it is created and confirms
it after. A launcher's ``Capabilities`` hold what it can do beyond that; docs/launch.md has
its table from them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from shardyard.config.paths import NodePaths
from shardyard.config.resolved import RollbackTarget
from shardyard.config.schema.launch import Launch
from shardyard.config.schema.recipe import Recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import Problem, RequestError, ShardyardError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.io.files import parse_json
from shardyard.io.polling import poll_until
from shardyard.launchers.bundle import Bundle
from shardyard.launchers.ledger import SIDE_DETAIL, EntryForm, Ledger, Submission
from shardyard.launchers.log_markers import NONCE_VARIABLE
from shardyard.launchers.node_rank import NodeAssignment, Variables
from shardyard.launchers.registry import load_launcher
from shardyard.plugins import PlugIn, installed, load_object
from shardyard.rundir.network import BENCH_VARIABLE, NetworkBench
from shardyard.rundir.script import SCRIPT_VARIABLE, ScriptCommand
from shardyard.units import parse_seconds

NODE_ASSIGNMENT_READERS: dict[str, str] = {
    "slurm": "shardyard.launchers.slurm.node_rank:in_job",
    "jobset": "shardyard.launchers.kubernetes.node_rank:in_jobset",
    "trainjob": "shardyard.launchers.kubernetes.node_rank:in_trainjob",
    "pytorchjob": "shardyard.launchers.kubernetes.node_rank:in_pytorchjob",
    "aws-batch": "shardyard.launchers.aws_batch.node_rank:in_job",
}
"""Word behind ``--place`` -> what reads a node's place; a light file, apart from its launcher."""
EXPLICIT = "given"
"""The word of a place that other options say."""


class JobState(StrEnum):
    """State of a job; every scheduler's states map to one, and an unknown one is an error."""

    WAITING = "waiting"
    """Submitted, not on any node yet."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    DRAINED = "drained"
    """It was asked to stop, saved, and can be resumed: exit code 143."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    GONE = "gone"
    """The scheduler knows it no more."""

    @property
    def is_over(self) -> bool:
        """Whether it will not change by itself."""
        return self not in (JobState.WAITING, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Differences between launchers."""

    resizes: tuple[str, ...]
    """Kinds of its jobs whose number of nodes can be changed while they run (`Resizer`)."""
    requeues: bool
    """The scheduler starts it again after a lost node or at its time limit."""
    needs_image: bool
    shares_folder: bool
    """The run's folder is on a file system that this machine sees too."""
    secrets: tuple[Literal["env", "file", "k8s", "aws-sm", "ssm"], ...]
    """Kinds of reference that its jobs can resolve."""
    is_this_machine: bool = False
    """Its nodes are the machine of the command line: probed for it, free unless it is rented."""


SideKind = Literal["prepare", "export", "fetch", "probe"]
SIDE_KINDS: tuple[SideKind, ...] = get_args(SideKind)


@dataclass(frozen=True, kw_only=True)
class SideJob:
    """Work of one node without accelerators, where the run's files are."""

    kind: SideKind
    arguments: dict[str, Any] = field(default_factory=dict)
    """Plain JSON."""

    @property
    def label(self) -> str:
        """``<kind>-<digest of the arguments>``: the same for what is the same work."""
        # By this label a repeated command finds the side job that an interrupted one left.
        return f"{self.kind}-{hashlib.sha256(self.to_text().encode()).hexdigest()[:12]}"

    def to_text(self) -> str:
        """Return the text that is given to its node."""
        content = {"kind": self.kind, "arguments": self.arguments}
        # Sorted, so that the label's digest does not depend on the order of the arguments.
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_text(text: str) -> "SideJob":
        """Read ``to_text``.

        Raises:
            RequestError: It is none, or of a kind that another version knows.
        """
        try:
            content = parse_json(text)
            kind, arguments = content["kind"], content["arguments"]
        except (ValueError, KeyError, TypeError):
            kind, arguments = None, None
        if kind in SIDE_KINDS and isinstance(arguments, dict):
            return SideJob(kind=kind, arguments=arguments)
        raise RequestError(
            f"--side {text[:100]!r} is not a side job of this version of Shardyard: "
            f"{', '.join(SIDE_KINDS)}. The command line writes it; if both are not of one version, "
            "let the nodes' image or Python have that of the command line."
        )


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """All that a launcher renders from."""

    run_id: str
    recipe: Recipe
    recipe_text: str
    """YAML, overrides applied; what the nodes read."""
    nodes: int
    devices_per_node: int
    cluster: ClusterHardware | None
    """None: the machines are not in the catalogue, and their devices are not rendered."""
    run_dir: str
    """The run's folder as the nodes see it."""
    code: Bundle | None = None
    """launch.code, packed. Launchers that share the run's folder find it there, too."""
    is_resume: bool = False
    nonce: str = ""
    """New with each submission: what node 0 marks its lines with (launchers/log_markers.py)."""
    submission: int = 1
    """Number of the submission, of the run or the side job; part of a job's name if needed."""
    side: SideJob | None = None
    """None: the training."""
    launched_by: PlugIn | None = None
    """The launcher, where a package adds it."""
    block_left_s: float | None = None
    """For how long the instances of a capacity block are there; None: they are in none."""
    bench: NetworkBench | None = None
    """Network benchmark that its nodes run in place of a training."""
    back_to: RollbackTarget | None = None
    """Earlier step that node 0 goes back to before it trains."""
    script: ScriptCommand | None = None
    """Script that its nodes run in place of a training."""

    @property
    def time_limit_s(self) -> float | None:
        """Return the job's limit: launch.time_limit, or the rest of a capacity block if shorter."""
        asked = self.recipe.launch.time_limit
        limits = [] if asked is None else [parse_seconds(asked)]
        # Schedulers know no clock time, only a limit that counts from a job's start.
        limits += [] if self.block_left_s is None else [self.block_left_s]
        return min(limits, default=None)

    @property
    def side_suffix(self) -> str:
        """Ends the name of a side job, which no other job of any run has; empty: the training."""
        if self.side is None:
            return ""
        # The submission is part of it: a second try of the same work needs a name that is free.
        text = f"{self.run_id}/{self.side.label}/{self.submission}"
        return f"-{self.side.kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def side_details(self) -> dict[str, str]:
        """Return the details of a side job's ledger lines that a training's do not have."""
        return {} if self.side is None else {SIDE_DETAIL: self.side.label}

    @property
    def origin(self) -> str:
        """Marks what a submission makes: two users may have runs of one id. Tells no nonce."""
        # Others can read tags and annotations, and could forge marked lines with the nonce itself.
        return hashlib.sha256(self.nonce.encode()).hexdigest()[:16] if self.nonce else ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every node entry is given."""
        ours = {NONCE_VARIABLE: self.nonce} if self.nonce else {}
        if self.launched_by is not None:
            ours[_LAUNCHER_VARIABLE] = json.dumps(self.launched_by.to_json())
        if self.bench is not None:
            ours[BENCH_VARIABLE] = self.bench.to_text()
        if self.script is not None:
            ours[SCRIPT_VARIABLE] = self.script.to_text()
        if self.back_to is not None:
            # Node 0 goes back once per submission: a requeued job must not undo its progress again.
            asked = {"step": self.back_to.step, "skip_steps": self.back_to.skip_steps}
            ours[_BACK_TO_VARIABLE] = json.dumps({**asked, "submission": self.submission})
        # Ours come last, so that launch.env cannot replace the nonce of node 0's marked lines.
        return {**self.recipe.launch.env, **ours}


_LAUNCHER_VARIABLE = "SHARDYARD_LAUNCHER"
"""Tells node 0, which need not have the package, whose launcher has started it."""


def pop_launched_by(environ: MutableMapping[str, str]) -> PlugIn | None:
    """The launcher that started this node; None: it is one of ours, or does not say."""
    try:
        return PlugIn(object_reference="", **parse_json(environ.pop(_LAUNCHER_VARIABLE, "")))
    except (ValueError, TypeError, RecursionError):
        return None


_BACK_TO_VARIABLE = "SHARDYARD_BACK_TO"


def pop_back_to(environ: MutableMapping[str, str]) -> RollbackTarget | None:
    """The step that this job was asked to go back to; None: it continues from the newest.

    Raises:
        RequestError: The variable is none that the command line wrote.
    """
    text = environ.pop(_BACK_TO_VARIABLE, "")
    if not text:
        return None
    try:
        back_to = RollbackTarget(**parse_json(text), is_requested=True)
    except (ValueError, TypeError, RecursionError):
        # Step 0 fails the check below, which has the message for both mistakes.
        back_to = RollbackTarget(step=0)
    numbers = (back_to.step, back_to.skip_steps, back_to.submission)
    # Not isinstance: JSON's true and false become bool, which is an int.
    if any(type(number) is not int or number < 0 for number in numbers) or back_to.step < 1:
        raise RequestError(
            f"{_BACK_TO_VARIABLE}={text[:100]!r} names no step to go back to. The command line "
            "sets it: leave it out of launch.env, and use `shardyard resume RUN --step N`."
        )
    return back_to


ORIGIN_DETAIL = "origin"
"""Detail of an object in the ledger: ``LaunchRequest.origin``."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Exactly what would be sent."""

    launcher: str
    run_id: str
    name: str
    """Name of the job, as the scheduler shows it."""
    text: str
    """Output of `--dry-run`: a script, a YAML stream, JSON."""
    objects: tuple[dict[str, Any], ...] = ()
    """The same as plain values, in the order of creation, where there are several."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that submit writes next to the run: name -> content."""
    warnings: tuple[str, ...] = ()
    """Settings that are allowed but may be regretted; shown on stderr before anything is sent."""
    target: dict[str, str] = field(default_factory=dict)
    """Target, as far as the recipe gives it: region, context, namespace."""
    side: dict[str, str] = field(default_factory=dict)
    """``LaunchRequest.side_details``, for the ledger."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Result of removing a ledger's objects, for a person: kind and name of each object."""

    removed: list[str] = field(default_factory=list)
    not_owned: list[str] = field(default_factory=list)
    """Found under the name or number of a line, but not the run's: not touched."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The scheduler's report on a job."""

    state: JobState
    reason: str
    """In words: why it waits, how it ended."""
    is_unplaced: bool = False
    """Whether it waits because the scheduler finds no node that can hold it."""
    exit_code: int | None = None
    nodes: tuple[tuple[str, str], ...] = ()
    """Name and state of each."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of output."""

    source: str
    """``node 0``, ``rank 3``; prefixes merged logs."""
    text: str


def mounted_paths(launch: Launch, *, launcher: str) -> NodePaths:
    """Return the view of containers that get only ``launch.volumes``, and no other files."""
    volumes = tuple(volume.path for volume in launch.volumes)
    return NodePaths(
        launcher=launcher, shares_filesystem=False, folders=(*volumes, *launch.image_paths)
    )


class Launcher(Protocol):
    """One way to start a run elsewhere. Methods raise ShardyardError with what to do now."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    forms: ClassVar[Mapping[str, EntryForm]]
    """Forms of its ledger lines, by kind; each line is checked before a job gets it."""

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """Return which files its nodes see, for a launch with these settings. Pure."""

    def render(self, request: LaunchRequest) -> Rendered:
        """Render the request. Pure: it calls no service and reads no file."""

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Create what was rendered, each object with its line in the ledger."""

    def status(self, job: Submission) -> JobStatus:
        """Ask the scheduler."""

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Output of one node, or of all merged; until the job is over if ``follow``."""

    def cancel(self, job: Submission) -> None:
        """Ask it to drain and end; safe to repeat."""

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """Remove what submit created, dependants first. Repeatable.

        An object of another run with the name or number of a ledger line is not touched. The line
        is struck, and the object is reported.
        """


def launcher_class(name: str) -> type[Launcher]:
    """The launcher of a name, ours or a package's, imported now.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    launcher: type[Launcher] = load_launcher(name, lambda kind: _launcher_error(kind, name))
    return launcher


def read_node_assignment(word: str, environ: Mapping[str, str]) -> NodeAssignment:
    """Read this node's place from the variables that a scheduler sets.

    Args:
        word: One of ``NODE_ASSIGNMENT_READERS``, or the name of a package's launcher that
            ``ReadsNodeAssignment``.

    Raises:
        RequestError: No launcher reads it; or a variable is missing or is no number.
    """
    ours = NODE_ASSIGNMENT_READERS.get(word)
    if ours is None:
        # A word of no installed package gets the message below, which lists the words for --place.
        theirs = launcher_class(word) if word in installed("launchers") else None
        read = getattr(theirs, "node_assignment", None)
    else:
        read = load_object(None, ours)
    if read is None:
        raise RequestError(
            f"--place {word} is not a place that can be read from the environment. Use one of "
            f"{', '.join((*NODE_ASSIGNMENT_READERS, EXPLICIT))}."
        )
    assignment: NodeAssignment = read(Variables(word, environ))
    return assignment


def _launcher_error(kind: Any, name: str) -> str:
    if not isinstance(kind, type):
        return f"is {kind!r}, not a class"
    # Read off the protocol, so that a new member is demanded of packages without another list.
    wanted = [*Launcher.__annotations__, *(key for key in vars(Launcher) if key[0] != "_")]
    launcher: type[Launcher] = kind
    missing = [key for key in wanted if not hasattr(launcher, key)]
    if missing:
        return f"has no {', '.join(missing)} (shardyard.launchers.base.Launcher)"
    if not isinstance(launcher.capabilities, Capabilities):
        return "has capabilities that are not shardyard.launchers.base.Capabilities"
    other = "" if launcher.name == name else launcher.name
    return other and f"calls itself {other!r}: the ledger would not find it again"


@runtime_checkable
class Resizer(Protocol):
    """A launcher some of whose jobs can be given another number of nodes while they run."""

    def resizes(self, job: Submission) -> bool:
        """Whether this job can; any other keeps the nodes that it was submitted with."""

    def resize(self, job: Submission, nodes: int) -> None:
        """Change the number of nodes."""


@runtime_checkable
class Executor(Protocol):
    """A launcher that runs a command next to a live job, to read files that are out of reach."""

    def exec(self, job: Submission, command: Sequence[str]) -> Iterator[bytes]:
        """Yield the command's stdout, in pieces; no shell reads its arguments.

        Raises:
            CapacityError: The job has no running container, or the connection broke.
            ShardyardError: The command failed, or may not be run.
        """


@runtime_checkable
class HasChecks(Protocol):
    """A launcher that can look at its target before anything is submitted."""

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Check the target without changes. A question that fails is a finding, not an error."""


Answer = JobStatus | ShardyardError
"""Answer on one of many jobs: its status, or why there is none."""


@runtime_checkable
class ChecksAccess(Protocol):
    """A launcher that finds out before a submission whether this user can reach its scheduler."""

    def context_errors(self, recipe: Recipe) -> list[Problem]:
        """Return what this machine lacks to reach it; asks no service."""

    def permission_errors(self, recipe: Recipe) -> list[Problem]:
        """Return the rights that this user lacks; empty where the scheduler gives no answer."""


@runtime_checkable
class AsksMany(Protocol):
    """A launcher whose scheduler tells of many jobs in one call."""

    def scheduler_of(self, job: Submission) -> str:
        """Return the scheduler that knows a job; empty where there is but one. Pure."""

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        """Return the `status` of each job, in the order given, in as few calls as possible.

        Args:
            jobs: At least one, all of one scheduler (`scheduler_of`).

        Raises:
            CapacityError: It does not answer.
            ShardyardError: They cannot be asked about at once; maybe one by one.
        """


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """A job that a scheduler has and that says itself to be ours."""

    id: str
    name: str
    run_id: str
    state: JobState
    where: str
    """Folder of its run at submission, or the namespace or queue that it is in."""
    end: str
    """The scheduler's own command that ends it."""


@runtime_checkable
class FindsJobs(Protocol):
    """A launcher whose jobs carry a mark of ours, by which they are found without any folder."""

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        """Return all jobs that are not over, where section ``launch`` says; changes no job."""


def answer(ask: Callable[[], JobStatus]) -> Answer:
    """Return the answer on one of many jobs; its error does not hide the others."""
    try:
        return ask()
    except ShardyardError as error:
        return error


@runtime_checkable
class SharesPython(Protocol):
    """A launcher whose nodes may run the Python that submits: what it lacks, they lack."""

    def shares_python(self, recipe: Recipe) -> bool:
        """Whether they do, of a launch with these settings. Pure."""


@runtime_checkable
class KnowsMachines(Protocol):
    """A launcher whose own settings say how many nodes there are, and how many devices of each."""

    def machine_settings(self, recipe: Recipe) -> list[str]:
        """Return ``cluster.nodes=N`` and others that a recipe leaves open."""


@runtime_checkable
class ReadsNodeAssignment(Protocol):
    """A launcher of a package whose nodes find their place in their environment.

    They are started with ``--place`` and its name. Other launchers give the place in full, with
    ``--place given``. Ours are in ``NODE_ASSIGNMENT_READERS``.
    """

    @staticmethod
    def node_assignment(variables: Variables) -> NodeAssignment:
        """Read this node's place. Imports no client of the scheduler: nodes may not have it."""


@dataclass(frozen=True, kw_only=True)
class InstallablePart:
    """One missing part of a target."""

    name: str
    """With its version."""
    purpose: str
    text: str
    """Exactly what is run or sent."""
    command: tuple[str, ...] = ()
    """The argument list of a part that a program installs."""
    objects: tuple[dict[str, Any], ...] = ()
    """The objects of a part that is rendered by us."""
    details: dict[str, str] = field(default_factory=dict)
    """Details to remove it again."""


@runtime_checkable
class Installs(Protocol):
    """A launcher whose target can be given what it lacks. Methods raise ShardyardError."""

    def target_name(self, request: LaunchRequest) -> str:
        """Return the name of the cluster that a request means."""

    def missing(self, request: LaunchRequest) -> list[InstallablePart]:
        """Return the missing parts that can be installed, in the order of installation."""

    def needed(self, request: LaunchRequest) -> list[InstallablePart]:
        """Return the parts that an empty target needs; pure, the target is not queried."""

    def install(self, request: LaunchRequest, part: InstallablePart, ledger: Ledger) -> None:
        """Put it there, between its two lines in the ledger."""

    def uninstall(self, request: LaunchRequest, ledger: Ledger) -> list[str]:
        """Remove all that the ledger names, the last first; returns what. Repeatable."""


Watchers = Literal["monitoring", "cloudwatch"]
"""Prometheus and Grafana in the cluster, or AWS's own service."""


@runtime_checkable
class InstallsWatchers(Installs, Protocol):
    """One whose target can be given what watches runs and devices."""

    def watchers(self, request: LaunchRequest, kind: Watchers) -> list[InstallablePart]:
        """All that it takes, in the order of installation; pure, the target is not asked."""

    def missing_watchers(
        self, request: LaunchRequest, parts: Sequence[InstallablePart]
    ) -> list[InstallablePart]:
        """Return the parts of ``watchers`` that the target lacks, regardless of the installer."""


_POLL_S = 0.3
_BLOCK_BYTES = 64 * 1024
"""Read of one file before the next has its turn; a longer line comes in several."""


def read_logs(files: Mapping[str, Path], *, is_over: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield the lines of all files, those that are appended included, until it is over.

    Args:
        files: Source -> file; one that is not there yet is waited for.
        is_over: Whether the files are complete; called before the last look.
    """
    offsets = dict.fromkeys(files, 0)
    for is_last in poll_until(is_over, every_s=_POLL_S):
        has_more = True
        while has_more:
            has_more = False
            for source, path in files.items():
                lines, offset = _next_lines(path, offsets[source], is_last=is_last)
                has_more = has_more or offset > offsets[source]
                offsets[source] = offset
                yield from (LogLine(source=source, text=line) for line in lines)


def _next_lines(path: Path, offset: int, *, is_last: bool) -> tuple[list[str], int]:
    """Whole lines of the next block, and where they end; the last line may lack its end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_BLOCK_BYTES)
    except FileNotFoundError:
        return [], offset
    whole = data.rfind(b"\n") + 1
    # Waiting for the end of a line longer than a block would stop this file for ever.
    is_cut = len(data) == _BLOCK_BYTES or is_last
    used = data[:whole] if whole or not is_cut else data
    lines = used.decode(errors="replace").split("\n")  # not at CR: a progress bar is one line
    return lines if lines[-1] else lines[:-1], offset + len(used)

"""What every launcher is: it renders a request, submits it, and answers for the job.

``render`` is pure: it returns exactly what would be sent, `--dry-run` prints it, tests compare it.
``submit`` writes each object into the ledger before it is created and confirms it after. What a
launcher can do beyond that stands in its ``Capabilities``, from which docs/launch.md has its table.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from shardyard.config.paths import NodePaths
from shardyard.config.resolved import RollbackTarget
from shardyard.config.schema.launch import Launch
from shardyard.config.schema.recipe import Recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import RequestError, ShardyardError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.io.files import parse_json
from shardyard.launchers.bundle import Bundle
from shardyard.launchers.ledger import SIDE_DETAIL, EntryForm, Ledger
from shardyard.launchers.log_markers import NONCE_VARIABLE
from shardyard.launchers.node_rank import NodeAssignment, Variables
from shardyard.plugins import PlugIn, installed, load_entry_point, load_object
from shardyard.rundir.network import BENCH_VARIABLE, NetworkBench
from shardyard.units import parse_seconds

LAUNCHERS: dict[str, str] = {
    "local": "shardyard.launchers.local:LocalLauncher",
    "slurm": "shardyard.launchers.slurm.launcher:SlurmLauncher",
    "kubernetes": "shardyard.launchers.kubernetes.launcher:KubernetesLauncher",
    "aws-batch": "shardyard.launchers.aws_batch.launcher:BatchLauncher",
}
"""Name -> module:class, imported on first use; packages add others (``plug_ins.py``)."""


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
    """Where a job is; every state of every scheduler maps to one, an unknown one is an error."""

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
    """What differs between launchers."""

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
        return f"{self.kind}-{hashlib.sha256(self.to_text().encode()).hexdigest()[:12]}"

    def to_text(self) -> str:
        """What its node is given."""
        content = {"kind": self.kind, "arguments": self.arguments}
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
            f"--side {text[:100]!r} is no side job that this version of Shardyard knows: "
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
    """None: the machines are not in the catalogue; nothing about their devices is rendered."""
    run_dir: str
    """The run's folder as the nodes see it."""
    code: Bundle | None = None
    """launch.code, packed. Launchers that share the run's folder find it there, too."""
    is_resume: bool = False
    nonce: str = ""
    """New with each submission: what node 0 marks its lines with (launchers/log_markers.py)."""
    submission: int = 1
    """Which one of the run, or of the side job; names of jobs differ by it where they must."""
    side: SideJob | None = None
    """None: the training."""
    launched_by: PlugIn | None = None
    """The launcher, where a package adds it."""
    block_left_s: float | None = None
    """For how long the instances of a capacity block are there; None: they are in none."""
    bench: NetworkBench | None = None
    """What its nodes measure in place of a training."""
    back_to: RollbackTarget | None = None
    """Earlier step that node 0 goes back to before it trains."""

    @property
    def time_limit_s(self) -> float | None:
        """Of the job: launch.time_limit, or what is left of a capacity block if that is less."""
        asked = self.recipe.launch.time_limit
        limits = [] if asked is None else [parse_seconds(asked)]
        limits += [] if self.block_left_s is None else [self.block_left_s]
        return min(limits, default=None)

    @property
    def side_suffix(self) -> str:
        """Ends the name of a side job, which no other job of any run has; empty: the training."""
        if self.side is None:
            return ""
        text = f"{self.run_id}/{self.side.label}/{self.submission}"
        return f"-{self.side.kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def side_details(self) -> dict[str, str]:
        """What the ledger's lines of a side job say beside a training's."""
        return {} if self.side is None else {SIDE_DETAIL: self.side.label}

    @property
    def origin(self) -> str:
        """Marks what a submission makes: two users may have runs of one id. Tells no nonce."""
        return hashlib.sha256(self.nonce.encode()).hexdigest()[:16] if self.nonce else ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every node entry is given."""
        ours = {NONCE_VARIABLE: self.nonce} if self.nonce else {}
        if self.launched_by is not None:
            ours[_LAUNCHER_VARIABLE] = json.dumps(self.launched_by.to_json())
        if self.bench is not None:
            ours[BENCH_VARIABLE] = self.bench.to_text()
        if self.back_to is not None:
            asked = {"step": self.back_to.step, "skip_steps": self.back_to.skip_steps}
            ours[_BACK_TO_VARIABLE] = json.dumps({**asked, "submission": self.submission})
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
        back_to = RollbackTarget(step=0)
    numbers = (back_to.step, back_to.skip_steps, back_to.submission)
    if any(type(number) is not int or number < 0 for number in numbers) or back_to.step < 1:
        raise RequestError(
            f"{_BACK_TO_VARIABLE}={text[:100]!r} names no step to go back to. The command line "
            "sets it: leave it out of launch.env, and use `shardyard resume RUN --step N`."
        )
    return back_to


ORIGIN_DETAIL = "origin"
"""Of an object in the ledger: ``LaunchRequest.origin``."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Exactly what would be sent."""

    launcher: str
    run_id: str
    name: str
    """Of the job, as the scheduler shows it."""
    text: str
    """What `--dry-run` prints: a script, a YAML stream, JSON."""
    objects: tuple[dict[str, Any], ...] = ()
    """The same as plain values, in the order of creation, where there are several."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that submit writes beside the run: name -> content."""
    warnings: tuple[str, ...] = ()
    """What is allowed and may be regretted; shown on stderr before anything is sent."""
    target: dict[str, str] = field(default_factory=dict)
    """Where it is sent, as far as the recipe says it: region, context, namespace."""
    side: dict[str, str] = field(default_factory=dict)
    """``LaunchRequest.side_details``, for the ledger."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What came of the lines of a ledger, as a person reads it: kind and name of each object."""

    removed: list[str] = field(default_factory=list)
    not_owned: list[str] = field(default_factory=list)
    """Found under the name or number of a line, and not the run's: left alone."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One submission to a scheduler; plain values, kept in the ledger."""

    launcher: str
    run_id: str
    id: str
    """The scheduler's."""
    name: str
    details: dict[str, str] = field(default_factory=dict)
    """What finds it again: cluster, namespace, region, folder."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the scheduler says of a job."""

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
    """What containers see that get ``launch.volumes``, and nothing else of any machine."""
    volumes = tuple(volume.path for volume in launch.volumes)
    return NodePaths(
        launcher=launcher, shares_filesystem=False, folders=(*volumes, *launch.image_paths)
    )


class Launcher(Protocol):
    """One way to start a run elsewhere. Methods raise ShardyardError with what to do now."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    forms: ClassVar[Mapping[str, EntryForm]]
    """Of its lines in a ledger, by kind; what it reads there is checked before it gets a job."""

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """Which files its nodes see, of a launch with these settings. Pure."""

    def render(self, request: LaunchRequest) -> Rendered:
        """Pure: no service is asked, no file is read."""

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

        What has the name or the number of a line of the ledger and is another's is left alone; the
        line is struck, and what was found is told.
        """


def launcher_class(name: str) -> type[Launcher]:
    """The launcher of a name, ours or a package's, imported now.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    ours = LAUNCHERS.get(name)
    launcher: type[Launcher] = (
        load_entry_point(
            "launchers", name, builtin=LAUNCHERS, validate=lambda kind: _launcher_error(kind, name)
        )
        if ours is None
        else load_object(None, ours)
    )
    return launcher


def read_node_assignment(word: str, environ: Mapping[str, str]) -> NodeAssignment:
    """Read this node's place from the variables that a scheduler sets.

    Args:
        word: Of ``NODE_ASSIGNMENT_READERS``, or the name of a package's launcher that
            ``ReadsNodeAssignment``.

    Raises:
        RequestError: Nobody reads it; or a variable is missing or is no number.
    """
    ours = NODE_ASSIGNMENT_READERS.get(word)
    if ours is None:
        theirs = launcher_class(word) if word in installed("launchers") else None
        read = getattr(theirs, "place", None)
    else:
        read = load_object(None, ours)
    if read is None:
        raise RequestError(
            f"--place {word} is no place that can be read from the environment. "
            f"Use one of {', '.join((*NODE_ASSIGNMENT_READERS, EXPLICIT))}."
        )
    assignment: NodeAssignment = read(Variables(word, environ))
    return assignment


def _launcher_error(kind: Any, name: str) -> str:
    if not isinstance(kind, type):
        return f"is {kind!r}, not a class"
    wanted = [*Launcher.__annotations__, *(key for key in vars(Launcher) if key[0] != "_")]
    launcher: type[Launcher] = kind
    missing = [key for key in wanted if not hasattr(launcher, key)]
    if missing:
        return f"has no {', '.join(missing)} (shardyard.launchers.base.Launcher)"
    if not isinstance(launcher.capabilities, Capabilities):
        return "has capabilities that are no shardyard.launchers.base.Capabilities"
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
    """A launcher that runs a command beside a job that lives: how files come from out of reach."""

    def exec(self, job: Submission, command: Sequence[str]) -> Iterator[bytes]:
        """What the command prints on stdout, in pieces; no shell reads its arguments.

        Raises:
            CapacityError: The job has no running container, or the connection broke.
            ShardyardError: The command failed, or may not be run.
        """


@runtime_checkable
class HasChecks(Protocol):
    """A launcher that can look at its target before anything is submitted."""

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Look, and change nothing. What cannot be asked is a finding, not an error."""


Answer = JobStatus | ShardyardError
"""What is known of one of many jobs: its status, or why there is none."""


@runtime_checkable
class AsksMany(Protocol):
    """A launcher whose scheduler tells of many jobs in one call."""

    def scheduler_of(self, job: Submission) -> str:
        """Which scheduler knows a job; empty where there is but one. Pure."""

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        """What `status` says of each, in the order asked, in as few calls as can be.

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
    """Where its run's folder was when it was submitted, or what it is in: a namespace, a queue."""
    end: str
    """The scheduler's own command that ends it."""


@runtime_checkable
class FindsJobs(Protocol):
    """A launcher whose jobs carry a mark of ours, by which they are found without any folder."""

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        """All that are not over, where a recipe's section ``launch`` says; changes nothing."""


def answer(ask: Callable[[], JobStatus]) -> Answer:
    """What is said of one of many jobs; its error does not hide the others."""
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
class ReadsNodeAssignment(Protocol):
    """A launcher of a package whose nodes find in their environment where they stand.

    They are started with ``--place`` and its name; of others a launcher says the place in full,
    with ``--place given``. Ours are in ``NODE_ASSIGNMENT_READERS``.
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
    """What removes it again."""


@runtime_checkable
class Installs(Protocol):
    """A launcher whose target can be given what it lacks. Methods raise ShardyardError."""

    def target_name(self, request: LaunchRequest) -> str:
        """Of the cluster that a request means."""

    def missing(self, request: LaunchRequest) -> list[InstallablePart]:
        """What is not there and can be installed, in the order of installation."""

    def needed(self, request: LaunchRequest) -> list[InstallablePart]:
        """The same of a target that has nothing; pure, the target is not asked."""

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
        """Those parts of ``watchers`` that the target has not, whoever installed the others."""

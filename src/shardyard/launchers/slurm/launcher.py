"""Launch on Slurm: a batch script, its job, its state, its logs, its end.

Prerequisites: Slurm's clients (a login node), a run folder that this machine and the nodes share,
and on the nodes a Python with Shardyard or Pyxis and an image.
"""

import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.doctor.finding import Finding
from shardyard.errors import EXIT_DRAINED, RequestError, ShardyardError
from shardyard.foreign_variables import not_for_sbatch, reject_cluster_override
from shardyard.io.files import make_folder, write_text
from shardyard.launchers.base import (
    Answer,
    Capabilities,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
    SchedulerJob,
    answer,
    read_logs,
)
from shardyard.launchers.ledger import (
    RUN_ID,
    SUBMITTED,
    EntryForm,
    Ledger,
    LedgerEntry,
    Submission,
    form,
)
from shardyard.launchers.secrets import check_supported
from shardyard.launchers.slurm.checks import slurm_checks
from shardyard.launchers.slurm.clients import (
    NoAccountingError,
    NoAnswerError,
    Shell,
    UnknownJobError,
    ask,
    run_client,
)
from shardyard.launchers.slurm.node_rank import hosts_in
from shardyard.launchers.slurm.script import (
    NODE_PROGRAM,
    logged_exit_code,
    recipe_file,
    render_script,
    script_file,
    unused_image,
    warnings,
)
from shardyard.launchers.slurm.states import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    TAGGED_FIELDS,
    JobRecord,
    read_sacct,
    read_scontrol,
    read_squeue,
    read_tagged_jobs,
    status_of,
)

KIND = "slurm job"

_FORM = EntryForm(
    name=form(rf"{RUN_ID}(-[a-z]{{1,20}}-[0-9a-f]{{8}})?"),  # the latter ends a side job's
    id=form(r"[1-9]\d{0,9}"),
    details={"nodes": form(r"\d{1,6}")},
    optional={"cluster": form(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")},
    folder=form(r"\."),
)

Nodes = tuple[tuple[str, str], ...]
"""Name and state of each."""

_ASK_EVERY_S = 2.0
"""Between questions of one follower to the controller, which all users share."""


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher:
    """Launch with ``sbatch``, ask ``scontrol`` and ``sacct``, stop with ``scancel``."""

    name: ClassVar[str] = "slurm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=(), requeues=True, needs_image=False, shares_folder=True, secrets=("env", "file")
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {KIND: _FORM, SUBMITTED: _FORM}
    shell: Shell = run_client
    program: tuple[str, ...] = NODE_PROGRAM
    """Python's arguments on each node."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment in which sbatch finds the secrets that it passes on by name."""

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """The shared file system; in a container the targets of its mounts and the run's folder."""
        launch, run = recipe.launch, recipe.run
        if launch.slurm.container_image is None:
            held = launch.image_paths
            return NodePaths(launcher=self.name, shares_filesystem=True, folders=held)
        # `_srun` mounts the run's folder into the container.
        own = () if run.id is None else (f"{launch.run_dir or Path(run.dir).resolve()}/{run.id}",)
        targets = tuple(map(_target, launch.slurm.container_mounts))
        return NodePaths(
            launcher=self.name,
            shares_filesystem=False,
            folders=(*targets, *own, *launch.image_paths),
            opens_secrets=True,
            mounts="launch.slurm.container_mounts",
        )

    def shares_python(self, recipe: Recipe) -> bool:
        """Unless a container or launch.slurm.python brings another."""
        slurm = recipe.launch.slurm
        return slurm.container_image is None and slurm.python == "auto"

    def render(self, request: LaunchRequest) -> Rendered:
        """Return the batch script and the recipe that its nodes read."""
        recipe = request.recipe
        check_supported(
            recipe.secrets, self.capabilities.secrets, recipe.launch, launcher=self.name
        )
        reject_cluster_override(self.environ)
        script = render_script(request, self.program)
        return Rendered(
            launcher=self.name,
            run_id=request.run_id,
            name=f"{request.run_id}{request.side_suffix}",
            text=script,
            files={
                recipe_file(request.side_details): request.recipe_text,
                script_file(request.side_details): script,
            },
            side=request.side_details,
            warnings=self._warnings(request.recipe),
        )

    def _warnings(self, recipe: Recipe) -> tuple[str, ...]:
        unused, foreign = unused_image(recipe), not_for_sbatch(self.environ)
        return (*warnings(recipe), *(each for each in (unused, foreign) if each is not None))

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Write script and recipe into the run folder and submit the script.

        Raises:
            RequestError: The run has a job already, or Slurm can never run it as it is.
            CapacityError: A limit is reached, or Slurm does not answer.
            AccessError: Slurm does not permit it.
        """
        run_dir = ledger.path.parent
        _check_secrets_set(_option(rendered, "export"), self.environ)
        for entry in _entries(ledger, rendered.name):
            self._check_no_active_job(entry)
        # sbatch keeps a copy of the script, but nodes read the recipe from here at their start.
        for name, content in rendered.files.items():
            write_text(run_dir / name, content)
        # Slurm makes no folders for --output: the job would fail at its start.
        make_folder(run_dir / "logs")
        entry = ledger.intend(
            KIND,
            rendered.name,
            launcher=self.name,
            folder=str(run_dir),
            nodes=_option(rendered, "nodes"),
            **rendered.side,
        )
        script = str(run_dir / script_file(rendered.side))
        try:
            answer = ask(self.shell, ["sbatch", "--parsable", script])
        except NoAnswerError:
            raise  # it may have been created: the intent stands
        except ShardyardError as error:
            ledger.fail(entry, str(error))
            raise
        # --parsable prints ID, or ID;CLUSTER where Slurm has several (sbatch(1)).
        job_id, _, cluster = answer.strip().splitlines()[-1].partition(";")
        if not _FORM.id.fullmatch(job_id):
            raise ShardyardError(
                f"`sbatch --parsable` answered {answer.strip()!r}, which is not a job id, so the "
                "job is unknown. The ledger lists the submission. Look with `squeue --me "
                f"--name={rendered.name}`; `shardyard teardown` looks there, too."
            )
        details = {"cluster": cluster} if cluster else {}
        return _job(rendered.run_id, ledger.confirm(entry, job_id, **details))

    def validate(self, rendered: Rendered, folder: Path) -> str:
        """Ask Slurm whether it would take a script (``sbatch --test-only``); creates no job.

        Args:
            folder: Where the script is written for it.

        Returns:
            When and where it would start, in Slurm's words.
        """
        script = folder / "validate.sbatch"
        write_text(script, rendered.text)
        try:
            done = self.shell(["sbatch", "--test-only", str(script)])
        finally:
            script.unlink()
        if done.exit_code != 0:
            # Nothing is called again: `ask` only turns the refusal into an error.
            ask(lambda _: done, ["sbatch"])
        # sbatch prints the result of a test on stderr.
        return " ".join(done.err.split())

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Look at the cluster for `shardyard doctor`."""
        rendered = self.render(request)

        def ask_when() -> str:
            with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
                return self.validate(rendered, Path(folder))

        wants_gpus = "#SBATCH --gpus-per-node=" in rendered.text
        return slurm_checks(request, self.shell, wants_gpus=wants_gpus, ask_when=ask_when)

    def status(self, job: Submission) -> JobStatus:
        """Ask the controller, which is up to date; and the accounts for what it has forgotten."""
        record = self._record(job)
        status = _reported_status(record, job)
        return replace(status, nodes=self._nodes(_node_list(record, status), job))

    def scheduler_of(self, job: Submission) -> str:
        """The cluster, where sbatch named one."""
        return job.details.get("cluster", "")

    def statuses(self, jobs: Sequence[Submission]) -> list[Answer]:
        """Ask the controller once, the accounts once for what it has forgotten, once for nodes."""
        known = self._in_queue(jobs)
        forgotten = [job for job in jobs if job.id not in known]
        untold: dict[str, ShardyardError] = {}
        try:
            known |= self._in_accounts(forgotten)
        except ShardyardError as error:
            # Accounts that do not answer must not hide what the controller knows of the others.
            untold = {job.id: error for job in forgotten}
        answers = [
            untold.get(job.id) or answer(partial(_reported_status, known.get(job.id), job))
            for job in jobs
        ]
        lists = [
            _node_list(known.get(job.id), said) for job, said in zip(jobs, answers, strict=True)
        ]
        try:
            rows = self._nodes(",".join(sorted({*lists} - {""})), jobs[0])
        except ShardyardError as error:
            return [error if nodes else said for said, nodes in zip(answers, lists, strict=True)]
        return [
            answer(partial(_with_nodes, said, nodes, rows)) if isinstance(said, JobStatus) else said
            for said, nodes in zip(answers, lists, strict=True)
        ]

    def find(self, recipe: Recipe) -> list[SchedulerJob]:  # noqa: ARG002 - there is but one Slurm
        """Your own jobs whose comment names a run."""
        answered = ask(self.shell, ["squeue", "--me", "-h", "-o", TAGGED_FIELDS])
        return list(read_tagged_jobs(answered))

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Read the files that nodes and script write into the run folder."""
        folder = Path(job.details["folder"]) / "logs"
        ranks = range(int(job.details["nodes"])) if node is None else (node,)
        files = {f"node {rank}": folder / f"slurm-{job.id}-node-{rank}.log" for rank in ranks}
        if node is None:
            files = {"job": folder / f"slurm-{job.id}.log", **files}

        def is_over() -> bool:
            return not follow or self._state(job).is_over

        return read_logs(files, is_over=_throttled(_ASK_EVERY_S, is_over))

    def cancel(self, job: Submission) -> None:
        """Ask a running job to drain, however long that takes; remove a waiting one."""
        state = self._state(job)
        if state.is_over:  # it is not there, or not ours, too
            return
        if state is JobState.WAITING:
            self._scancel(job)
            return
        # A job that has just begun may miss the signal; it looks for the file.
        write_text(Path(job.details["folder"]) / "launch" / f"stop-{job.id}", "cancel\n")
        # To the script alone, which repeats SIGTERM to the nodes until they have ended.
        self._scancel(job, "--batch", "--signal=USR2")

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """End the job: Slurm's SIGTERM, and SIGKILL after its KillWait."""
        removal = Removal()
        for entry in _entries(ledger, job.name):
            for found in self._jobs_of(entry):
                record = self._record(found)
                if record is None or _status(record, found).state.is_over:
                    continue
                if _is_owned(record, found):
                    self._scancel(found)
                    removal.removed.append(f"{KIND} {found.id} ({found.name})")
                else:
                    removal.not_owned.append(f"{KIND} {found.id}")
            ledger.remove(entry)
        return removal

    def _state(self, job: Submission) -> JobState:
        """`status` without the states of its nodes, which cost another question."""
        return _reported_status(self._record(job), job).state

    def _record(self, job: Submission) -> JobRecord | None:
        """Return Slurm's record of the job of this number; None: it knows none."""
        try:
            return read_scontrol(
                ask(self.shell, ["scontrol", *_cluster(job), "show", "job", job.id, "-o"])
            )
        except UnknownJobError:
            pass
        return self._in_accounts([job]).get(job.id)

    def _in_queue(self, jobs: Sequence[Submission]) -> dict[str, JobRecord]:
        """Return the controller's records of jobs of one cluster, by number."""
        # -t all, because squeue leaves out jobs that have just ended; -a for hidden partitions.
        asked = ["squeue", *_cluster(jobs[0]), "-a", "-h", "-t", "all", "-j", _numbers(jobs)]
        try:
            return read_squeue(ask(self.shell, [*asked, "-O", SQUEUE_FIELDS]))
        except UnknownJobError:  # where one number alone was asked
            return {}

    def _in_accounts(self, jobs: Sequence[Submission]) -> dict[str, JobRecord]:
        """Return the accounts' records of jobs of one cluster, by number."""
        if not jobs:
            return {}
        # -X for one line a job, without its steps.
        asked = ["sacct", *_cluster(jobs[0]), "-X", "-n", "-P", "-j", _numbers(jobs)]
        try:
            return read_sacct(ask(self.shell, [*asked, "-o", SACCT_FIELDS]))
        except NoAccountingError:
            return {}

    def _nodes(self, node_list: str, job: Submission) -> Nodes:
        if not node_list:
            return ()
        text = ask(
            self.shell,
            ["sinfo", *_cluster(job), "-h", "-N", "-n", node_list, "-o", "%N|%T"],
        )
        rows = {
            (name, state)
            for name, _, state in (row.partition("|") for row in text.split())
            if state
        }
        # By length first: node2 comes before node10.
        return tuple(sorted(rows, key=lambda row: (len(row[0]), row[0])))

    def _scancel(self, job: Submission, *options: str) -> None:
        with suppress(UnknownJobError):  # it ended in the meantime
            # `--`, so that an id from a changed ledger cannot act as an option.
            ask(self.shell, ["scancel", *_cluster(job), *options, "--", job.id])

    def _check_no_active_job(self, entry: LedgerEntry) -> None:
        for job in self._jobs_of(entry):
            state = self._state(job)
            if not state.is_over:
                raise RequestError(
                    f"run {entry.name} has Slurm job {job.id} already, which is {state}. "
                    "Two jobs of one run would wait for each other's lease. Follow it with "
                    f"`shardyard status {entry.name}`, or end it with `shardyard cancel "
                    f"{entry.name}` first."
                )

    def _jobs_of(self, entry: LedgerEntry) -> list[Submission]:
        """Return the job of an entry; for an interrupted submission, the jobs of this folder."""
        if entry.id is not None:
            return [_job(entry.name, entry)]
        asked = ["squeue", "--me", "-h", "-o", "%A %o", f"--name={entry.name}"]
        rows = [row.partition(" ") for row in ask(self.shell, asked).splitlines()]
        return [
            Submission(launcher=self.name, run_id=entry.name, id=job_id, name=entry.name,
                details=dict(entry.details))
            for job_id, _, command in rows
            # A job of this name may be of a run with the same id in another folder.
            if job_id.isdecimal() and command.strip() == _script_in(entry.details)
        ]  # fmt: skip


def _entries(ledger: Ledger, name: str) -> list[LedgerEntry]:
    return [entry for entry in ledger.live() if entry.kind == KIND and entry.name == name]


def _job(run_id: str, entry: LedgerEntry) -> Submission:
    assert entry.id is not None
    return Submission(
        launcher=entry.launcher, run_id=run_id, id=entry.id, name=entry.name,
        details=dict(entry.details),
    )  # fmt: skip


def _script_in(details: Mapping[str, str]) -> str:
    """Return the path of the script given to sbatch, which is the command of the job."""
    return str(Path(details["folder"]) / script_file(details))


def _is_owned(record: JobRecord, job: Submission) -> bool:
    """Whether Slurm's job of this number is the run's: it may be another one, of anybody."""
    # After MaxJobId Slurm counts from the beginning, so a number may come again.
    if record.command is None:
        return record.name == job.name
    return record.command == _script_in(job.details)


def _reported_status(record: JobRecord | None, job: Submission) -> JobStatus:
    """Return the status of the job from a record, without the states of its nodes."""
    if record is None or not _is_owned(record, job):
        return _gone(job, record)
    return _status(record, job)


def _node_list(record: JobRecord | None, status: Answer) -> str:
    """Slurm's list of the nodes that a job runs on; empty: on none."""
    if record is None or isinstance(status, ShardyardError) or status.state is not JobState.RUNNING:
        return ""
    return record.node_list


def _with_nodes(status: JobStatus, node_list: str, rows: Nodes) -> JobStatus:
    hosts = frozenset(hosts_in(node_list)) if node_list else frozenset()
    return replace(status, nodes=tuple(row for row in rows if row[0] in hosts))


def _numbers(jobs: Sequence[Submission]) -> str:
    return ",".join(job.id for job in jobs)


def _status(record: JobRecord, job: Submission) -> JobStatus:
    """Translate; a job whose time was over just as its nodes had drained is no failed one."""
    status = status_of(record, job_id=job.id)
    if record.state != "TIMEOUT" or _logged_exit_code(job) != EXIT_DRAINED:
        return status
    reason = "saved as its time limit passed; was not requeued, and can be resumed"
    return replace(status, state=JobState.DRAINED, reason=reason, exit_code=EXIT_DRAINED)


def _logged_exit_code(job: Submission) -> int | None:
    log = Path(job.details["folder"]) / "logs" / f"slurm-{job.id}.log"
    return logged_exit_code(log.read_text(errors="replace")) if log.is_file() else None


_ENDS = {None: JobState.GONE, 0: JobState.SUCCEEDED, EXIT_DRAINED: JobState.DRAINED}
"""Last exit code in a script's log -> state of its job; all other codes: it failed."""


def _gone(job: Submission, other: JobRecord | None) -> JobStatus:
    """Without accounts Slurm soon forgets a job; what its script said last is still there."""
    exit_code = _logged_exit_code(job)
    knows = "Slurm knows it no more"
    if other is not None:
        runs = other.command or f"job {other.name}"
        knows += f": number {job.id} is another job now, which runs {runs}"
    said = (
        "" if exit_code is None else f"says its log: its nodes ended with exit code {exit_code}; "
    )
    state = _ENDS.get(exit_code, JobState.FAILED)
    return JobStatus(state=state, reason=f"{said}{knows}", exit_code=exit_code)


def _target(mount: str) -> str:
    """Return the container path of ``source:target`` or ``source:target:flags``."""
    source, *others = mount.split(":")
    return others[0] if others else source


def _option(rendered: Rendered, name: str) -> str:
    found = re.search(rf"^#SBATCH --{name}=(\S+)$", rendered.text, re.MULTILINE)
    assert found is not None  # `render` writes it
    return found[1]


def _check_secrets_set(exported: str, environ: Mapping[str, str]) -> None:
    """Raise now, not when the job starts, if a secret that is passed on by name is not there."""
    names = [] if exported == "NONE" else exported.split(",")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise RequestError(
            f"the environment has no {', '.join(missing)}, which a secret of the recipe is kept "
            "in. sbatch passes it on from here. Set it: "
            + "; ".join(f"export {name}=..." for name in missing)
        )


def _throttled(every_s: float, question: Callable[[], bool]) -> Callable[[], bool]:
    """The question, answered with no where it comes too soon after the last."""
    asked_at_s = -math.inf

    def answer() -> bool:
        nonlocal asked_at_s
        if time.monotonic() - asked_at_s < every_s:
            return False
        asked_at_s = time.monotonic()
        return question()

    return answer


def _cluster(job: Submission) -> list[str]:
    """Return the option that names the cluster, if sbatch named one of several."""
    cluster = job.details.get("cluster")
    return [f"--clusters={cluster}"] if cluster else []

"""Local: the nodes are processes of this machine, started by one that has left the terminal.

It survives Ctrl-C and the end of the shell. A job lives in ``logs/job-<k>/`` of the run's folder.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from shardyard.config.machines import reject_capacity_settings
from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import (
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import (
    parse_json,
    read_json_object,
    write_json,
    write_text,
)
from shardyard.io.polling import wait_for
from shardyard.launchers.base import (
    Capabilities,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
)
from shardyard.launchers.job_folder import end_reason, exit_word, new_job_folder, node_logs
from shardyard.launchers.ledger import (
    RUN_ID,
    SIDE_DETAIL,
    SUBMITTED,
    EntryForm,
    Ledger,
    LedgerEntry,
    Submission,
    form,
)
from shardyard.launchers.local_job import (
    MODULE,
    JobFile,
    supervises,
    supervisor_of,
)
from shardyard.launchers.process_identity import Identity
from shardyard.own_processes import python_program, word
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import is_locked
from shardyard.rundir.state import resume_words

_KIND = "local job"
_FOLDER = "{folder}"
"""Placeholder in a rendered request for the job's folder, known once it is created."""
_START_TIMEOUT_S = 60.0
_POLL_S = 0.3
_REAPED_S = 3.0
"""For its parent to ask how a process ended, so that no other program takes it for alive."""
_SUPERVISOR = python_program(MODULE)
_FORM = EntryForm(
    name=form(rf"{RUN_ID}/job-\d{{1,9}}"),
    id=form(r"[1-9]\d{0,9}-[A-Za-z0-9:-]{1,40}"),  # of a process: its number, when it started
    optional={"boot": form(r"[0-9a-f-]{0,36}")},
    folder=form(r"logs/job-\d{1,9}"),
)


class LocalLauncher:
    """Runs a job on this machine."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=(),
        requeues=True,
        needs_image=False,
        shares_folder=True,
        secrets=("env", "file"),
        is_this_machine=True,
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {_KIND: _FORM, SUBMITTED: _FORM}

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """This machine's files: its nodes are processes here."""
        held = recipe.launch.image_paths
        return NodePaths(launcher=self.name, shares_filesystem=True, folders=held)

    def shares_python(self, recipe: Recipe) -> bool:
        """Always."""
        del recipe
        return True

    def render(self, request: LaunchRequest) -> Rendered:
        """The commands of all nodes, or of a side job."""
        recipe = request.recipe
        reject_capacity_settings(
            recipe.cluster, launcher="this machine", instead="it is rented already"
        )
        if request.nodes > 1 and recipe.cluster.device not in ("auto", "cpu"):
            raise RequestError(
                f"cluster.nodes={request.nodes} with cluster.device={recipe.cluster.device}: on "
                "one machine every node would take the same accelerators. Use cluster.nodes=1 "
                "with all of them, or cluster.device=cpu."
            )
        job = JobFile(
            program=_program(request),
            run_dir=request.run_dir,
            nodes=request.nodes,
            fewest_nodes=request.nodes
            if recipe.elastic.min_nodes == "auto"
            else recipe.elastic.min_nodes,
            devices_per_node=request.devices_per_node,
            env=request.environment,
            # A repeated command starts a failed side job again, so its supervisor does not.
            max_restarts=0 if request.side else recipe.elastic.max_restarts,
            drain_timeout_s=recipe.elastic.drain_timeout_s,
            time_limit_s=request.time_limit_s,
            is_side=request.side is not None,
        )
        return Rendered(
            launcher=self.name,
            run_id=request.run_id,
            name=request.run_id,
            text=_script(job, request.recipe_text),
            objects=(asdict(job),),
            files={"recipe.yaml": request.recipe_text},
            side=request.side_details,
            warnings=_warnings(request),
        )

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Start the supervisor; it starts the nodes.

        Raises:
            RequestError: The run is being trained already.
            StorageError: The run's folder cannot be written.
        """
        (content,) = rendered.objects
        run = RunDir(Path(content["run_dir"]))
        if not rendered.side:
            # Two trainings would overwrite each other's checkpoints; a side job takes no lease.
            _check_not_running(run, ledger)
        folder = new_job_folder(run)
        entry = ledger.intend(
            _KIND,
            f"{rendered.name}/{folder.name}",
            launcher=self.name,
            folder=str(folder),
            **rendered.side,
        )
        try:
            for name, text in rendered.files.items():
                write_text(folder / name, text)
            program = [part.replace(_FOLDER, str(folder)) for part in content["program"]]
            write_json(folder / "job.json", {**content, "program": program})
            who = start_supervisor(folder)
        except ShardyardError as error:
            ledger.fail(entry, str(error))
            raise
        id = f"{who.pid}-{who.started}"
        entry = ledger.confirm(entry, id, boot=who.boot)
        return Submission(
            launcher=self.name, run_id=rendered.run_id, id=id, name=entry.name,
            details=entry.details,
        )  # fmt: skip

    def status(self, job: Submission) -> JobStatus:
        """From the supervisor, what it wrote, and of a training the run's events."""
        folder = Path(job.details["folder"])
        if not folder.is_dir():
            reason = f"{folder} is not there any more"
            return JobStatus(state=JobState.GONE, reason=reason)
        written = _read_status(folder)
        run = None if SIDE_DETAIL in job.details else RunDir(folder.parents[1])
        nodes = tuple(
            (f"node {rank}", exit_word(node["exit_code"]))
            for rank, node in enumerate(written.get("nodes", ()))
        )
        if _is_alive(job):
            reason = "running" if run is None else _progress(run, written)
            return JobStatus(state=JobState.RUNNING, reason=reason, nodes=nodes)
        code = _read_status(folder).get("exit_code")  # once more: it may just have ended
        if code is None:
            return _without_supervisor(run, nodes)
        state = {
            0: JobState.SUCCEEDED,
            EXIT_DRAINED: JobState.DRAINED,
            # 130 is a run that stopped itself, which can be resumed like a drained one.
            EXIT_INTERRUPTED: JobState.DRAINED,
        }.get(code, JobState.FAILED)
        last_words = "" if run is None else end_reason(run)
        reason = "; ".join(filter(None, (last_words, written.get("reason"))))
        return JobStatus(
            state=state, reason=reason or f"exit code {code}", exit_code=code, nodes=nodes
        )

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of the nodes' files, in the order in which they are found."""
        folder = Path(job.details["folder"])
        return node_logs(
            folder,
            job.name,
            count=JobFile.read(folder).nodes,
            node=node,
            is_over=lambda: not (follow and _is_alive(job)),
        )

    def cancel(self, job: Submission) -> None:
        """Ask the supervisor to drain the nodes; it asks them once."""
        who = _identity(job)
        if who is not None and _is_alive(job):
            with suppress(ProcessLookupError):
                os.kill(who.pid, signal.SIGTERM)

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """Drain the job if it runs, and wait for its end; its logs stay in the run's folder."""
        removed, foreign = [], []
        who = _identity(job)
        if who is not None and who.is_alive and not _is_alive(job):
            # It lives, but does not supervise this folder, so something changed the ledger.
            foreign.append(f"process {who.pid}")
        elif _is_alive(job):
            self.cancel(job)
            # the supervisor kills what does not drain in time
            wait_for(lambda: not _is_alive(job), every_s=_POLL_S)
            process = Path(f"/proc/{who.pid}") if who is not None else Path("/nowhere")
            wait_for(lambda: not process.exists(), within_s=_REAPED_S, every_s=_POLL_S)
            removed.append(f"{_KIND} {job.name}")
        for entry in ledger.live():
            if (entry.launcher, entry.kind, entry.name) == (self.name, _KIND, job.name):
                ledger.remove(entry)
        return Removal(removed=removed, not_owned=foreign)


def _program(request: LaunchRequest) -> list[str]:
    module = "shardyard.node" if request.side is None else "shardyard.node.side_job"
    last = ["--place", "given"] if request.side is None else ["--side", request.side.to_text()]
    recipe = f"{_FOLDER}/recipe.yaml"
    return python_program(module, recipe, "--run-dir", request.run_dir, *last)


def _warnings(request: LaunchRequest) -> tuple[str, ...]:
    given = request.recipe.launch.side.model_fields_set if request.side is not None else ()
    if not given:
        return ()
    names = ", ".join(f"launch.side.{name}" for name in sorted(given))
    return (f"{names}: not used for side jobs on local, which has the whole machine.",)


def _script(job: JobFile, recipe_text: str) -> str:
    """Return the script for a person: the commands, and the recipe they are given."""
    lines = [
        f"# {job.nodes} node{'s' * (job.nodes > 1)} on this machine. JOB is the next "
        f"{word(job.run_dir)}/logs/job-<k>, PORT a free one.",
        *(f"export {name}={word(value)}" for name, value in sorted(job.env.items())),
    ]
    for rank in range(job.nodes):
        fixed = " ".join(word(part.replace(_FOLDER, "JOB")) for part in job.program)
        place = (
            f" --node-rank {rank} --nodes {job.nodes} --rendezvous 127.0.0.1:PORT"
            " --session SESSION --store-moves"
        )
        lines.append(f"{fixed}{'' if job.is_side else place} >> JOB/node-{rank}.log 2>&1 &")
    return "\n".join([*lines, "", "# JOB/recipe.yaml", recipe_text])


def _check_not_running(run: RunDir, ledger: Ledger) -> None:
    """Raise if the run is trained, or a supervisor of it is about to start nodes."""
    kinds = [entry for entry in ledger.live() if (entry.launcher, entry.kind) == ("local", _KIND)]
    jobs = [_job(run, entry) for entry in kinds if SIDE_DETAIL not in entry.details]
    if is_locked(run.lease) or any(map(_is_alive, jobs)):
        raise RequestError(
            f"run {run.run_id} is being trained already. Two at once would overwrite each other's "
            f"checkpoints. Wait for it, or stop it with `shardyard cancel {run.handle}`."
        )


def _job(run: RunDir, entry: LedgerEntry) -> Submission:
    return Submission(
        launcher=entry.launcher, run_id=run.run_id, id=entry.id or "", name=entry.name,
        details=entry.details,
    )  # fmt: skip


def start_supervisor(folder: Path, program: Sequence[str] = _SUPERVISOR) -> Identity:
    """Start a job's one process; it reads job.json.

    Raises:
        ShardyardError: It did not start.
    """
    try:
        # Ends when the supervisor moves its stdout from this pipe to its log.
        answer = subprocess.run(
            [*program, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=True,
        )
        pid, started, boot = parse_json(answer.stdout)
        return Identity(pid, started, boot)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if (who := supervisor_of(str(folder))) is not None:
            return who  # it runs, but could not say so in time
        words = (getattr(error, "stderr", None) or str(error)).strip()
        raise ShardyardError(
            f"the supervisor of {folder} did not start ({words.splitlines()[-1]}). It "
            "would start the nodes. Check that this user may start more processes (`ulimit -u`)."
        ) from error


def _identity(job: Submission) -> Identity | None:
    """Its supervisor; None: the submission was interrupted, and no process supervises its folder.

    A submission that was interrupted before the number of its supervisor was written down is found
    by the supervisor's command line.
    """
    if not job.id:
        return supervisor_of(job.details["folder"])
    pid, _, started = job.id.partition("-")
    return Identity(int(pid), started, job.details.get("boot", ""))


def _is_alive(job: Submission) -> bool:
    """Whether its supervisor runs; any other process that the ledger may name is none of ours."""
    who = _identity(job)
    return who is not None and who.is_alive and supervises(who.pid, job.details["folder"])


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / "status.json")
    except (OSError, ValueError):
        return {}


def _progress(run: RunDir, written: dict[str, Any]) -> str:
    restarts = written.get("restarts", 0)
    again = f", restarted {restarts} time{'s' * (restarts > 1)}" if restarts else ""
    is_ending = any(node["exit_code"] is not None for node in written.get("nodes", ()))
    word = "training" if is_locked(run.lease) else "ending" if is_ending else "preparing"
    return f"{word}{again}"


def _without_supervisor(run: RunDir | None, nodes: tuple[tuple[str, str], ...]) -> JobStatus:
    """The supervisor was killed; its nodes drain by themselves."""
    lost = "its supervising process was killed, or the machine was restarted; "
    if run is None:
        reason = f"{lost}the same command starts it again"
        return JobStatus(state=JobState.FAILED, reason=reason, exit_code=1, nodes=nodes)
    if is_locked(run.lease):
        reason = "its supervising process was killed; the nodes are draining"
        return JobStatus(state=JobState.RUNNING, reason=reason, nodes=nodes)
    return JobStatus(
        state=JobState.FAILED,
        reason=f"{lost}{resume_words(run)}",
        exit_code=1,
        nodes=nodes,
    )

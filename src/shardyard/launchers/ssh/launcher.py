"""Launch by ssh: hosts without a scheduler, and one detached process on each.

Prerequisites: OpenSSH's client and a key that each host accepts, a run folder that this machine and
the hosts share, and on each host a Python with this version of Shardyard.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from shardyard.config.machines import reject_capacity_settings
from shardyard.config.paths import NodePaths
from shardyard.config.schema.recipe import Recipe
from shardyard.config.ssh_hosts import HOST_PATTERN, SshHost, hosts_of, parse_host
from shardyard.doctor.finding import Finding
from shardyard.errors import (
    AccessError,
    CapacityError,
    Problem,
    RecipeError,
    RequestError,
    ShardyardError,
)
from shardyard.io.files import write_json, write_text
from shardyard.io.polling import wait_for
from shardyard.launchers.base import (
    Capabilities,
    JobState,
    JobStatus,
    LaunchRequest,
    LogLine,
    Removal,
    Rendered,
    SchedulerJob,
)
from shardyard.launchers.job_folder import new_job_folder, node_logs
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
from shardyard.launchers.ledger_owner import check_trusted
from shardyard.launchers.local_job import SLACK_S
from shardyard.launchers.secrets import check_supported
from shardyard.launchers.ssh.checks import HostRequirements, check_hosts
from shardyard.launchers.ssh.client import PAGE, SshClient, SshShell, run_ssh
from shardyard.launchers.ssh.node_job import STOP_FILE, SshJob, read_state, state_file
from shardyard.launchers.ssh.request import (
    checked_hosts,
    content_of,
    job_of,
    machine_settings,
    python_of,
    script,
    warnings,
)
from shardyard.launchers.ssh.states import SshNodeReport, job_session, report_of, status_of
from shardyard.log import warn
from shardyard.rundir.layout import RunDir

_KIND = "ssh job"
_FORM = EntryForm(
    name=form(rf"{RUN_ID}/job-\d{{1,9}}"),
    id=form(r"job-\d{1,9}-[0-9a-f]{8}"),
    details={
        "hosts": form(rf"{HOST_PATTERN}( {HOST_PATTERN})*"),
        "python": form(r"[^-\0-\x1f][^\0-\x1f]{0,4095}"),
        "run_dir": form(r"/[^\0-\x1f]{0,4095}"),
        "session": form(r"job-\d{1,9}-[0-9a-f]{8}"),
    },
    optional={"config": form(r"/[^\0-\x1f]{0,4095}")},
    folder=form(r"logs/job-\d{1,9}"),
)
_POLL_S = 0.5
_ABORTED_S = 10.0
"""For nodes of a launch that was aborted, which have nothing to save yet."""
_KILLED_S = 15.0
"""For processes that were killed to be gone."""


@dataclass(frozen=True, kw_only=True)
class SshLauncher:
    """Start one process on each host with ``ssh``, and ask and end it the same way."""

    name: ClassVar[str] = "ssh"
    capabilities: ClassVar[Capabilities] = Capabilities(
        resizes=(), requeues=False, needs_image=False, shares_folder=True, secrets=("env", "file")
    )
    forms: ClassVar[Mapping[str, EntryForm]] = {_KIND: _FORM, SUBMITTED: _FORM}
    shell: SshShell = run_ssh
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment with the secrets that are kept in env."""

    def node_paths(self, recipe: Recipe) -> NodePaths:
        """The file system that the hosts share with this machine."""
        return NodePaths(
            launcher=self.name, shares_filesystem=True, folders=recipe.launch.image_paths
        )

    def context_errors(self, recipe: Recipe) -> list[Problem]:
        """Find what is wrong with the list of hosts."""
        return hosts_of(recipe.launch.ssh)[1]

    def permission_errors(self, recipe: Recipe) -> list[Problem]:
        """None: hosts are asked by the submission, before it starts anything."""
        del recipe
        return []

    def machine_settings(self, recipe: Recipe) -> list[str]:
        """All listed hosts, and the fewest slots of them, unless the recipe says otherwise."""
        return machine_settings(recipe)

    def render(self, request: LaunchRequest) -> Rendered:
        """The commands of all hosts. Reads the hostfile, if there is one.

        Raises:
            RecipeError: There are too few hosts, or a value cannot be used.
        """
        recipe = request.recipe
        check_supported(
            recipe.secrets, self.capabilities.secrets, recipe.launch, launcher=self.name
        )
        reject_capacity_settings(
            recipe.cluster, launcher="hosts by ssh", instead="they are there already"
        )
        listed = checked_hosts(request)
        hosts = listed[: 1 if request.side else request.nodes]
        job = job_of(request, hosts)
        content = content_of(job, request)
        return Rendered(
            launcher=self.name,
            run_id=request.run_id,
            name=request.run_id,
            text=script(job, content, hosts, request.recipe_text),
            objects=(content,),
            files={"recipe.yaml": request.recipe_text},
            side=request.side_details,
            warnings=warnings(request, listed[len(hosts) :]),
        )

    def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
        """Check all hosts, then start the node of each.

        Raises:
            RequestError: The run is being trained already, or hosts lack something.
            CapacityError: Hosts do not answer.
            AccessError: Hosts accept no key of this user.
        """
        (content,) = rendered.objects
        run = RunDir(ledger.path.parent)
        hosts = _parsed(content["hosts"])
        client = self._client(content["python"], content["config_file"])
        values = self._secrets(content["secrets"])
        if not rendered.side:
            self._check_not_running(run, ledger)
        address = content["rendezvous_host"] or client.host_name(hosts[0])
        port = _check(client, hosts, content, run, address)
        folder = new_job_folder(run)
        nodes_run = content["run_dir"]
        session = job_session(folder, secrets.token_hex(4))
        config = {} if content["config_file"] is None else {"config": content["config_file"]}
        entry = ledger.intend(
            _KIND,
            f"{rendered.name}/{folder.name}",
            launcher=self.name,
            folder=str(folder),
            hosts=" ".join(content["hosts"]),
            python=content["python"],
            run_dir=nodes_run,
            session=session,
            **config,
            **rendered.side,
        )
        job = _submission(rendered.run_id, entry)
        try:
            for name, text in rendered.files.items():
                write_text(folder / name, text)
            endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            known = {each: content[each] for each in SshJob.__dataclass_fields__}
            write_json(
                folder / "job.json",
                {**known, "rendezvous": endpoint, "session": session, "folder": str(Path.cwd())},
            )
            self._start(job, values)
        except BaseException as error:
            self._abort(job, entry, ledger, error)
            raise
        return _submission(rendered.run_id, ledger.confirm(entry, session))

    def checks(self, request: LaunchRequest) -> list[Finding]:
        """Look at all hosts for `shardyard doctor`."""
        ssh = request.recipe.launch.ssh
        hosts = checked_hosts(request)[: request.nodes]
        client = self._client(python_of(ssh), ssh.config_file)
        parent = Path(request.run_dir).parent
        is_here = request.recipe.launch.run_dir is None and os.access(parent, os.W_OK)
        required = HostRequirements(
            run_dir=str(parent), here=parent if is_here else None,
            device=request.recipe.cluster.device, devices=request.devices_per_node,
            address=ssh.rendezvous_host or client.host_name(hosts[0]), port=ssh.rendezvous_port,
        )  # fmt: skip
        return check_hosts(client, hosts, required).findings(hosts)

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        """Jobs of this user on the hosts of launch.ssh.

        Raises:
            RecipeError: It names no hosts.
            ShardyardError: Hosts cannot be asked.
        """
        ssh = recipe.launch.ssh
        hosts, problems = hosts_of(ssh)
        if problems:
            raise RecipeError(problems)
        client = self._client(python_of(ssh), ssh.config_file)
        ends: dict[tuple[str, str], list[str]] = {}
        for host, answer in zip(hosts, client.ask_all(hosts, "jobs"), strict=True):
            if isinstance(answer, ShardyardError):
                raise answer
            for job in answer["jobs"]:
                end = f"ssh {client.by_hand(host)} kill {int(job['pid'])}"
                ends.setdefault((str(job["session"]), str(job["folder"])), []).append(end)
        return [
            SchedulerJob(
                id=session, name=session, run_id=Path(folder).parents[1].name,
                state=JobState.RUNNING, where=str(Path(folder).parents[1]), end="; ".join(commands),
            )
            for (session, folder), commands in ends.items()
        ]  # fmt: skip

    def status(self, job: Submission) -> JobStatus:
        """Read what the hosts wrote, and ask those whose node has not ended."""
        folder = Path(job.details["folder"])
        if not folder.is_dir():
            reason = f"{folder} is not there any more"
            return JobStatus(state=JobState.GONE, reason=reason)
        try:
            outlives = SshJob.read(folder).outlives_nodes
        except (OSError, ValueError, TypeError):
            outlives = False
        return status_of(
            self._reports(job),
            run=RunDir(folder.parents[1]),
            session=job.details["session"],
            is_side=SIDE_DETAIL in job.details,
            outlives=outlives,
        )

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of the nodes' files in the run folder."""

        def is_over() -> bool:
            return not follow or self._is_over(job)

        count = len(job.details["hosts"].split())
        folder = Path(job.details["folder"])
        return node_logs(folder, job.name, count=count, node=node, is_over=is_over)

    def cancel(self, job: Submission) -> None:
        """Ask the nodes to drain, on their hosts and through the run folder.

        Raises:
            CapacityError: Hosts do not answer; those that do were asked.
        """
        folder = Path(job.details["folder"])
        if folder.is_dir():
            write_text(folder / STOP_FILE, "cancel\n")
        silent = [found for found in self._ask_to_stop(job, kill=False) if found.error]
        if silent:
            raise CapacityError(
                f"{_errors(silent)}\nThe other hosts were asked to drain. These see "
                f"{folder / STOP_FILE} if they still run and see the run folder, and drain then.",
                page=PAGE,
            )

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        """Drain the nodes, wait for their end, and kill what does not end in time.

        Raises:
            CapacityError: Hosts do not answer, so the ledger keeps its line.
        """
        removal = Removal()
        entries = [
            entry
            for entry in ledger.live()
            if (entry.launcher, entry.kind, entry.name) == (self.name, _KIND, job.name)
        ]
        if not entries:
            return removal
        if self._end(job):
            removal.removed.append(f"{_KIND} {job.name}")
        for entry in entries:
            ledger.remove(entry)
        return removal

    def _client(self, python: str, config_file: str | None) -> SshClient:
        return SshClient(python=python, config_file=config_file, shell=self.shell)

    def _client_of(self, job: Submission) -> SshClient:
        return self._client(job.details["python"], job.details.get("config"))

    def _secrets(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the values of secrets that are kept in env; they are sent on stdin only."""
        missing = sorted({name for name in names.values() if not self.environ.get(name)})
        if missing:
            raise RequestError(
                f"the environment has no {', '.join(missing)}, which a secret of the recipe is "
                "kept in. It is sent to the hosts from here. Set it: "
                + "; ".join(f"export {name}=..." for name in missing)
            )
        return {secret: self.environ[name] for secret, name in names.items()}

    def _check_not_running(self, run: RunDir, ledger: Ledger) -> None:
        for entry in ledger.live():
            is_ours = (entry.launcher, entry.kind) == (self.name, _KIND)
            if not is_ours or SIDE_DETAIL in entry.details:
                continue
            if not self._is_over(_submission(run.run_id, entry)):
                raise RequestError(
                    f"run {run.run_id} is being trained already ({entry.name} on "
                    f"{entry.details['hosts']}). Two at once would overwrite each other's "
                    f"checkpoints. Wait for it, or stop it with `shardyard cancel {run.handle}`."
                )

    def _start(self, job: Submission, values: dict[str, str]) -> None:
        """Start the nodes of all hosts.

        Raises:
            ShardyardError: All hosts that did not start theirs.
        """
        hosts = _parsed(job.details["hosts"].split())
        answers = self._client_of(job).ask_all(
            hosts,
            "start",
            each={rank: {"rank": rank} for rank in range(len(hosts))},
            folder=_far_folder(job),
            secrets=values,
        )
        failed: list[ShardyardError] = []
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, ShardyardError):
                failed.append(answer)
            elif "error" in answer:
                failed.append(ShardyardError(f"{host.text} did not start: {answer['error']}."))
        if failed:
            kinds = {type(error) for error in failed}
            kind = kinds.pop() if len(kinds) == 1 else ShardyardError
            raise kind("\n".join(map(str, failed)), page=PAGE)

    def _abort(
        self, job: Submission, entry: LedgerEntry, ledger: Ledger, error: BaseException
    ) -> None:
        """End what an aborted launch started; the ledger keeps its line if something may run."""
        try:
            self._end(job, drain_s=_ABORTED_S)
        except ShardyardError as left:
            run = Path(job.details["folder"]).parents[1].name
            warn(f"the launch was aborted, and nodes may be left: {left}\nEnd them with "
                 f"`shardyard teardown {run} --force`.")  # fmt: skip
        else:
            ledger.fail(entry, str(error))

    def _reports(self, job: Submission) -> list[SshNodeReport]:
        """Return the report of each node; asks only hosts whose node has written no end."""
        hosts = _parsed(job.details["hosts"].split())
        folder = Path(job.details["folder"])
        written = [read_state(folder, rank) for rank in range(len(hosts))]
        asked = [rank for rank, each in enumerate(written) if each.get("exit_code") is None]
        answers = self._answers(job, [hosts[rank] for rank in asked], asked)
        by_rank = dict(zip(asked, answers, strict=True))
        return [
            report_of(host, written[rank], by_rank.get(rank)) for rank, host in enumerate(hosts)
        ]

    def _answers(
        self, job: Submission, hosts: Sequence[SshHost], ranks: Sequence[int]
    ) -> list[dict[str, Any] | ShardyardError]:
        if not hosts:
            return []
        # The ledger says which program ssh runs: another user must not have written it.
        try:
            ledger = Path(job.details["folder"]).parents[1] / "ledger.jsonl"
            check_trusted(ledger, trusts_folder=False)
        except AccessError as error:
            why = str(error).partition("; you are")[0]
            return [{"unasked": why} for _ in hosts]
        return self._ask_state(job, hosts, ranks)

    def _ask_state(
        self, job: Submission, hosts: Sequence[SshHost], ranks: Sequence[int]
    ) -> list[dict[str, Any] | ShardyardError]:
        return self._client_of(job).ask_all(
            hosts,
            "state",
            each={place: {"rank": rank} for place, rank in enumerate(ranks)},
            folder=_far_folder(job),
        )

    def _is_over(self, job: Submission) -> bool:
        try:
            return self.status(job).state.is_over
        except CapacityError:
            return False

    def _unfinished(self, job: Submission) -> tuple[list[SshHost], list[int]]:
        """Return the hosts whose nodes have written no end, and the ranks of these."""
        hosts = _parsed(job.details["hosts"].split())
        folder = Path(job.details["folder"])
        ranks = [
            rank for rank in range(len(hosts)) if read_state(folder, rank).get("exit_code") is None
        ]
        return [hosts[rank] for rank in ranks], ranks

    def _ask_to_stop(self, job: Submission, *, kill: bool) -> list[SshNodeReport]:
        hosts, ranks = self._unfinished(job)
        answers = self._client_of(job).ask_all(
            hosts,
            "stop",
            each={place: {"rank": rank} for place, rank in enumerate(ranks)},
            folder=_far_folder(job),
            kill=kill,
        )
        return [
            SshNodeReport(host=host, written={}, error=str(answer))
            if isinstance(answer, ShardyardError)
            else SshNodeReport(host=host, written={}, is_alive=bool(answer.get("found")))
            for host, answer in zip(hosts, answers, strict=True)
        ]

    def _end(self, job: Submission, *, drain_s: float | None = None) -> bool:
        """End all nodes of a job and wait until they are gone; whether there were any.

        Args:
            drain_s: Seconds until they are killed; None: their own process sees to that.

        Raises:
            CapacityError: Hosts do not answer.
        """
        asked = self._ask_to_stop(job, kill=False)
        was_there = any(report.is_alive for report in asked)
        limit_s = _drain_limit_s(job) if drain_s is None else drain_s
        if was_there and not self._wait_for_end(job, limit_s):
            self._ask_to_stop(job, kill=True)
            self._wait_for_end(job, _KILLED_S)
        silent = [report for report in asked if report.error]
        if silent:
            folder = Path(job.details["folder"])
            ranks = [rank for host, rank in zip(*self._unfinished(job), strict=True)
                     if host in {report.host for report in silent}]  # fmt: skip
            files = " ".join(str(state_file(folder, rank)) for rank in ranks)
            raise CapacityError(
                f"{_errors(silent)}\nNodes may still run there. Repeat this once they answer. If a "
                "host is gone for good, write down that its node has ended: "
                f"echo '{{\"exit_code\": 1}}' | tee {files}",
                page=PAGE,
            )
        return was_there

    def _wait_for_end(self, job: Submission, within_s: float) -> bool:
        """Wait until no answering host runs a node of a job."""

        def is_over() -> bool:
            hosts, ranks = self._unfinished(job)
            answers = self._ask_state(job, hosts, ranks) if hosts else []
            running = [
                answer
                for answer in answers
                if isinstance(answer, dict) and (answer.get("alive") or answer.get("draining"))
            ]
            return not running

        return bool(wait_for(is_over, every_s=_POLL_S, within_s=within_s))


def _check(
    client: SshClient,
    hosts: Sequence[SshHost],
    content: Mapping[str, Any],
    run: RunDir,
    address: str,
) -> int:
    """Raise all that is wrong with the hosts; else return the port of the rendezvous."""
    required = HostRequirements(
        run_dir=content["run_dir"], here=run.path,
        device=content["device"], devices=content["devices"], address=address,
        port=content["rendezvous_port"], is_side=content["is_side"],
    )  # fmt: skip
    found = check_hosts(client, hosts, required)
    if found.problems:
        raise found.error()
    for text in found.warnings:
        warn(text)
    return found.port


def _parsed(texts: Sequence[str]) -> list[SshHost]:
    hosts = [parse_host(text) for text in texts]
    # The form of the ledger's lines and the check of the recipe let no other through.
    return [host for host in hosts if host is not None]


def _far_folder(job: Submission) -> str:
    """Return the job's folder as its hosts see it."""
    return f"{job.details['run_dir']}/logs/{Path(job.details['folder']).name}"


def _drain_limit_s(job: Submission) -> float:
    """Return seconds after which a host's process has killed its node at the latest."""
    with suppress(OSError, ValueError, TypeError):
        return SshJob.read(Path(job.details["folder"])).drain_timeout_s + 2 * SLACK_S
    return 2 * SLACK_S


def _errors(reports: Sequence[SshNodeReport]) -> str:
    return "\n".join(dict.fromkeys(report.error for report in reports))


def _submission(run_id: str, entry: LedgerEntry) -> Submission:
    return Submission(
        launcher=entry.launcher, run_id=run_id, id=entry.id or "", name=entry.name,
        details=dict(entry.details),
    )  # fmt: skip

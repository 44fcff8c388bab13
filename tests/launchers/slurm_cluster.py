"""A real Slurm of four nodes on this machine, for tests: all its state in one folder, gone with it.

Debian's slurmd can play several nodes at once. Nothing here needs munge, systemd or the machine's
/etc.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from shardyard.launchers.slurm.clients import ClientResult
from tests.debian_packages import need

NODES = tuple(f"127.0.0.{number}" for number in range(1, 5))
GPUS_PER_NODE = 8
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
_PATIENCE_S = 60.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldParameters=allow_user_triggers
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=30
MessageTimeout=30
ReturnToService=2
GresTypes=gpu
EnforcePartLimits=ALL
{accounting}
PartitionName=main Nodes=127.0.0.[1-4] Default=YES MaxTime=INFINITE
PartitionName=short Nodes=127.0.0.[1-2] MaxTime=10
PartitionName=closed Nodes=127.0.0.[1-4] AllowAccounts=nobody
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=32 RealMemory=24000 "
    "Gres=gpu:a100:8 Feature=fast,quiet State=UNKNOWN\n"
)
_DATABASE_CONF = """\
AuthType=auth/none
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
LogFile={base}/slurmdbd.log
PidFile={base}/slurmdbd.pid
"""


@dataclass
class SlurmCluster:
    """A running Slurm; ``env`` is what its clients need."""

    base: Path
    env: dict[str, str]
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def shell(self, argv: Sequence[str]) -> ClientResult:
        """Run one of Slurm's clients as the launcher does, but against this cluster."""
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        return ClientResult(exit_code=done.returncode, out=done.stdout, err=done.stderr)

    def client(self, *argv: str, check: bool = True) -> str:
        """Run one of Slurm's clients and return what it prints."""
        done = self.shell(argv)
        assert not check or done.exit_code == 0, f"{argv}: {done.err}"
        return done.out

    def start(self, name: str, *argv: str) -> None:
        """Start a daemon in the foreground, as a child that can be waited for."""
        with (self.base / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def start_controller(self) -> None:
        """Start the controller, or start it again, and wait until it answers."""
        self.start("slurmctld", "slurmctld", "-D", "-f", str(self.base / "slurm.conf"))
        self.wait_until(
            lambda: "is UP" in self.client("scontrol", "ping", check=False), "the controller"
        )

    def start_node(self, name: str) -> None:
        """Start a node, or start it again."""
        conf = str(self.base / "slurm.conf")
        self.start(name, "slurmd", "-D", "-N", name, "-f", conf)

    def kill_node(self, name: str) -> None:
        """What a power cut does: its daemon, its step managers and all its tasks die at once."""
        daemon = self.daemons.pop(name)
        for pid in [daemon.pid, *self.processes_of(name)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def kill_task(self, node: str, module: str) -> None:
        """Kill the program of a job's task on a node, and nothing else there."""
        words = [b"-m", module.encode()]
        (program,) = (
            pid
            for pid in self.processes_of(node)
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:4] == words
        )
        os.kill(program, signal.SIGKILL)

    def stop_daemon(self, name: str) -> None:
        """End a node's daemon alone, as a package update does; its tasks live on."""
        daemon = self.daemons.pop(name)
        daemon.terminate()
        daemon.wait()

    def processes_of(self, node: str) -> list[int]:
        """Processes of jobs on a node, and what manages them.

        Tasks are known by their environment. A manager overwrites its own with its title, but has
        the log of its node open.
        """
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.base}/slurm.conf".encode()}
        log = str(self.base / f"slurmd.{node}.log")
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # ended in the meantime
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                is_task = marks <= set((entry / "environ").read_bytes().split(b"\0"))
                is_manager = b"slurmstepd" in (entry / "cmdline").read_bytes() and any(
                    str(descriptor.readlink()) == log for descriptor in (entry / "fd").iterdir()
                )
                if is_task or is_manager:
                    found.append(int(entry.name))
        return found

    def wait_until(self, is_so: Callable[[], bool], what: str, patience_s: float = 300.0) -> None:
        """Look again and again until something is so."""
        deadline = time.monotonic() + patience_s
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {patience_s:g} s"
            time.sleep(0.1)

    def state(self, job_id: str) -> str:
        """Slurm's own word for a job."""
        text = self.client("scontrol", "show", "job", job_id, "-o")
        return text.partition("JobState=")[2].split()[0]

    def start_now(self, job_id: str, *, patience_s: float = 600.0) -> None:
        """Let a requeued job begin without the two minutes that Slurm makes it wait.

        Slurm sets them once more as the old start ends, so this is said until it holds. Not within
        the second in which the old start ended: nodes refuse credentials as old as that.
        """

        def has_begun() -> bool:
            text = self.client("scontrol", "show", "job", job_id, "-o")
            state, starts = (
                text.partition(f"{name}=")[2].split()[0] for name in ("JobState", "StartTime")
            )
            assert state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"), text
            soon = datetime.now() + timedelta(seconds=5)
            if state == "PENDING" and starts != "Unknown" and datetime.fromisoformat(starts) > soon:
                self.client("scontrol", "update", f"JobId={job_id}", "StartTime=now+3", check=False)
            return state == "RUNNING"

        self.wait_until(has_begun, "running again", patience_s)

    def stop(self) -> None:
        """End everything: jobs first, then daemons, then what they left."""
        with suppress(subprocess.TimeoutExpired):
            self.client("scancel", "--user=root", check=False)
        for name in (*NODES, *NODES):  # once more: a manager that loses its task starts none
            for pid in self.processes_of(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def require_slurm(*, accounting: bool = False) -> None:
    """Skip the test where Debian's packages are not installed, or where this is not root."""
    need(*PACKAGES, *(ACCOUNTING_PACKAGES if accounting else ()))
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as other users, so it needs root")


@contextmanager
def slurm_cluster(base: Path, *, accounting: bool = False) -> Iterator[SlurmCluster]:
    """Four idle nodes of 32 CPUs and 8 GPUs; with accounting also a database and limits.

    Args:
        base: An empty folder.
        accounting: Start slurmdbd and MariaDB; account ``team``, quality of service ``one``, which
            lets a user have one job.
    """
    require_slurm(accounting=accounting)
    ports = _free_ports(len(NODES) + 2)
    env = {**_clean_environment(), "SLURM_CONF": str(base / "slurm.conf")}
    cluster = SlurmCluster(base, env)
    _write_configuration(base, ports, accounting=accounting)
    try:
        if accounting:
            _start_database(cluster)
        for name in NODES:
            cluster.start_node(name)
        cluster.start_controller()
        cluster.wait_until(lambda: _num_idle(cluster) == len(NODES), "four idle nodes")
        if accounting:
            _make_accounts(cluster)
        yield cluster
    finally:
        cluster.stop()


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _write_configuration(base: Path, ports: list[int], *, accounting: bool) -> None:
    host = socket.gethostname().partition(".")[0]
    controller, database, *of_nodes = ports
    # MinJobAge: what is over is soon known to the accounts alone.
    with_database = (
        "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
        f"AccountingStoragePort={database}\nAccountingStorageEnforce=associations,limits,qos\n"
        "JobAcctGatherType=jobacct_gather/none\nMinJobAge=2"
    )
    conf = _CONF.format(
        host=host, port=controller, base=base, accounting=with_database if accounting else ""
    )
    nodes = [
        _NODE.format(name=name, host=host, port=port)
        for name, port in zip(NODES, of_nodes, strict=True)
    ]
    for name in ("state", "dev", *(f"spool.{node}" for node in NODES)):
        (base / name).mkdir(exist_ok=True)
    for number in range(GPUS_PER_NODE):  # /dev/null by other names: Slurm wants device files
        os.mknod(base / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
    (base / "slurm.conf").write_text(conf + "".join(nodes))
    (base / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (base / "gres.conf").write_text(
        f"NodeName=127.0.0.[1-4] Name=gpu Type=a100 File={base}/dev/gpu[0-7]\n"
    )
    secret = base / "slurmdbd.conf"
    secret.write_text(_DATABASE_CONF.format(port=database, base=base))
    secret.chmod(0o600)


def _start_database(cluster: SlurmCluster) -> None:
    base = cluster.base
    data, sock = base / "mysql", base / "mysql.sock"
    cluster.client(
        "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
        "--auth-root-authentication-method=normal", "--skip-test-db",
    )  # fmt: skip
    cluster.env["MYSQL_UNIX_PORT"] = str(sock)
    cluster.start(
        "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={sock}",
        "--skip-networking", "--user=root", f"--pid-file={base}/mysql.pid",
    )  # fmt: skip
    cluster.wait_until(sock.exists, "the database")
    cluster.start("slurmdbd", "slurmdbd", "-D")
    cluster.wait_until(
        lambda: (
            bool(cluster.client("sacctmgr", "-n", "list", "cluster", check=False) is not None)
            and "slurmdbd version" in _text(base / "slurmdbd.log")
        ),
        "slurmdbd",
    )


def _make_accounts(cluster: SlurmCluster) -> None:
    for words in (
        ("add", "account", "team"),
        ("add", "qos", "one", "MaxJobsPerUser=1", "MaxSubmitJobsPerUser=2"),
        ("add", "user", "root", "account=team", "DefaultAccount=team"),
        ("modify", "user", "root", "set", "qos=normal,one"),
    ):
        cluster.client("sacctmgr", "-i", *words, check=False)
    cluster.client("scontrol", "reconfigure")


def _num_idle(cluster: SlurmCluster) -> int:
    return (
        cluster.client("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        .split()
        .count("idle")
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""

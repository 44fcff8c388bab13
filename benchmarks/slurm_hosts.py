"""A real Slurm on hosts that are network namespaces (benchmarks/hosts.py): a slurmd on each."""

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hosts import Host

_CONTROLLER = "10.77.0.254"
_PATIENCE_S = 300.0
_CONF = """\
ClusterName=hosts
SlurmctldHost={controller}({address})
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
SlurmdParameters=config_overrides
MessageTimeout=60
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""
_NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=32 RealMemory=24000\n"


@dataclass
class Slurm:
    """Its daemons, as children of this process."""

    daemons: list["subprocess.Popen[bytes]"]

    def stop(self) -> None:
        """End all; what runs in jobs ends with the namespaces."""
        for daemon in self.daemons:
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()


def slurm_on(hosts: Sequence[Host], base: Path) -> Slurm:
    """Start it and wait until all nodes are idle; its clients find it by SLURM_CONF from now on.

    Raises:
        SystemExit: They do not become idle.
    """
    _prepare(hosts, base)
    os.environ["SLURM_CONF"] = str(base / "slurm.conf")
    started = []
    for host in hosts:
        subprocess.run(["ip", "link", "set", f"cable-{host.rank}", "up"], check=True)
        # not `ip netns exec`, which hides /sys/fs/cgroup from slurmd
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name]
        daemon = ["slurmd", "-D", "-N", host.name, "-f", str(base / "slurm.conf")]
        started.append(_start(["nsenter", f"--net=/run/netns/{host.name}", *named, *daemon], base))
    started.append(_start(["slurmctld", "-D", "-f", str(base / "slurm.conf")], base))
    deadline_s = time.monotonic() + _PATIENCE_S
    while _idle() < len(hosts):
        if time.monotonic() > deadline_s:
            Slurm(started).stop()
            raise SystemExit((base / "out.txt").read_text()[-3000:])
        time.sleep(0.2)
    return Slurm(started)


def _prepare(hosts: Sequence[Host], base: Path) -> None:
    for name in ("state", *(f"spool.{host.name}" for host in hosts)):
        (base / name).mkdir(parents=True)
    controller = socket.gethostname().partition(".")[0]
    conf = _CONF.format(controller=controller, address=_CONTROLLER, base=base)
    conf += "".join(_NODE.format(name=host.name, address=host.address) for host in hosts)
    (base / "slurm.conf").write_text(conf)
    (base / "cgroup.conf").write_text("CgroupAutomount=no\n")
    names = [f"{host.address} {host.name}" for host in hosts]
    names += [f"{_CONTROLLER} {controller}", "127.0.0.1 localhost"]
    (base / "hosts").write_text("\n".join(names) + "\n")
    # in the mount namespace of this program alone
    subprocess.run(["mount", "--bind", base / "hosts", "/etc/hosts"], check=True)
    subprocess.run(["ip", "addr", "add", f"{_CONTROLLER}/24", "dev", "switch"], check=True)


def _start(words: list[str], base: Path) -> "subprocess.Popen[bytes]":
    with (base / "out.txt").open("ab") as out:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def _idle() -> int:
    words = ["sinfo", "-h", "-N", "-o", "%T"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    return said.stdout.split().count("idle")

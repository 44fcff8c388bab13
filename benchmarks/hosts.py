"""Hosts on this machine: network namespaces, each with a cable to one switch, and a name.

All of it is in namespaces of the program's own, so that nothing is left behind and nothing else can
be hit. Needs root, `unshare` and `ip`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.config.load import dump_recipe, load_recipe
from shardyard.io.polling import wait_for
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir

_INSIDE = "SHARDYARD_HOSTS_INSIDE"
_NETWORK = "10.77.0"
PORT = 29400


def enter(module: str) -> None:
    """Go on with own processes, memory, mounts and networks: starts the program again inside them.

    Args:
        module: Of the program, as ``python -m`` takes it.
    """
    if os.environ.get(_INSIDE) != "1":
        if os.geteuid() != 0:
            raise SystemExit("namespaces for networks need root; start this again as root")
        apart = ["unshare", "--net", "--pid", "--ipc", "--mount", "--fork", "--mount-proc"]
        program = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execvpe("unshare", [*apart, "--kill-child", *program], {**os.environ, _INSIDE: "1"})
    for place in ("/dev/shm", "/run"):  # ip keeps the names of namespaces below /run
        _run("mount", "-t", "tmpfs", "tmpfs", place)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")


class Host:
    """One of them; what runs there finds its name and its network, and all files of the machine."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"host-{rank}"
        self.address = f"{_NETWORK}.{rank + 1}"
        cable = f"cable-{rank}"
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "link", "set", cable, "master", "switch")
        _run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", self.name, "link", "set", link, "up")

    def start(self, words: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a program there; what it says goes behind what the log holds."""
        _run("ip", "link", "set", f"cable-{self.rank}", "up")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as talk:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named, *words],
                stdin=subprocess.DEVNULL, stdout=talk, stderr=talk, env=environment,
            )  # fmt: skip

    def lose(self, *, is_told: bool = True) -> float:
        """End all that runs there; the unix time at which it began.

        Args:
            is_told: The others hear that connections have ended, as where processes are killed;
                else they hear nothing any more, as after a power cut.
        """
        began_t = time.time()
        if not is_told:
            _run("ip", "link", "set", f"cable-{self.rank}", "down")
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return began_t

    def remove(self) -> None:
        """Take it away, so that another of its rank can be made."""
        _run("ip", "link", "delete", f"cable-{self.rank}")
        _run("ip", "netns", "delete", self.name)

    def pids(self) -> list[int]:
        """Processes that run there."""
        said = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in said.stdout.split()]


class HostedRun:
    """One run on some of the hosts, which come and go; nobody watches over them.

    Every host is told to start what a pod or a task of Slurm starts.
    """

    def __init__(self, folder: Path, run: RunDir, settings: Sequence[str], *, nodes: int) -> None:
        """Args:
        nodes: That it begins with.
        """
        self.run = run
        self._nodes = nodes
        self._recipe = folder / f"{run.run_id}.yaml"
        self._recipe.write_text(dump_recipe(load_recipe([], settings)))
        self._log = folder / "log.txt"
        self._programs: dict[int, subprocess.Popen[bytes]] = {}

    def come(self, host: Host) -> float:
        """A host starts its node, for the first time or again; the unix time at which it did."""
        began_t = time.time()
        words = [sys.executable, "-m", "shardyard.node", self._recipe, "--run-dir", self.run.path]
        words += ["--place", "given", "--node-rank", host.rank, "--store-moves"]
        words += ["--nodes", max(self._nodes, host.rank + 1), "--session", "s"]
        words += ["--rendezvous", f"{_NETWORK}.1:{PORT}"]
        self._programs[host.rank] = host.start(list(map(str, words)), self._log)
        return began_t

    def begin(self, hosts: Sequence[Host]) -> None:
        """The first of the hosts start together."""
        for host in hosts[: self._nodes]:
            self.come(host)

    def events(self, *kinds: str, generation: int | None = None) -> list[dict[str, Any]]:
        """Of these kinds, in order; of one generation, or of all."""
        return [
            event
            for event in read_lines(self.run.events)
            if event["kind"] in kinds and generation in (None, event.get("generation"))
        ]

    def steps(self) -> list[dict[str, Any]]:
        """Lines of steps, repeated ones too."""
        return [line for line in read_lines(self.run.metrics) if "eval" not in line]

    def wait(self, look: Callable[[], Any]) -> Any:
        """Look until something is found; the run has to go on meanwhile."""
        found = wait_for(lambda: look() or self._is_over() or None, every_s=0.05, within_s=900.0)
        if found is None or found == "over":
            raise SystemExit(f"the run ended or stands still:\n{self._log.read_text()[-3000:]}")
        return found

    def finish(self) -> None:
        """Wait for the end of all that run.

        Raises:
            SystemExit: One of those that are left did not end well.
        """
        living = {rank: each for rank, each in self._programs.items() if each.poll() is None}
        codes = {rank: each.wait() for rank, each in living.items()}
        if any(codes.values()):
            raise SystemExit(f"nodes ended with {codes}:\n{self._log.read_text()[-3000:]}")

    def drain(self) -> None:
        """Ask all that run to stop, and wait."""
        for program in self._programs.values():
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        for program in self._programs.values():
            program.wait()

    def _is_over(self) -> str | None:
        is_over = all(program.poll() is not None for program in self._programs.values())
        return "over" if is_over else None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

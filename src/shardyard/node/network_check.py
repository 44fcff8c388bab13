"""Network between the nodes: an event, from NCCL's own log once the ranks have met.

Gloo logs none. It has only TCP sockets. The kernel's counters show which interface it uses
once the first step is done.

EFA that is silently missing is the most repeated defect of training on AWS: everything
works, at a tenth of the speed. NCCL names its network in the log of each rank, if it is set
to do so.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress

from shardyard.config.schema.recipe import Recipe
from shardyard.control.follow import Tail
from shardyard.errors import StorageError
from shardyard.hardware.catalogue import instance
from shardyard.hardware.network_counters import busiest, sent_bytes, sent_since
from shardyard.io.polling import poll_in_background
from shardyard.log import info
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.network import ObservedNetwork, Transport

_POLL_S = 1.0

# As printed in NVIDIA/nccl#1597 and aws/aws-ofi-nccl#22: "NCCL INFO NET/OFI Selected Provider is
# efa (found 16 nics)", "selected provider" in newer plugins; "NCCL INFO Using network Socket", and
# IB of NCCL's own plugin for verbs. "Using network Libfabric" alone does not say over what.
_NETWORK = re.compile(r"using network (socket|ib)\b|selected provider is (\w+)", re.IGNORECASE)

# "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>", "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/
# RoCE [RO]; OOB eth0:10.0.0.1<0>", and "(found 16 nics)" of EFA's.
_INTERFACES = re.compile(r"NET/(?:Socket|IB) : Using ([^;]*)")
_INTERFACE = re.compile(r"\[\d+\]([^:\s]{1,64}):")
_COUNTED = re.compile(r"\(found (\d+) nics\)", re.IGNORECASE)

_QUIET = ("", "VERSION", "WARN")
"""Levels of NCCL_DEBUG at which it does not name its network."""


def network_in(line: str) -> Transport | None:
    """The network that a line of NCCL's log names; None if it names none that settles it."""
    found = _NETWORK.search(line)
    if found is None:
        return None
    if (found[1] or "").lower() == "ib":
        return "infiniband"
    provider = (found[2] or "").lower()
    if provider.startswith("efa"):
        return "efa"
    return "sockets" if found[1] or provider.startswith(("tcp", "sockets")) else None


def interfaces_in(line: str) -> str:
    """The interfaces that a line of NCCL's log names or counts; empty if it does neither."""
    if named := _INTERFACES.search(line):
        return ", ".join(_INTERFACE.findall(named[1]))
    counted = _COUNTED.search(line)
    return f"{counted[1]} interfaces" if counted else ""


def ask_for_network(environ: MutableMapping[str, str]) -> None:
    """Have NCCL name its network, in the processes that get this environment."""
    if environ.get("NCCL_DEBUG", "").upper() in _QUIET:
        environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET")


class NetworkCheck:
    """Finding of the network check; ``is_rejected`` once the run was stopped for it."""

    def __init__(
        self, recipe: Recipe, *, report: Callable[[Transport, str], None], stop: Callable[[], None]
    ) -> None:
        self.is_rejected = False
        self._recipe = recipe
        self._report = report
        self._stop = stop
        self._interfaces = ""

    def check_line(self, line: str) -> bool:
        """Judge one line; return whether the search is over."""
        network = network_in(line)
        self._interfaces = interfaces_in(line) or self._interfaces
        if network is not None:
            self._report(network, self._interfaces)
        if network == "sockets" and _expects_efa(self._recipe):
            self.is_rejected = self._recipe.launch.require_efa
            info(f"{'error' if self.is_rejected else 'warning'}: {self.words}")
            if self.is_rejected:
                self._stop()
        return network is not None

    @property
    def words(self) -> str:
        """Problem and fix, in words."""
        name = str(self._recipe.cluster.instance)
        return (
            f"NCCL uses TCP sockets between nodes, although {name} has "
            f"{instance(name).efa_count} EFA interfaces (launch.require_efa="
            f"{str(self._recipe.launch.require_efa).lower()}). Collectives run at a tenth of the "
            "speed or less. The image lacks the plugin aws-ofi-nccl, or the job was given no EFA "
            "interfaces: `shardyard doctor` looks for both."
        )


@contextmanager
def network_checked(
    run_dir: RunDir,
    attempt: int,
    *,
    node_rank: int,
    is_one_machine: bool = False,
    environ: MutableMapping[str, str] = os.environ,
    stop: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
) -> Iterator[NetworkCheck]:
    """Write down the network of a run of several nodes; judge it where EFA is expected.

    Args:
        node_rank: Rank of this node; node 0 looks for all.
        is_one_machine: Whether all nodes are this machine, so that loopback is between them.
        environ: Environment of the processes that the block starts; it makes NCCL name its network.
        stop: Makes this process drain and end.
    """
    recipe = read_resolved(run_dir.resolved(attempt)).recipe

    def report(transport: Transport, interfaces: str) -> None:
        found = ObservedNetwork(
            transport=transport, said_by="NCCL", attempt=attempt, interfaces=interfaces
        )
        write_network_event(run_dir, found)

    check = NetworkCheck(recipe, report=report, stop=stop)
    if node_rank > 0 or recipe.cluster.nodes == 1:
        yield check
        return
    if recipe.cluster.device == "cpu":
        sockets = _Sockets(run_dir, attempt, is_one_machine=is_one_machine)
        try:
            with poll_in_background(sockets.poll, every_s=_POLL_S, name="network"):
                yield check
        finally:
            sockets.report()
        return
    ask_for_network(environ)
    log = Tail(run_dir.log(attempt, rank=0))

    def poll() -> bool:
        with suppress(OSError):  # what cannot be read now is looked at later
            return any(check.check_line(line.decode(errors="replace")) for line in log.lines())
        return False

    with poll_in_background(poll, every_s=_POLL_S, name="network", poll_at_end=True):
        yield check


def write_network_event(run_dir: RunDir, network: ObservedNetwork) -> None:
    """Write it down."""
    events = EventWriter(run_dir.events, attempt=network.attempt, generation=0)
    events.write(
        "network",
        transport=network.transport,
        said_by=network.said_by,
        interfaces=network.interfaces,
    )
    events.close()


class _Sockets:
    """Tells of gloo's sockets once a step of this attempt has gone over them, or at the end."""

    def __init__(self, run_dir: RunDir, attempt: int, *, is_one_machine: bool) -> None:
        self._run_dir, self._attempt, self._is_one_machine = run_dir, attempt, is_one_machine
        self._before, self._metrics = sent_bytes(), Tail(run_dir.metrics)
        self._metrics.read()  # steps of earlier attempts
        self._has_reported = False

    def poll(self) -> bool:
        with suppress(OSError):
            if self._metrics.read():
                self.report()
        return self._has_reported

    def report(self) -> None:
        if (
            not self._has_reported and self._run_dir.path.is_dir()
        ):  # one that went is not made again
            self._has_reported = True
            sent = sent_since(self._before, sent_bytes())
            interface = busiest(sent, is_one_machine=self._is_one_machine) or ""
            found = ObservedNetwork(
                transport="sockets", said_by="gloo", attempt=self._attempt, interfaces=interface
            )
            with suppress(StorageError):  # a full disk is told by those who write the run's files
                write_network_event(self._run_dir, found)


def _expects_efa(recipe: Recipe) -> bool:
    name = recipe.cluster.instance
    return name is not None and instance(name).efa_count > 0

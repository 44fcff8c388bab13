"""Whether NCCL uses EFA where the machines have it, as it says itself once the ranks have met.

EFA that is silently missing is the most repeated defect of training on AWS: everything works, at a
tenth of the speed. NCCL names its network in the log of each rank, if it is told to.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Literal

from shardyard.config.schema import Recipe
from shardyard.control.follow import Tail
from shardyard.hardware.catalogue import instance
from shardyard.rundir.layout import RunDir
from shardyard.rundir.resolved import read_resolved
from shardyard.talk import say
from shardyard.waiting import meanwhile

_POLL_S = 1.0

# As printed in NVIDIA/nccl#1597 and aws/aws-ofi-nccl#22: "NCCL INFO NET/OFI Selected Provider is
# efa (found 16 nics)", "selected provider" in newer plugins; "NCCL INFO Using network Socket".
# "Using network Libfabric" alone does not say over what.
_NETWORK = re.compile(r"using network (socket)|selected provider is (\w+)", re.IGNORECASE)

_QUIET = ("", "VERSION", "WARN")
"""Levels of NCCL_DEBUG at which it does not name its network."""


def network_in(line: str) -> Literal["efa", "sockets"] | None:
    """The network that a line of NCCL's log names; None if it names none that settles it."""
    found = _NETWORK.search(line)
    if found is None:
        return None
    provider = (found[2] or "").lower()
    if provider.startswith("efa"):
        return "efa"
    return "sockets" if found[1] or provider.startswith(("tcp", "sockets")) else None


class NetworkCheck:
    """What was found; ``is_refused`` once the run was stopped for it."""

    def __init__(self, recipe: Recipe, *, stop: Callable[[], None]) -> None:
        self.is_refused = False
        self._recipe = recipe
        self._stop = stop

    def look_at(self, line: str) -> bool:
        """Judge one line; returns whether nothing more is to be looked for."""
        network = network_in(line)
        if network == "sockets":
            self.is_refused = self._recipe.launch.require_efa
            say(f"{'error' if self.is_refused else 'warning'}: {self.words}")
            if self.is_refused:
                self._stop()
        return network is not None

    @property
    def words(self) -> str:
        """What is wrong, and what to do."""
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
    environ: MutableMapping[str, str] = os.environ,
    stop: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
) -> Iterator[NetworkCheck]:
    """Read the log of rank 0 while the block runs, where EFA is to be expected.

    Args:
        node_rank: Of this node; node 0 looks for all.
        environ: Of the processes that are started in the block: NCCL is told to name its network.
        stop: Makes this process drain and end.
    """
    recipe = read_resolved(run_dir.resolved(attempt)).recipe
    check = NetworkCheck(recipe, stop=stop)
    if node_rank > 0 or not _expects_efa(recipe):
        yield check
        return
    if environ.get("NCCL_DEBUG", "").upper() in _QUIET:
        environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET")
    log = Tail(run_dir.log(attempt, rank=0))

    def look() -> bool:
        with suppress(OSError):  # what cannot be read now is looked at later
            return any(check.look_at(line.decode(errors="replace")) for line in log.lines())
        return False

    with meanwhile(look, every_s=_POLL_S, name="network", looks_at_end=True):
        yield check


def _expects_efa(recipe: Recipe) -> bool:
    name, is_cpu = recipe.cluster.instance, recipe.cluster.device == "cpu"
    if name is None or is_cpu or recipe.cluster.nodes == 1:
        return False
    return instance(name).efa_count > 0

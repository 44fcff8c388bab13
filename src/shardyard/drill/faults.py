"""All that a drill breaks, one row each; how it is done from outside: `injectors.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardyard.drill import injectors
from shardyard.drill.case_state import CaseState
from shardyard.drill.network import no_network_reason
from shardyard.drill.recipe import DrillRecipe
from shardyard.drill.sandbox import no_namespaces_reason

BY_COMMAND = "answer"
"""Kind of event for the last words of the command line, of a run that ended."""

_FEWEST_REPLICAS = 3
"""Fewest replicas that show the wrong one; of two that differ, either may be wrong."""


@dataclass(frozen=True, kw_only=True)
class ExpectedReport:
    """Words by which a run shows that it understood a fault."""

    kinds: tuple[str, ...]
    """Kinds of events, any of which may say it."""
    words: str
    """A regular expression that what it says must match."""
    who: Literal["rank", "node", ""] = ""
    """Whether the target must be named, and no other."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    what: str
    """The fault, in a few words."""
    method: str
    """The way in which the drill makes it happen."""
    acts_on: Literal["rank", "node", "run", "machine"]
    named: ExpectedReport | None
    """Required report of the fault; None: the run must continue as if undisturbed."""
    strike: Callable[[CaseState], None] | None = None
    """From outside, at the step of the fault. None: the worker does it by itself."""
    inside: str = ""
    """Kind in ``SHARDYARD_FAULTS`` of a fault that a worker makes."""
    is_everywhere: bool = False
    """Whether a fault that a worker makes is on all ranks."""
    repair: Callable[[CaseState], None] | None = None
    """Fix that a person would apply before the run is resumed."""
    own_disk: Literal["run", "scratch", "shared memory"] | None = None
    """File system that the case needs for itself."""
    needs_network: bool = False
    """Whether the nodes need a network of the case's own."""
    needs_clock: bool = False
    """Whether the last node needs a clock of its own."""
    needs_spare_node: bool = False
    """Whether the run must be able to continue without a node."""
    needs_replicas: bool = False
    """Whether it is seen where ranks compare a weight that each of them holds, and only there."""
    node: Literal["first", "last"] | None = None
    """The node that is the target; None: any rank is."""
    min_steps: int = 1
    """Fewest steps of the run for the fault to be reported before its end."""
    min_nodes: int = 1
    max_nodes: int = 10**6
    is_early: bool = False
    """Whether it takes many steps to be noticed, and strikes near the beginning."""

    def impossible_reason(self, drilled: DrillRecipe) -> str:
        """Why it is not possible with this recipe, on this machine; empty: it is."""
        if drilled.nodes < self.min_nodes:
            return f"the recipe has {drilled.nodes} node; cluster.nodes=2 launches two here"
        if drilled.nodes > self.max_nodes:
            return f"of a run on one node; this one has {drilled.nodes}"
        if drilled.steps < self.min_steps:
            return f"it is detected after about 8 s; --steps {self.min_steps} leaves room"
        if self.needs_spare_node and drilled.min_nodes >= drilled.nodes:
            return f"the run needs all {drilled.nodes} nodes; elastic.min_nodes lets it continue"
        if self.needs_replicas and (why := _no_comparison_reason(drilled)):
            return why
        if self.own_disk and (why := no_namespaces_reason()):
            return f"it needs file systems of its own: {why}"
        return no_network_reason() if self.needs_network else ""

    @property
    def needs_namespaces(self) -> str:
        """Resources of its own that the case needs and only namespaces provide; empty if none."""
        if self.own_disk:
            return "file systems"
        return "networks" if self.needs_network else ""


def _no_comparison_reason(drilled: DrillRecipe) -> str:
    """Why ranks cannot tell whose weight is wrong; empty: they can."""
    if not drilled.checks_bits:
        return "it is not looked for; elastic.check_bits_every=5 does so, every five steps"
    if drilled.replicas is not None and drilled.replicas < _FEWEST_REPLICAS:
        return (
            f"the ranks that hold a weight alike are {drilled.replicas}, and it takes "
            f"{_FEWEST_REPLICAS} to tell which is wrong; parallel.strategy=NO_SHARD has all"
        )
    return ""


# --- the table ----------------------------------------------------------------------------------


def _lost(words: str) -> ExpectedReport:
    return ExpectedReport(kinds=("worker_lost",), words=words, who="rank")


def _hung(words: str) -> ExpectedReport:
    return ExpectedReport(kinds=("worker_hung",), words=words, who="rank")


FAULTS: dict[str, Fault] = {
    "sigkill": Fault(
        what="a rank is killed",
        method="SIGKILL to its process",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=injectors.kill_rank,
    ),
    "sigterm": Fault(
        what="a stop of the run is requested",
        method="SIGTERM to the command line, or to the supervisor of several nodes",
        acts_on="run",
        named=ExpectedReport(kinds=("draining",), words="SIGTERM"),
        strike=injectors.end_run,
    ),
    "sigstop": Fault(
        what="a rank is stopped",
        method="SIGSTOP to its process",
        acts_on="rank",
        named=_hung("stopped"),
        strike=injectors.stop_rank,
    ),
    "exception": Fault(
        what="a rank raises an exception",
        method="RuntimeError before a step",
        acts_on="rank",
        named=_lost("RuntimeError: a drill raised this"),
        inside="exception",
    ),
    "memory-error": Fault(
        what="a rank asks for more memory than there is",
        method="an allocation of 4 EiB before a step",
        acts_on="rank",
        named=_lost("MemoryError|out of memory"),
        inside="memory-error",
    ),
    "abort": Fault(
        what="native code of a rank gives up",
        method="abort() before a step",
        acts_on="rank",
        named=_lost("SIGABRT"),
        inside="abort",
    ),
    "segfault": Fault(
        what="native code of a rank crashes",
        method="a read of address 0 before a step",
        acts_on="rank",
        named=_lost("SIGSEGV"),
        inside="segfault",
    ),
    "gil": Fault(
        what="native code of a rank never gives the interpreter back",
        method="a wait for a mutex of the C library that never ends, with the GIL held",
        acts_on="rank",
        named=_hung("sleep"),
        inside="gil",
    ),
    "sleep": Fault(
        what="a rank waits for something that never comes",
        method="time.sleep of a day before a step",
        acts_on="rank",
        named=_hung("sleep"),
        inside="sleep",
    ),
    "slow": Fault(
        what="a rank becomes slow",
        method="from an early step on it sleeps three times what a step takes, at least 0.25 s",
        is_early=True,
        acts_on="rank",
        named=ExpectedReport(kinds=("straggler",), words="", who="rank"),
        inside="slow",
    ),
    "pulses": Fault(
        what="a rank is stopped now and then, for less than a hang",
        method=(
            f"from an early step on, in turn stopped for {injectors.STOPPED_S:g} s (SIGSTOP) and "
            f"continued for {injectors.LET_GO_S:g} s (SIGCONT), until it is reported"
        ),
        is_early=True,
        acts_on="rank",
        named=ExpectedReport(
            kinds=("straggler",), words="what stopped|is_held_up True", who="rank"
        ),
        strike=injectors.pulse_rank,
        min_steps=500,
    ),
    "nan": Fault(
        what="a weight is not finite",
        method="NaN into a weight of each rank after a step",
        acts_on="run",
        named=ExpectedReport(kinds=("attempt_ended",), words="not finite|NaN"),
        inside="weight",
        is_everywhere=True,
    ),
    "bit": Fault(
        what="memory of a rank loses a bit",
        method="one bit of the mantissa of one weight turned over after a step",
        acts_on="rank",
        named=ExpectedReport(kinds=("device_problem",), words="", who="rank"),
        inside="bit",
        needs_replicas=True,
    ),
    "fork-server": Fault(
        what="the fork server of a node is killed",
        method="SIGKILL to the parent of its ranks",
        acts_on="node",
        named=ExpectedReport(kinds=("worker_lost",), words="fork server .* SIGKILL"),
        strike=injectors.kill_fork_server,
    ),
    "agent": Fault(
        what="the agent is killed",
        method="SIGKILL to the parent of the fork server",
        acts_on="node",
        named=ExpectedReport(kinds=(BY_COMMAND,), words="agent .* SIGKILL"),
        strike=injectors.kill_agent,
        max_nodes=1,
    ),
    "command-line": Fault(
        what="the command line is killed",
        method="SIGKILL to `shardyard train`",
        acts_on="run",
        named=ExpectedReport(kinds=("draining",), words="SIGHUP"),
        strike=injectors.kill_command_line,
        max_nodes=1,
    ),
    "supervisor": Fault(
        what="the supervisor of the nodes is killed",
        method="SIGKILL to the process that `launch --on local` left",
        acts_on="run",
        named=ExpectedReport(kinds=("draining",), words="SIGTERM"),
        strike=injectors.kill_supervisor,
        min_nodes=2,
    ),
    "lost-node": Fault(
        what="a node is lost",
        method="SIGKILL to its program, and by the kernel to its agent and ranks",
        acts_on="node",
        named=ExpectedReport(kinds=("node_lost",), words="", who="node"),
        strike=injectors.kill_node,
        node="last",
        min_nodes=2,
    ),
    "node-0": Fault(
        what="the node that serves the meeting place is lost",
        method="as lost-node, of node 0",
        acts_on="node",
        named=ExpectedReport(kinds=("node_lost",), words="", who="node"),
        strike=injectors.kill_node,
        node="first",
        min_nodes=2,
    ),
    "bad-node": Fault(
        what="a node's ranks die at each start",
        method="SIGKILL to a rank of it, at each start, until the others continue without it",
        acts_on="node",
        named=ExpectedReport(kinds=("node_left_out",), words="losses in a row", who="node"),
        strike=injectors.break_node,
        node="last",
        min_nodes=2,
        needs_spare_node=True,
    ),
    "joining-node": Fault(
        what="a node joins while the others train",
        method="one is killed, and started again once the others continue without it",
        acts_on="node",
        named=ExpectedReport(kinds=("resized",), words="world_size"),
        strike=injectors.replace_node,
        node="last",
        min_nodes=2,
        needs_spare_node=True,
        is_early=True,
    ),
    "network-cut": Fault(
        what="a node is cut off from the others",
        method="none of its packets arrives, until its agent has ended or the others continue",
        acts_on="node",
        named=ExpectedReport(kinds=("node_lost",), words="", who="node"),
        strike=injectors.cut_network,
        node="last",
        min_nodes=2,
        needs_network=True,
    ),
    "delay-and-loss": Fault(
        what="the network between the nodes is bad",
        method=f"each packet comes {1e3 * injectors.DELAY_S:g} ms late, and {injectors.LOSS:.0%} "
        "of them do not come",
        acts_on="run",
        named=None,
        strike=injectors.make_network_bad,
        min_nodes=2,
        needs_network=True,
    ),
    "clock-step": Fault(
        what="the clock of a node is set wrong by an hour",
        method="that of the Python processes of the last node, forwards or back",
        acts_on="node",
        named=None,
        strike=injectors.move_clock,
        node="last",
        needs_clock=True,
    ),
    "kill-in-save": Fault(
        what="a rank is killed while a checkpoint is written",
        method="SIGKILL at a random moment of a save",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=injectors.kill_in_save,
    ),
    "damaged-checkpoint": Fault(
        what="the newest checkpoint is damaged when a restart needs it",
        method="SIGKILL to a rank, then the last 64 bytes of a tensor file turned over",
        acts_on="run",
        named=ExpectedReport(kinds=("checkpoint_loaded",), words="damaged.*SHA-256"),
        strike=injectors.damage_checkpoint,
    ),
    "vanished-folder": Fault(
        what="the run folder vanishes, and comes back before the run is resumed",
        method="the folder is renamed",
        acts_on="run",
        named=ExpectedReport(kinds=(BY_COMMAND,), words="is not there any more"),
        strike=injectors.take_folder_away,
        repair=injectors.restore_folder,
        max_nodes=1,
    ),
    "full-run-folder": Fault(
        what="the disk of the run folder is full, and has room before the run is resumed",
        method="its file system, of the case's own, is made as small as what it holds",
        acts_on="run",
        named=ExpectedReport(kinds=("attempt_ended", BY_COMMAND), words="[Nn]o space left"),
        strike=injectors.fill_run_folder,
        repair=injectors.empty_run_folder,
        own_disk="run",
    ),
    "full-scratch": Fault(
        what="the disk of the scratch folder (TMPDIR) is full",
        method="as full-run-folder; a run that trains needs no more of it",
        acts_on="run",
        named=None,
        strike=injectors.fill_scratch,
        own_disk="scratch",
    ),
    "full-shm": Fault(
        what="/dev/shm is full when a restart needs it, and has room before the run is resumed",
        method="as full-run-folder, and SIGKILL to a rank",
        acts_on="node",
        named=ExpectedReport(kinds=("attempt_ended", BY_COMMAND), words="/dev/shm is full"),
        strike=injectors.fill_shared_memory,
        repair=injectors.empty_shared_memory,
        own_disk="shared memory",
    ),
    "power": Fault(
        what="the machine loses its power",
        method="SIGKILL to every process of the run",
        acts_on="machine",
        named=None,
        strike=injectors.kill_everything,
        repair=injectors.drop_memory,
    ),
}
"""Name -> fault, in the order of the result. Benchmarks add faults of their own."""

REMOVED = {
    "kill-in-load": "sigkill, which kills a rank, or bad-node, which kills one at each start",
    "kill-in-snapshot": "sigkill with elastic.snapshot_every=2 in the recipe",
}
"""Name of a former fault -> what to use instead."""

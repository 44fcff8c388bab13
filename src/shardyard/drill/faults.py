"""All that a drill breaks, one row each; how it is done is a small function above the table."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from shardyard.drill.apart import SHARED_MEMORY, is_apart, why_not_apart
from shardyard.drill.disks import fill, make_room
from shardyard.drill.marked import environment_of, words_of
from shardyard.drill.network import Weather
from shardyard.drill.recipe import Drilled
from shardyard.drill.scene import Missed, Scene
from shardyard.drill.slots import SlotWatch
from shardyard.drill.surroundings import why_no_network

BY_COMMAND = "answer"
"""Stands among kinds of events for the last words of the command line, of a run that ended."""


_LOAD_S = 0.1
"""From the first look into a checkpoint until a small model has read it, and some more."""
_DELAY_S, _LOSS = 0.005, 0.01
"""Of a bad network: each way, and of packets."""
_HOUR_S = 3600.0
_FEWEST_REPLICAS = 3
"""Of two that differ, either may be the wrong one."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a run must say of a fault, to have understood it."""

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
    """What happens, in a few words."""
    how: str
    """How it is made to happen."""
    acts_on: Literal["rank", "node", "run", "machine"]
    named: Named | None
    """None: nothing has to be noticed; the run must go on as if nothing had happened."""
    strike: Callable[[Scene], None] | None = None
    """From outside, at the step of the fault. None: the worker does it by itself."""
    inside: str = ""
    """Of a fault that a worker makes: its kind in ``SHARDYARD_FAULTS``."""
    is_everywhere: bool = False
    """Of such a fault: whether on all ranks."""
    mend: Callable[[Scene], None] | None = None
    """What a person would do before the run is resumed."""
    own_disk: Literal["run", "scratch", "shared memory"] | None = None
    """What has to be a file system of the case's own."""
    needs_network: bool = False
    """Whether the nodes need a network of the case's own."""
    needs_clock: bool = False
    """Whether the last node needs a clock of its own."""
    needs_spare_node: bool = False
    """Whether the run must be able to go on without a node."""
    needs_snapshots: bool = False
    needs_replicas: bool = False
    """Whether it is seen where ranks compare a weight that each of them holds, and only there."""
    node: Literal["first", "last"] | None = None
    """The node that is the target; None: any rank is."""
    fewest_nodes: int = 1
    most_nodes: int = 10**6
    is_early: bool = False
    """Whether it takes many steps to be noticed, and strikes near the beginning."""

    def why_not(self, drilled: Drilled) -> str:
        """Why it is not possible with this recipe, on this machine; empty: it is."""
        if drilled.nodes < self.fewest_nodes:
            return f"the recipe has {drilled.nodes} node; cluster.nodes=2 launches two here"
        if drilled.nodes > self.most_nodes:
            return f"of a run on one node; this one has {drilled.nodes}"
        if self.needs_spare_node and drilled.fewest_nodes >= drilled.nodes:
            return f"the run needs all {drilled.nodes} nodes; elastic.min_nodes lets it go on"
        if self.needs_snapshots and not drilled.takes_snapshots:
            return "the recipe takes none; elastic.snapshot_every=2 takes one every two steps"
        if self.needs_replicas and (why := _why_no_comparison(drilled)):
            return why
        if self.own_disk and (why := why_not_apart()):
            return f"it needs file systems of its own: {why}"
        return why_no_network() if self.needs_network else ""

    @property
    def needs_namespaces(self) -> str:
        """What of the case's own it needs that there is in namespaces alone; empty: nothing."""
        if self.own_disk:
            return "file systems"
        return "networks" if self.needs_network else ""


def _why_no_comparison(drilled: Drilled) -> str:
    """Why ranks cannot tell whose weight is wrong; empty: they can."""
    if not drilled.checks_bits:
        return "nothing looks for it; elastic.check_bits_every=5 does, every five steps"
    if drilled.replicas is not None and drilled.replicas < _FEWEST_REPLICAS:
        return (
            f"the ranks that hold a weight alike are {drilled.replicas}, and it takes "
            f"{_FEWEST_REPLICAS} to tell which is wrong; parallel.strategy=NO_SHARD has all"
        )
    return ""


# --- from outside -------------------------------------------------------------------------------


def _kill_rank(scene: Scene) -> None:
    scene.kill(scene.worker)


def _stop_rank(scene: Scene) -> None:
    scene.kill(scene.worker, signal.SIGSTOP)


def _end_rank(scene: Scene) -> None:
    scene.kill(scene.worker, signal.SIGTERM)


def _end_run(scene: Scene) -> None:
    scene.kill(scene.top, signal.SIGTERM)


def _kill_fork_server(scene: Scene) -> None:
    scene.kill(scene.fork_server)


def _kill_agent(scene: Scene) -> None:
    scene.kill(scene.agent)


def _kill_command_line(scene: Scene) -> None:
    scene.kill(scene.top)


def _kill_supervisor(scene: Scene) -> None:
    scene.kill(scene.top)


def _kill_node(scene: Scene) -> None:
    """Its program, and with it by the kernel its agent, fork server and ranks."""
    scene.kill(scene.above_agent)


def _kill_everything(scene: Scene) -> None:
    scene.marked.kill_all()


def _lose_memory(_scene: Scene) -> None:
    """Shared memory goes with the power; elsewhere than apart it is not the drill's to clear."""
    if is_apart():
        for name in SHARED_MEMORY.iterdir():
            name.unlink()


def _kill_in_save(scene: Scene) -> None:
    """Kill a rank at a random moment of a save."""
    took_s = [float(event["seconds"]) for event in scene.events("checkpoint_durable")]
    worker = scene.worker
    scene.wait(lambda: _half_written(scene), "a save")
    time.sleep(scene.draw.uniform(0.0, median(took_s) if took_s else 0.0))
    scene.notes["was_inside"] = _half_written(scene)
    scene.kill(worker)


def _half_written(scene: Scene) -> bool:
    return any(scene.run.checkpoints.glob("*.tmp"))


def _kill_in_load(scene: Scene) -> None:
    """Kill a rank, and once more at a random moment while the restart reads its checkpoint."""
    scene.kill(scene.worker)
    before = len(scene.events("rendezvous"))
    scene.wait(lambda: len(scene.events("rendezvous")) > before, "the restart")
    worker, generation = scene.worker, scene.events("rendezvous")[-1]["generation"]

    def has_loaded() -> bool:
        return any(e["generation"] == generation for e in scene.events("checkpoint_loaded"))

    scene.wait(lambda: scene.has_open(worker, scene.run.checkpoints) or has_loaded(), "a load")
    time.sleep(scene.draw.uniform(0.0, _LOAD_S))
    scene.notes["was_inside"] = not has_loaded()
    scene.kill(worker)


def _kill_in_snapshot(scene: Scene) -> None:
    """Kill a rank at a random moment of a copy, once it is known how long one takes."""
    worker = scene.worker
    with closing(SlotWatch(scene.agent, scene.rank % scene.devices)) as slots:
        scene.wait_closely(slots.is_copying, "a snapshot")
        began_s = time.monotonic()
        scene.wait_closely(lambda: not slots.is_copying(), "the end of a snapshot")
        took_s = time.monotonic() - began_s
        scene.wait_closely(slots.is_copying, "another snapshot")
        end_s = time.monotonic() + scene.draw.uniform(0.0, took_s)
        while time.monotonic() < end_s:
            pass
        scene.kill(worker)
        scene.wait_until_gone(worker, "the killed rank")
        scene.notes["was_inside"] = slots.is_copying()


def _damage_checkpoint(scene: Scene) -> None:
    """Kill a rank, and turn over bytes of the newest checkpoint before the restart reads it."""
    scene.wait(lambda: len(scene.run.checkpoint_steps()) > 1, "a second checkpoint")
    before = len(scene.events("worker_lost"))
    scene.kill(scene.worker)
    scene.wait(lambda: len(scene.events("worker_lost")) > before, "the notice of the loss")
    newest = scene.run.checkpoint(scene.run.checkpoint_steps()[-1])
    turn_bytes(max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size))
    scene.notes["damaged"] = newest.name


def turn_bytes(file: Path) -> None:
    """Turn over the last 64 bytes: its size stays, its content does not."""
    with file.open("r+b") as content:
        content.seek(-64, 2)
        last = content.read()
        content.seek(-64, 2)
        content.write(bytes(byte ^ 0xFF for byte in last))


def _take_folder_away(scene: Scene) -> None:
    scene.run.path.rename(_aside(scene))


def _bring_folder_back(scene: Scene) -> None:
    if scene.run.path.exists():  # something was made anew in its place
        scene.notes["made_anew"] = sorted(path.name for path in scene.run.path.iterdir())
        shutil.rmtree(scene.run.path)
    _aside(scene).rename(scene.run.path)


def _aside(scene: Scene) -> Path:
    return scene.run.path.with_name(f"{scene.run.run_id}-aside")


def _fill_run_folder(scene: Scene) -> None:
    fill(scene.run.path)


def _empty_run_folder(scene: Scene) -> None:
    make_room(scene.run.path)


def _fill_scratch(scene: Scene) -> None:
    fill(scene.scratch)


def _fill_shared_memory(scene: Scene) -> None:
    """Full, and a rank killed: a restart makes semaphores there, a step does not."""
    fill(SHARED_MEMORY)
    scene.kill(scene.worker)


def _empty_shared_memory(_scene: Scene) -> None:
    make_room(SHARED_MEMORY)


def _cut_network(scene: Scene) -> None:
    """Cut the target's node off, until its agent has ended or the others go on without it."""
    assert scene.network is not None
    agent, before = scene.agent, scene.world_size
    scene.struck_t = time.time()
    scene.network.become(Weather(cut=(scene.node,)))
    try:
        scene.wait(
            lambda: not scene.marked.has(agent) or scene.world_size not in (0, before),
            "a meeting of the others",
        )
    except Missed as why:
        scene.notes["while_cut"] = str(why)
    scene.network.become(Weather())


def _break_node(scene: Scene) -> None:
    """Kill a rank of a node at each start, until the others go on without that node."""
    while not scene.events("node_left_out"):
        before = len(scene.events("rendezvous"))
        scene.aim(at_node=True)
        scene.kill(scene.worker)
        scene.wait(partial(_has_met_since, scene, before), "the restart")


def _has_met_since(scene: Scene, meetings: int) -> bool:
    return len(scene.events("rendezvous")) > meetings


def _make_network_bad(scene: Scene) -> None:
    assert scene.network is not None
    scene.struck_t = time.time()
    scene.network.become(Weather(delay_s=_DELAY_S, loss=_LOSS))


def _move_clock(scene: Scene) -> None:
    assert scene.clock is not None
    scene.notes["seconds"] = seconds = scene.draw.choice((-_HOUR_S, _HOUR_S))
    scene.struck_t = time.time()
    scene.clock.move(seconds)


def _replace_node(scene: Scene) -> None:
    """Kill a node, and once the others go on without it start it anew, as a person would."""
    program, before = scene.above_agent, scene.world_size
    words, environment = words_of(program), environment_of(program)
    scene.kill(program)
    scene.wait(lambda: scene.world_size not in (0, before), "a meeting without the node")
    step = scene.last_step()
    scene.wait(lambda: scene.last_step() > step + 1, "a step without the node")
    scene.struck_t = time.time()
    log = scene.run.path / "logs" / "joining-node.log"
    with log.open("ab") as talk:
        subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk,
            start_new_session=True,
        )  # fmt: skip


# --- the table ----------------------------------------------------------------------------------


def _lost(words: str) -> Named:
    return Named(kinds=("worker_lost",), words=words, who="rank")


def _hung(words: str) -> Named:
    return Named(kinds=("worker_hung",), words=words, who="rank")


FAULTS: Mapping[str, Fault] = {
    "sigkill": Fault(
        what="a rank is killed",
        how="SIGKILL to its process",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=_kill_rank,
    ),
    "sigterm": Fault(
        what="the run is asked to stop",
        how="SIGTERM to the command line, or to the supervisor of several nodes",
        acts_on="run",
        named=Named(kinds=("draining",), words="SIGTERM"),
        strike=_end_run,
    ),
    "sigstop": Fault(
        what="a rank is stopped",
        how="SIGSTOP to its process",
        acts_on="rank",
        named=_hung("stopped"),
        strike=_stop_rank,
    ),
    "exception": Fault(
        what="a rank raises an exception",
        how="RuntimeError before a step",
        acts_on="rank",
        named=_lost("RuntimeError: a drill raised this"),
        inside="exception",
    ),
    "memory-error": Fault(
        what="a rank asks for more memory than there is",
        how="an allocation of 4 EiB before a step",
        acts_on="rank",
        named=_lost("MemoryError|out of memory"),
        inside="memory-error",
    ),
    "abort": Fault(
        what="native code of a rank gives up",
        how="abort() before a step",
        acts_on="rank",
        named=_lost("SIGABRT"),
        inside="abort",
    ),
    "segfault": Fault(
        what="native code of a rank crashes",
        how="a read of address 0 before a step",
        acts_on="rank",
        named=_lost("SIGSEGV"),
        inside="segfault",
    ),
    "gil": Fault(
        what="native code of a rank never gives the interpreter back",
        how="a wait for a mutex of the C library that never ends, with the GIL held",
        acts_on="rank",
        named=_hung("sleep"),
        inside="gil",
    ),
    "sleep": Fault(
        what="a rank waits for something that never comes",
        how="time.sleep of a day before a step",
        acts_on="rank",
        named=_hung("sleep"),
        inside="sleep",
    ),
    "slow": Fault(
        what="a rank becomes slow",
        how="from an early step on it sleeps three times what a step takes, at least 0.25 s",
        is_early=True,
        acts_on="rank",
        named=Named(kinds=("straggler",), words="", who="rank"),
        inside="slow",
    ),
    "nan": Fault(
        what="a weight is not finite",
        how="NaN into a weight of each rank after a step",
        acts_on="run",
        named=Named(kinds=("attempt_ended",), words="not finite|NaN"),
        inside="weight",
        is_everywhere=True,
    ),
    "bit": Fault(
        what="memory of a rank loses a bit",
        how="one bit of the mantissa of one weight turned over after a step",
        acts_on="rank",
        named=Named(kinds=("device_problem",), words="", who="rank"),
        inside="bit",
        needs_replicas=True,
    ),
    "fork-server": Fault(
        what="the fork server of a node is killed",
        how="SIGKILL to the parent of its ranks",
        acts_on="node",
        named=Named(kinds=("worker_lost",), words="fork server .* SIGKILL"),
        strike=_kill_fork_server,
    ),
    "agent": Fault(
        what="the agent is killed",
        how="SIGKILL to the parent of the fork server",
        acts_on="node",
        named=Named(kinds=(BY_COMMAND,), words="agent .* SIGKILL"),
        strike=_kill_agent,
        most_nodes=1,
    ),
    "command-line": Fault(
        what="the command line is killed",
        how="SIGKILL to `shardyard train`",
        acts_on="run",
        named=Named(kinds=("draining",), words="SIGHUP"),
        strike=_kill_command_line,
        most_nodes=1,
    ),
    "supervisor": Fault(
        what="the supervisor of the nodes is killed",
        how="SIGKILL to the process that `launch --on local` left",
        acts_on="run",
        named=Named(kinds=("draining",), words="SIGTERM"),
        strike=_kill_supervisor,
        fewest_nodes=2,
    ),
    "lost-node": Fault(
        what="a node is lost",
        how="SIGKILL to its program, and by the kernel to its agent and ranks",
        acts_on="node",
        named=Named(kinds=("node_lost",), words="", who="node"),
        strike=_kill_node,
        node="last",
        fewest_nodes=2,
    ),
    "node-0": Fault(
        what="the node that serves the meeting place is lost",
        how="as lost-node, of node 0",
        acts_on="node",
        named=Named(kinds=("node_lost",), words="", who="node"),
        strike=_kill_node,
        node="first",
        fewest_nodes=2,
    ),
    "bad-node": Fault(
        what="a node's ranks die at each start",
        how="SIGKILL to a rank of it, at each start, until the others go on without it",
        acts_on="node",
        named=Named(kinds=("node_left_out",), words="losses in a row", who="node"),
        strike=_break_node,
        node="last",
        fewest_nodes=2,
        needs_spare_node=True,
    ),
    "joining-node": Fault(
        what="a node joins while the others train",
        how="one is killed, and started again once the others go on without it",
        acts_on="node",
        named=Named(kinds=("resized",), words="world_size"),
        strike=_replace_node,
        node="last",
        fewest_nodes=2,
        needs_spare_node=True,
    ),
    "network-cut": Fault(
        what="a node is cut off from the others",
        how="none of its packets arrives, until its agent has ended or the others go on",
        acts_on="node",
        named=Named(kinds=("node_lost",), words="", who="node"),
        strike=_cut_network,
        node="last",
        fewest_nodes=2,
        needs_network=True,
    ),
    "delay-and-loss": Fault(
        what="the network between the nodes is bad",
        how=f"each packet comes {1e3 * _DELAY_S:g} ms late, and {_LOSS:.0%} of them do not come",
        acts_on="run",
        named=None,
        strike=_make_network_bad,
        fewest_nodes=2,
        needs_network=True,
    ),
    "clock-step": Fault(
        what="the clock of a node is set wrong by an hour",
        how="that of the Python processes of the last node, forwards or back",
        acts_on="node",
        named=None,
        strike=_move_clock,
        node="last",
        needs_clock=True,
    ),
    "kill-in-save": Fault(
        what="a rank is killed while a checkpoint is written",
        how="SIGKILL at a random moment of a save",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=_kill_in_save,
    ),
    "kill-in-load": Fault(
        what="a rank is killed, and again while the restart loads",
        how="SIGKILL, and another at a random moment of the restart's load",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=_kill_in_load,
    ),
    "kill-in-snapshot": Fault(
        what="a rank is killed while its state is copied into a snapshot",
        how="SIGKILL at a random moment of a copy",
        acts_on="rank",
        named=_lost("SIGKILL"),
        strike=_kill_in_snapshot,
        needs_snapshots=True,
    ),
    "damaged-checkpoint": Fault(
        what="the newest checkpoint is damaged when a restart needs it",
        how="SIGKILL to a rank, then the last 64 bytes of a tensor file turned over",
        acts_on="run",
        named=Named(kinds=("checkpoint_loaded",), words="damaged.*SHA-256"),
        strike=_damage_checkpoint,
    ),
    "vanished-folder": Fault(
        what="the run folder vanishes, and comes back before the run is resumed",
        how="the folder is renamed",
        acts_on="run",
        named=Named(kinds=(BY_COMMAND,), words="is not there any more"),
        strike=_take_folder_away,
        mend=_bring_folder_back,
        most_nodes=1,
    ),
    "full-run-folder": Fault(
        what="the disk of the run folder is full, and has room before the run is resumed",
        how="its file system, of the case's own, is made as small as what it holds",
        acts_on="run",
        named=Named(kinds=("attempt_ended", BY_COMMAND), words="[Nn]o space left"),
        strike=_fill_run_folder,
        mend=_empty_run_folder,
        own_disk="run",
    ),
    "full-scratch": Fault(
        what="the disk of the scratch folder (TMPDIR) is full",
        how="as full-run-folder; a run that trains needs no more of it",
        acts_on="run",
        named=None,
        strike=_fill_scratch,
        own_disk="scratch",
    ),
    "full-shm": Fault(
        what="/dev/shm is full when a restart needs it, and has room before the run is resumed",
        how="as full-run-folder, and SIGKILL to a rank",
        acts_on="node",
        named=Named(kinds=("attempt_ended", BY_COMMAND), words="/dev/shm is full"),
        strike=_fill_shared_memory,
        mend=_empty_shared_memory,
        own_disk="shared memory",
    ),
    "power": Fault(
        what="the machine loses its power",
        how="SIGKILL to every process of the run",
        acts_on="machine",
        named=None,
        strike=_kill_everything,
        mend=_lose_memory,
    ),
}
"""Name -> fault, in the order of the result."""

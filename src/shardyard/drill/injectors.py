"""Inject faults from outside, each by a small function: signals, network, disk, clock."""

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from statistics import median

from shardyard.drill.case_state import CaseState, MissedInjection
from shardyard.drill.network import NetworkConditions
from shardyard.drill.sandbox import SHARED_MEMORY, fill, is_in_namespaces, restore_size
from shardyard.drill.scene import environment_of, words_of

DELAY_S, LOSS = 0.005, 0.01
"""Delay each way in seconds, and share of lost packets, of a bad network."""
_HOUR_S = 3600.0
_BOOT_S = 120.0
"""Least time of a machine to come back; agents clear away after one minute."""
STOPPED_S, LET_GO_S = 0.6, 0.3
"""Seconds stopped and let go in a pulse.

The stop is far below the time after which a hang is reported, and steps fit in between.
"""


def kill_rank(state: CaseState) -> None:
    state.kill(state.worker)


def stop_rank(state: CaseState) -> None:
    state.kill(state.worker, signal.SIGSTOP)


def pulse_rank(state: CaseState) -> None:
    """Stop a rank for a moment and continue it, repeatedly, until the run reports it."""
    worker = state.worker
    state.injected_t = time.time()
    step, since_s = state.last_step(), time.monotonic()
    while not state.events("straggler") and state.marked.signal(worker, signal.SIGSTOP):
        time.sleep(STOPPED_S)
        state.marked.signal(worker, signal.SIGCONT)
        time.sleep(LET_GO_S)
        if (now := state.last_step()) != step:
            step, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > state.within_s:
            raise MissedInjection("a step between the pulses did not come")


def end_run(state: CaseState) -> None:
    state.kill(state.top, signal.SIGTERM)


def kill_fork_server(state: CaseState) -> None:
    state.kill(state.fork_server)


def kill_agent(state: CaseState) -> None:
    state.kill(state.agent)


def kill_command_line(state: CaseState) -> None:
    state.kill(state.top)


def kill_supervisor(state: CaseState) -> None:
    state.kill(state.top)


def kill_node(state: CaseState) -> None:
    """Its program, and with it by the kernel its agent, fork server and ranks."""
    state.kill(state.above_agent)


def kill_everything(state: CaseState) -> None:
    state.marked.kill_all()


def drop_memory(state: CaseState) -> None:
    """Shared memory goes with the power; elsewhere than apart it is not the drill's to clear.

    What lies in the scratch folder grows older by the time that a machine takes to come back.
    """
    if is_in_namespaces():
        for name in SHARED_MEMORY.iterdir():
            name.unlink()
    for entry in state.scratch.iterdir():
        died_s = entry.stat().st_mtime - _BOOT_S
        os.utime(entry, (died_s, died_s))


def kill_in_save(state: CaseState) -> None:
    """Kill a rank at a random moment of a save."""
    took_s = [float(event["seconds"]) for event in state.events("checkpoint_durable")]
    worker = state.worker
    state.wait(lambda: _half_written(state), "a save")
    time.sleep(state.draw.uniform(0.0, median(took_s) if took_s else 0.0))
    state.notes["was_inside"] = _half_written(state)
    state.kill(worker)


def _half_written(state: CaseState) -> bool:
    return any(state.run.checkpoints.glob("*.tmp"))


def damage_checkpoint(state: CaseState) -> None:
    """Kill a rank, and turn over bytes of the newest checkpoint before the restart reads it."""
    state.wait(lambda: len(state.run.checkpoint_steps()) > 1, "a second checkpoint")
    before = len(state.events("worker_lost"))
    state.kill(state.worker)
    state.wait(lambda: len(state.events("worker_lost")) > before, "the notice of the loss")
    newest = state.run.checkpoint(state.run.checkpoint_steps()[-1])
    turn_bytes(max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size))
    state.notes["damaged"] = newest.name


def turn_bytes(file: Path) -> None:
    """Turn over the last 64 bytes: its size stays, its content does not."""
    with file.open("r+b") as content:
        content.seek(-64, 2)
        last = content.read()
        content.seek(-64, 2)
        content.write(bytes(byte ^ 0xFF for byte in last))


def take_folder_away(state: CaseState) -> None:
    state.run.path.rename(_aside(state))


def restore_folder(state: CaseState) -> None:
    if state.run.path.exists():  # something was made anew in its place
        state.notes["made_anew"] = sorted(path.name for path in state.run.path.iterdir())
        shutil.rmtree(state.run.path)
    _aside(state).rename(state.run.path)


def _aside(state: CaseState) -> Path:
    return state.run.path.with_name(f"{state.run.run_id}-aside")


def fill_run_folder(state: CaseState) -> None:
    fill(state.run.path)


def empty_run_folder(state: CaseState) -> None:
    restore_size(state.run.path)


def fill_scratch(state: CaseState) -> None:
    fill(state.scratch)


def fill_shared_memory(state: CaseState) -> None:
    """Full, and a rank killed: a restart makes semaphores there, a step does not."""
    fill(SHARED_MEMORY)
    state.kill(state.worker)


def empty_shared_memory(_state: CaseState) -> None:
    restore_size(SHARED_MEMORY)


def cut_network(state: CaseState) -> None:
    """Cut the target's node off, until its agent has ended or the others continue without it."""
    assert state.network is not None
    agent, before = state.agent, state.world_size
    state.injected_t = time.time()
    state.network.apply(NetworkConditions(cut=(state.node,)))
    try:
        state.wait(
            lambda: not state.marked.has(agent) or state.world_size not in (0, before),
            "a meeting of the others",
        )
    except MissedInjection as why:
        state.notes["while_cut"] = str(why)
    state.network.apply(NetworkConditions())


def break_node(state: CaseState) -> None:
    """Kill a rank of a node at each start, until the others continue without that node."""
    while not state.events("node_left_out"):
        before = len(state.events("rendezvous"))
        state.aim(at_node=True)
        state.kill(state.worker)
        state.wait(partial(_has_met_since, state, before), "the restart")


def _has_met_since(rendezvous_count: CaseState, meetings: int) -> bool:
    return len(rendezvous_count.events("rendezvous")) > meetings


def make_network_bad(state: CaseState) -> None:
    assert state.network is not None
    state.injected_t = time.time()
    state.network.apply(NetworkConditions(delay_s=DELAY_S, loss=LOSS))


def move_clock(state: CaseState) -> None:
    assert state.clock is not None
    state.notes["seconds"] = seconds = state.draw.choice((-_HOUR_S, _HOUR_S))
    state.injected_t = time.time()
    state.clock.move(seconds)


def replace_node(state: CaseState) -> None:
    """Kill a node, and restart it once the others continue without it, as a person would."""
    program, before = state.above_agent, state.world_size
    words, environment = words_of(program), environment_of(program)
    state.kill(program)
    state.wait(lambda: state.world_size not in (0, before), "a meeting without the node")
    step = state.last_step()
    state.wait(lambda: state.last_step() > step + 1, "a step without the node")
    state.injected_t = time.time()
    log = state.run.path / "logs" / "joining-node.log"
    with log.open("ab") as talk:
        subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=talk, stderr=talk,
            start_new_session=True,
        )  # fmt: skip

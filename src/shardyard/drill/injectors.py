"""Word of the kernel that somebody opens files of a checkpoint: inotify(7).

Those of a small model are open for less than a millisecond, so that looks into `/proc/PID/fd` came
too late for half of them.
"""

import ctypes
import errno
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median

from shardyard.config.formulas import slot_labels
from shardyard.drill.case_state import Missed, Scene
from shardyard.drill.network import Weather
from shardyard.drill.sandbox import SHARED_MEMORY, fill, is_apart, make_room
from shardyard.drill.scene import environment_of, words_of

_OPENED = 0x20
"""IN_OPEN of linux/inotify.h."""
_MOST_BYTES = 1 << 16
"""Of words read at once; one takes 16 and its file's name."""


class Openings:
    """Of tensor files that lie in folders; each is watched until `close`.

    A folder that is gone is left out: a run removes its old checkpoints.
    """

    def __init__(self, folders: list[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._words: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._words < 0:
            raise _refused()
        for folder in folders:
            watched = libc.inotify_add_watch(self._words, os.fsencode(folder), _OPENED)
            if watched < 0 and ctypes.get_errno() != errno.ENOENT:
                self.close()
                raise _refused(folder)

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._words)

    def have_come(self, within_s: float) -> bool:
        """Whether a tensor file was opened since the last call, or is within these seconds."""
        if not select.select([self._words], [], [], within_s)[0]:
            return False
        return b".safetensors\0" in os.read(self._words, _MOST_BYTES)


def _refused(folder: Path | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), None if folder is None else str(folder))


# When a rank copies its state into a snapshot, seen from outside of it.
#
# The memory is the agent's (`elastic/heartbeat.py`), and begins with a mark that is taken away
# before a copy begins and written last (`checkpoint/snapshots/slot.py`).

_MARK_BYTES = 8


class SlotWatch:
    """The slots of one rank."""

    def __init__(self, agent: int, local_rank: int) -> None:
        wanted = {f"/memfd:shardyard-{label} (deleted)" for label in slot_labels(local_rank)}
        self._files: list[int] = []
        for link in Path(f"/proc/{agent}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()) in wanted:
                    self._files.append(os.open(link, os.O_RDONLY))
        self._has_held = [False] * len(self._files)

    def is_copying(self) -> bool:
        """Whether a slot that held a snapshot holds none now."""
        marks = [any(os.pread(file, _MARK_BYTES, 0)) for file in self._files]
        is_copying = any(had and not has for had, has in zip(self._has_held, marks, strict=True))
        self._has_held = [had or has for had, has in zip(self._has_held, marks, strict=True)]
        return is_copying

    def close(self) -> None:
        for file in self._files:
            os.close(file)


# How faults that strike from outside are made, a small function each; the table: `faults.py`.

_LOOK_S = 0.1
"""At most, for a load that begins."""
DELAY_S, LOSS = 0.005, 0.01
"""Of a bad network: each way, and of packets."""
_HOUR_S = 3600.0
_BOOT_S = 120.0
"""What a machine takes to come back, at least: agents clear away after one minute."""
STOPPED_S, LET_GO_S = 0.6, 0.3
"""Of a pulse: far below what a hang takes to be told, and long enough for steps in between."""


def kill_rank(scene: Scene) -> None:
    scene.kill(scene.worker)


def stop_rank(scene: Scene) -> None:
    scene.kill(scene.worker, signal.SIGSTOP)


def pulse_rank(scene: Scene) -> None:
    """Stop a rank for a moment and let it go on, again and again, until the run says so."""
    worker = scene.worker
    scene.struck_t = time.time()
    step, since_s = scene.last_step(), time.monotonic()
    while not scene.events("straggler") and scene.marked.signal(worker, signal.SIGSTOP):
        time.sleep(STOPPED_S)
        scene.marked.signal(worker, signal.SIGCONT)
        time.sleep(LET_GO_S)
        if (now := scene.last_step()) != step:
            step, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > scene.within_s:
            raise Missed("a step between the pulses did not come")


def end_run(scene: Scene) -> None:
    scene.kill(scene.top, signal.SIGTERM)


def kill_fork_server(scene: Scene) -> None:
    scene.kill(scene.fork_server)


def kill_agent(scene: Scene) -> None:
    scene.kill(scene.agent)


def kill_command_line(scene: Scene) -> None:
    scene.kill(scene.top)


def kill_supervisor(scene: Scene) -> None:
    scene.kill(scene.top)


def kill_node(scene: Scene) -> None:
    """Its program, and with it by the kernel its agent, fork server and ranks."""
    scene.kill(scene.above_agent)


def kill_everything(scene: Scene) -> None:
    scene.marked.kill_all()


def lose_memory(scene: Scene) -> None:
    """Shared memory goes with the power; elsewhere than apart it is not the drill's to clear.

    What lies in the scratch folder grows older by the time that a machine takes to come back.
    """
    if is_apart():
        for name in SHARED_MEMORY.iterdir():
            name.unlink()
    for entry in scene.scratch.iterdir():
        died_s = entry.stat().st_mtime - _BOOT_S
        os.utime(entry, (died_s, died_s))


def kill_in_save(scene: Scene) -> None:
    """Kill a rank at a random moment of a save."""
    took_s = [float(event["seconds"]) for event in scene.events("checkpoint_durable")]
    worker = scene.worker
    scene.wait(lambda: _half_written(scene), "a save")
    time.sleep(scene.draw.uniform(0.0, median(took_s) if took_s else 0.0))
    scene.notes["was_inside"] = _half_written(scene)
    scene.kill(worker)


def _half_written(scene: Scene) -> bool:
    return any(scene.run.checkpoints.glob("*.tmp"))


def kill_in_load(scene: Scene) -> None:
    """Kill a rank twice: the first restart shows how long a load takes, in the second one the rank
    is killed at a random moment of it."""
    scene.kill(scene.worker)
    generation = _wait_for_load(scene)
    began_s = time.monotonic()
    scene.wait(lambda: _has_loaded(scene, generation), "the end of a load")
    took_s = time.monotonic() - began_s
    step = scene.last_step()
    scene.wait(lambda: scene.last_step() > step, "a step after the restart")
    scene.kill(scene.worker)
    generation = _wait_for_load(scene)
    worker = scene.worker
    time.sleep(scene.draw.uniform(0.0, took_s))
    scene.kill(worker)
    scene.wait_until_gone(worker, "the killed rank")
    scene.notes |= {"was_inside": not _has_loaded(scene, generation), "load_s": round(took_s, 4)}


def _wait_for_load(scene: Scene) -> int:
    """Until the restart that comes now opens a checkpoint's tensors: its generation."""
    before = len(scene.events("rendezvous"))
    scene.wait(lambda: len(scene.events("rendezvous")) > before, "the restart")
    generation = int(scene.events("rendezvous")[-1]["generation"])
    saved = [scene.run.checkpoint(step) for step in scene.run.checkpoint_steps()]
    with closing(Openings(saved)) as openings:
        scene.wait_closely(
            lambda: openings.have_come(_LOOK_S) or _has_loaded(scene, generation), "a load"
        )
    return generation


def _has_loaded(scene: Scene, generation: int) -> bool:
    return any(e["generation"] == generation for e in scene.events("checkpoint_loaded"))


def kill_in_snapshot(scene: Scene) -> None:
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


def damage_checkpoint(scene: Scene) -> None:
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


def take_folder_away(scene: Scene) -> None:
    scene.run.path.rename(_aside(scene))


def bring_folder_back(scene: Scene) -> None:
    if scene.run.path.exists():  # something was made anew in its place
        scene.notes["made_anew"] = sorted(path.name for path in scene.run.path.iterdir())
        shutil.rmtree(scene.run.path)
    _aside(scene).rename(scene.run.path)


def _aside(scene: Scene) -> Path:
    return scene.run.path.with_name(f"{scene.run.run_id}-aside")


def fill_run_folder(scene: Scene) -> None:
    fill(scene.run.path)


def empty_run_folder(scene: Scene) -> None:
    make_room(scene.run.path)


def fill_scratch(scene: Scene) -> None:
    fill(scene.scratch)


def fill_shared_memory(scene: Scene) -> None:
    """Full, and a rank killed: a restart makes semaphores there, a step does not."""
    fill(SHARED_MEMORY)
    scene.kill(scene.worker)


def empty_shared_memory(_scene: Scene) -> None:
    make_room(SHARED_MEMORY)


def cut_network(scene: Scene) -> None:
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


def break_node(scene: Scene) -> None:
    """Kill a rank of a node at each start, until the others go on without that node."""
    while not scene.events("node_left_out"):
        before = len(scene.events("rendezvous"))
        scene.aim(at_node=True)
        scene.kill(scene.worker)
        scene.wait(partial(_has_met_since, scene, before), "the restart")


def _has_met_since(scene: Scene, meetings: int) -> bool:
    return len(scene.events("rendezvous")) > meetings


def make_network_bad(scene: Scene) -> None:
    assert scene.network is not None
    scene.struck_t = time.time()
    scene.network.become(Weather(delay_s=DELAY_S, loss=LOSS))


def move_clock(scene: Scene) -> None:
    assert scene.clock is not None
    scene.notes["seconds"] = seconds = scene.draw.choice((-_HOUR_S, _HOUR_S))
    scene.struck_t = time.time()
    scene.clock.move(seconds)


def replace_node(scene: Scene) -> None:
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

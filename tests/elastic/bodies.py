"""What workers of the tests do instead of training; named on the agent's command line."""

import ctypes
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardyard.elastic.__main__ import leave, main
from shardyard.elastic.heartbeat import own_heartbeat
from shardyard.elastic.worker import work
from shardyard.errors import DataError, LostRankError
from shardyard.rundir.layout import RunDir

Drained = Callable[[], bool]


def _sum_ranks() -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def _step(drained: Drained) -> bool:
    """One step of a training loop; true on all ranks once any rank is to drain."""
    wish = torch.tensor([int(drained())])
    dist.all_reduce(wish)
    time.sleep(0.02)
    return bool(wish)


def finish(_run: RunDir, _attempt: int, generation: int, _drained: Drained) -> str:
    print(f"generation {generation} sum {_sum_ranks()} of {dist.get_world_size()}")
    return "finished"


def train_until_drained(run: RunDir, _attempt: int, _generation: int, drained: Drained) -> str:
    (run.path / f"started-{dist.get_rank()}").touch()
    while not _step(drained):
        pass
    return "drained"


def tell_secrets(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    """What a worker has of two secrets, and what other processes of the session started with."""
    agent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    print(os.environ["HF_TOKEN"], os.environ["OF_THE_RECIPE"])
    _sum_ranks()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = os.getsid(int(process.name)) == os.getsid(0) and process.name != agent
            if is_ours and b"not-for-all" in (process / "environ").read_bytes():
                print((process / "cmdline").read_bytes())
    _sum_ranks()
    return "finished"


def tell_network(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    """Variables of the network, and where this process listens."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    print(*(f"{name}={os.environ.get(name)}" for name in names))
    _sum_ranks()
    return "finished"


def straggle(run: RunDir, _attempt: int, _generation: int, drained: Drained) -> str:
    """Rank 1 sleeps in its compute until it is well."""
    (run.path / f"started-{dist.get_rank()}").touch()
    notes, step, is_over = own_heartbeat(), 0, False
    while not is_over:
        step += 1
        notes.begin_step(step, is_first=step == 1)
        is_slow = dist.get_rank() == 1 and not (run.path / "well").exists()
        time.sleep(0.2 if is_slow else 0.05)
        is_over = _step(drained)
        notes.end_step()
    return "drained"


def finish_alone(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    """Once the other node is left out, not while it is late."""
    while dist.get_world_size() > 1 or '"node_left_out"' not in run.events.read_text():
        if _step(drained):
            return "drained"
    return finish(run, attempt, generation, drained)


def abort_at_once(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def abort_at_lost_contact(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    """As native code that gives up where a collective breaks."""
    if generation > 0:
        return finish(run, attempt, generation, drained)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (run.path / f"started-{dist.get_rank()}").touch()
    try:
        while True:
            _step(lambda: False)
    except RuntimeError:
        os.abort()


def step_until_one_leaves(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    return _pace_until_one_leaves(run, attempt, generation, drained, seconds=0.01)


def straggle_until_one_leaves(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    return _pace_until_one_leaves(run, attempt, generation, drained, seconds=0.06)


def _pace_until_one_leaves(
    run: RunDir, attempt: int, generation: int, drained: Drained, *, seconds: float
) -> str:
    """A node that is left out has no part in the next generation."""
    notes = own_heartbeat()
    for step in count(1):
        if generation > 0 and '"node_left_out"' in run.events.read_text():
            break
        notes.begin_step(step, is_first=step == 1)
        time.sleep(seconds)
        is_over = _step(drained)
        notes.end_step()
        if is_over:
            return "drained"
    return finish(run, attempt, generation, drained)


def never_drain(run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    (run.path / f"started-{dist.get_rank()}").touch()
    while True:
        _step(lambda: False)


def drain_slowly(run: RunDir, _attempt: int, _generation: int, drained: Drained) -> str:
    (run.path / f"started-{dist.get_rank()}").touch()
    while not _step(drained):
        pass
    time.sleep(3.0)
    return "drained"


def train_two_generations(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    if generation == 0:
        return never_drain(run, attempt, generation, drained)
    return finish(run, attempt, generation, drained)


def _noted_steps(run: RunDir, drained: Drained) -> Iterator[int]:
    """Steps of which one is noted after the other, without an end."""
    notes = own_heartbeat()
    for step in count(1):
        notes.begin_step(step, is_first=step == 1)
        yield step
        _step(drained)
        notes.end_step()
        if step == 12:
            (run.path / f"started-{dist.get_rank()}").touch()


def step_for_ever(run: RunDir, _attempt: int, _generation: int, drained: Drained) -> str:
    return f"finished {max(_noted_steps(run, drained))}"


def _hang_on_rank_1(run: RunDir, drained: Drained, generation: int, how: Callable[[], Any]) -> str:
    """The 12th step of the first generation never ends on one rank."""
    for step in _noted_steps(run, drained):
        if generation > 0 and step == 4:
            break
        if generation == 0 and step == 12 and dist.get_rank() == 1:
            how()
    return "finished"


def stop_on_rank_1(run: RunDir, _attempt: int, generation: int, drained: Drained) -> str:
    return _hang_on_rank_1(run, drained, generation, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def sleep_on_rank_1(run: RunDir, _attempt: int, generation: int, drained: Drained) -> str:
    return _hang_on_rank_1(run, drained, generation, lambda: time.sleep(3600))


def hold_the_gil_on_rank_1(run: RunDir, _attempt: int, generation: int, drained: Drained) -> str:
    return _hang_on_rank_1(run, drained, generation, _wait_with_the_gil)


def _wait_with_the_gil() -> None:
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # for ever; a loop would need a processor to itself


def step_until_drained(_run: RunDir, _attempt: int, _generation: int, drained: Drained) -> str:
    notes = own_heartbeat()
    for step in count(1):
        notes.begin_step(step, is_first=step == 1)
        is_over = _step(drained)
        notes.end_step()
        if is_over:
            break
    return "drained"


def bad_data_on_rank_1(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _sum_ranks()
    if dist.get_rank() == 1:
        raise DataError("shard-3.bin is damaged. Run `shardyard prepare` again.")
    _sum_ranks()
    return "finished"


def lose_contact_then_finish(run: RunDir, attempt: int, generation: int, drained: Drained) -> str:
    """As a survivor of a save whose peer was lost: it speaks before the peer's end is seen."""
    if generation == 0:
        raise LostRankError("step 3 was not saved: the ranks lost contact.")
    return finish(run, attempt, generation, drained)


def crash_on_rank_1(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _sum_ranks()
    if dist.get_rank() == 1:
        raise ZeroDivisionError("no such number")
    _sum_ranks()
    return "finished"


def crash_in_other_words(_run: RunDir, _attempt: int, generation: int, _drained: Drained) -> str:
    _sum_ranks()
    if dist.get_rank() == 1:
        raise ZeroDivisionError("abc"[generation])
    _sum_ranks()
    return "finished"


def count_frozen(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    print(gc.get_freeze_count())
    return "finished"


def bad_data_on_a_full_disk(run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _fill(run.path)
    raise DataError("shard-3.bin is damaged. Run `shardyard prepare` again.")


def talk_to_a_full_disk(run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _fill(run.path)
    for _ in range(8192):
        print("a line", flush=True)
    return "finished"


def write_to_a_full_disk(run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _fill(run.path)
    (run.path / "notes.txt").write_text("more" * 8192)
    return "finished"


def _fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 4096) == 4096:
            pass


def leave_early(_run: RunDir, _attempt: int, _generation: int, _drained: Drained) -> str:
    _sum_ranks()
    if dist.get_rank() == 1:
        os._exit(0)
    _sum_ranks()
    return "finished"


def run_body(run_dir: str, attempt: int, generation: int) -> str:
    """Entry point of the workers; the environment names the body."""
    if "TEST_INTERFACE" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TEST_INTERFACE"]
    return work(run_dir, attempt, generation, body=globals()[os.environ["TEST_BODY"]])


if __name__ == "__main__":
    from bodies import run_body as importable_run_body  # type: ignore[import-not-found]

    preload = os.environ.get("TEST_PRELOAD", "torch,torch.distributed").split(",")
    leave(main(worker=importable_run_body, preload=preload))

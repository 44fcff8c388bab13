"""Run a function on several gloo processes of this machine and collect what each returns.

Processes are forked from a server that has torch and the training half imported already
(preloaded.py): four of them start in a tenth of a second, not in sixteen.
"""

import gc
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.preloaded"])


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes with torch.distributed initialised.

    Returns what each rank returned, in order. The first failure of any rank is raised here with
    its traceback, and the other ranks are ended.
    """
    # held here until all have ended, so that nobody else gets its port
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_forked(_in_group, world_size, store.port, function, args, timeout_s=timeout_s)


def run_forked(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in processes that have no process group."""
    processes, receivers = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_run_rank, args=(rank, world_size, sender, function, args)
        )
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)
    try:
        return _collect(receivers, timeout_s)
    finally:
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    waiting = list(receivers)
    while waiting:
        ready = wait(waiting, timeout=timeout_s)
        if not ready:
            raise TimeoutError(f"{len(waiting)} ranks gave no answer in {timeout_s} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                is_error, answer = pickle.loads(receiver.recv_bytes())
            except EOFError:
                is_error, answer = True, "ended without an answer"
            if is_error:
                raise RuntimeError(f"rank {receivers.index(receiver)} failed:\n{answer}")
            answers[receivers.index(receiver)] = answer
            waiting.remove(receiver)
    return [answers[rank] for rank in range(len(receivers))]


def _run_rank(
    rank: int,
    world_size: int,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = function(rank, world_size, *args)
        _send(sender, (False, answer))
    except BaseException:  # noqa: BLE001 - whatever it is, the test shall see it
        _send(sender, (True, traceback.format_exc()))
        sender.close()
        os._exit(1)  # the others may be waiting in a collective: do not wait for them
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _in_group(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    timeout = timedelta(seconds=120)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return function(*args)


def _send(sender: Connection, answer: tuple[bool, Any]) -> None:
    # Connection.send would hand over a tensor as a descriptor, to be fetched from this process
    # while it lives; a slow receiver comes too late
    sender.send_bytes(pickle.dumps(answer))

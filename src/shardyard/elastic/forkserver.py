"""The fork server: the parent of all workers, which imports what is slow once.

A worker is a fork of it, so that a restart costs about a second instead of the import of torch and
the model. The server imports this very module when it starts; the last lines set it up.
"""

import gc
import importlib
import multiprocessing.forkserver as mp_forkserver
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import withheld
from shardyard.config.tasks import TASKS
from shardyard.errors import StorageError
from shardyard.io.files import close_locked, take_lock
from shardyard.own_processes import signal_at_parent_death

# The garbage collector is paused during imports. Modules are no garbage, and every search has more
# of them to visit. The searches take a tenth of a fork server's import time (benchmarks/README.md).


@contextmanager
def gc_paused() -> Iterator[None]:
    """Put it off until what is open is over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Let imports find none of these packages, as if they were not installed."""
    hidden = [name for name in packages if name not in sys.modules]
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))  # Python's own mark for a module that is not there
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


_SHAPE_INFERENCE = "torch._meta_registrations"
"""Named here and not in ``torch_private.py``, which imports torch."""


def skip_shape_inference() -> None:
    """Let the import of torch leave out how operators infer shapes, a quarter of its time.

    Only for an agent, which computes nothing. Code that asks for a name of that module loads it.
    """
    if _SHAPE_INFERENCE in sys.modules:
        return
    stand_in = ModuleType(_SHAPE_INFERENCE)

    def load(name: str) -> Any:
        if name.startswith("__"):  # asked of all modules by whoever lists them
            raise AttributeError(name)
        if sys.modules.get(_SHAPE_INFERENCE) is stand_in:
            del sys.modules[_SHAPE_INFERENCE]
        return getattr(importlib.import_module(_SHAPE_INFERENCE), name)

    vars(stand_in)["__getattr__"] = load  # a module's own, as of PEP 562
    sys.modules[_SHAPE_INFERENCE] = stand_in


_ALWAYS = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "shardyard.train.run",
    "shardyard.elastic.worker",
)

_HIDDEN = ("accelerate", "torchao")
"""Packages that transformers imports where they are installed, for models that no run trains.

They take a sixth of the server's processor time. A recipe in fp8 imports torchao by itself.
"""

_SCRATCH_PREFIX = "shardyard-agent-"
_SWEEP_AGE_S = 60.0
"""Younger folders are kept: their agent may not have locked them yet."""

_TO_LOCK = os.O_RDONLY | os.O_CLOEXEC

_AGENT_PID = "SHARDYARD_AGENT_PID"
_SCRATCH_DIR = "SHARDYARD_AGENT_SCRATCH"
_PRELOAD = "SHARDYARD_PRELOAD"


def preload_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the modules that workers of a recipe need, and each would import at its first use.

    The compiler by itself takes seconds. Plug-ins of packages are left to the workers: they
    report in words if one cannot be imported.
    """
    task = TASKS.get(recipe.task.name)
    of_task = () if task is None else (task.code.partition(":")[0],)
    of_compiler = ("shardyard.elastic.preload_compiler",) if recipe.model.compile else ()
    of_fp8 = ("shardyard.parallel.float8",) if recipe.precision.compute == "fp8" else ()
    return (*_ALWAYS, *of_task, *of_compiler, *of_fp8)


_for_workers: dict[str, str] = {}


def start(preload: Sequence[str], *, secrets: Collection[str] = ()) -> None:
    """Start the server in the background; call from the main thread.

    It gets no secrets. Workers do, through a pipe: see ``variables_of_workers``.

    The folder of its socket is removed when this process ends. The server does it if this
    process is killed, and a later agent if both are.

    Args:
        secrets: Variables that are secret under any name.
    """
    scratch = _make_scratch_dir()
    # multiprocessing makes the folder of the server's socket in here.
    tempfile.tempdir = scratch
    # multiprocessing removes its own folder in there at priority -100
    util.Finalize(None, shutil.rmtree, (scratch,), {"ignore_errors": True}, exitpriority=-101)
    os.environ[_AGENT_PID] = str(os.getpid())
    os.environ[_SCRATCH_DIR] = scratch
    os.environ[_PRELOAD] = ",".join(preload)
    # Python 3.11.0 would take a socket without a file, which every local user can reach.
    vars(util)["abstract_sockets_supported"] = False
    mp_forkserver.set_forkserver_preload([__name__])
    _for_workers.clear()
    # /proc/PID/environ shows what a process started with, and core dumps keep it.
    with withheld(os.environ, named=secrets) as hidden:
        mp_forkserver.ensure_running()
    _for_workers.update(hidden)


def variables_of_workers() -> dict[str, str]:
    """Variables that each worker has in addition to the server's: its secrets."""
    return dict(_for_workers)


def _make_scratch_dir() -> str:
    """A folder for the server's socket, whose path the kernel limits to 107 bytes (unix(7))."""
    names_bytes = len(f"/{_SCRATCH_PREFIX}12345678/pymp-12345678/listener-12345678")
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + names_bytes > 107:
        folder = "/tmp"  # a long TMPDIR, as some clusters set it
    try:
        sweep(Path(folder))
        scratch = tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=folder)
        # Held until this process ends, however it ends; no other process knows the folder yet.
        take_lock(os.open(scratch, _TO_LOCK))
        return scratch
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}. The processes of a run find each other "
            "through a file there. Make room, or set TMPDIR to another folder."
        ) from error


def sweep(folder: Path) -> None:
    """Remove what agents left there that were killed together with their servers.

    A living agent holds a lock on its folder. Process ids would not do: containers may share a
    temporary folder and number their processes alike.
    """
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or gone by now
            if time.time() - scratch.stat().st_mtime < _SWEEP_AGE_S:
                continue
            descriptor = os.open(scratch, _TO_LOCK)
            try:
                if take_lock(descriptor):
                    shutil.rmtree(scratch, ignore_errors=True)
            finally:
                close_locked(descriptor)


def stop() -> None:
    """End the server, and with it all workers.

    It is killed: it holds only modules, and an orderly end of torch would take seconds.
    """
    with suppress(OSError):  # it was killed before
        if (pid := _server()._forkserver_pid) is not None:
            os.kill(pid, signal.SIGKILL)
        # After the kill, because it waits for the server to end.
        _server()._stop()
    tempfile.tempdir = None


@dataclass(frozen=True)
class ServerEnd:
    """End of the server while its workers ran."""

    pid: int
    exit_status: int
    """Negative: the signal that killed it."""


def ended() -> ServerEnd | None:
    """Return how the server ended, or None while it runs; only multiprocessing waits for it."""
    pid = _server()._forkserver_pid
    if pid is None:
        return None
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    is_killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return ServerEnd(pid, -found.si_status if is_killed else found.si_status)


def _server() -> Any:
    """Return multiprocessing's server object; it has no public way to wait for its end."""
    return mp_forkserver._forkserver


def _leave_with_agent(_number: int, _frame: FrameType | None) -> None:
    shutil.rmtree(os.environ[_SCRATCH_DIR], ignore_errors=True)
    os._exit(0)  # the workers die with this process: each asked the kernel for it


def _set_up() -> None:
    # SIGTERM is held back here and thus in each new worker until it can be understood there. Some
    # schedulers send it to every process of a job; the server must survive that.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR2, _leave_with_agent)
    signal_at_parent_death(signal.SIGUSR2)
    # If the agent ended before the kernel got this request, no signal comes.
    if os.getppid() != int(os.environ[_AGENT_PID]):
        _leave_with_agent(signal.SIGUSR2, None)
    with gc_paused():
        for module in filter(None, os.environ[_PRELOAD].split(",")):
            with _hidden(_HIDDEN if module.startswith("transformers.") else ()):
                importlib.import_module(module)
    # Imported modules never become garbage. A worker that searches them all the same, as it does
    # before it leaves, takes a second, and copies every page that it shares with the others.
    # No search before it: that takes 0.3 s of each start, and frees nothing that can be measured.
    gc.freeze()


if os.environ.get(_AGENT_PID) == str(os.getppid()):
    _set_up()

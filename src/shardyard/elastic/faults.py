"""Faults for drills, made inside of the workers, as broken devices and code would make them.

``SHARDYARD_FAULTS=gradient@7,weight@12,exception@20:1`` in the environment of the command that
starts the processes. ``KIND@STEP`` puts NaN in on every rank each time the step is done.
``KIND@STEP:RANK`` acts on one rank (`bit` flips one of a weight, the others are below). It acts
only in the first generation of an attempt, so that a restart is not hit by it again. Each of
them says so in its log. In Shardyard, only `shardyard drill` sets the variable.
"""

import ctypes
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from shardyard.errors import RequestError
from shardyard.rundir.contracts import FAULT_MARK
from shardyard.rundir.contracts import FAULTS_VARIABLE as VARIABLE
from shardyard.train.hooks import Faults

_FOREVER_S = 86_400
_SLOWNESS = 3.0
"""A slow rank sleeps so many times what its step takes, and at least the following."""
_SLOWNESS_S = 0.25


def _raise() -> None:
    raise RuntimeError("a drill raised this")


def _run_out_of_memory() -> None:
    bytearray(1 << 62)  # more than any address space: the interpreter raises MemoryError


def _abort() -> None:
    _leave_no_core()
    os.abort()


def _read_address_zero() -> None:
    _leave_no_core()
    ctypes.string_at(0)


def _hold_the_gil() -> None:
    library = ctypes.PyDLL(None)  # which, unlike CDLL, keeps the lock in a call
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever: a signal ends a sleep(), and no wait for a mutex


def _sleep() -> None:
    time.sleep(_FOREVER_S)


def _leave_no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


ONCE: Mapping[str, Callable[[], None]] = {
    "exception": _raise,
    "memory-error": _run_out_of_memory,
    "abort": _abort,
    "segfault": _read_address_zero,
    "gil": _hold_the_gil,
    "sleep": _sleep,
}
"""Kind -> what it does to a rank that is about to take a step."""

_EVERYWHERE = ("gradient", "weight")
_ON_A_RANK = (*ONCE, "slow", "bit")
_FAULT = re.compile(
    rf"(?:({'|'.join(_EVERYWHERE)})@([1-9]\d{{0,8}})"
    rf"|({'|'.join(_ON_A_RANK)})@([1-9]\d{{0,8}}):(\d{{1,6}}))",
    re.ASCII,
)


def read_faults(environment: Mapping[str, str], *, rank: int = 0, generation: int = 0) -> Faults:
    """The faults that the environment asks of a rank: none, except in a drill.

    Raises:
        RequestError: The variable is not of the form above.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return Faults()
    asked = [_FAULT.fullmatch(part) for part in text.split(",")]
    if not all(asked):
        raise RequestError(
            f"{VARIABLE}={text!r} is not a list of faults for a drill. It reads gradient@STEP and "
            f"weight@STEP, and {', '.join(_ON_A_RANK)} as {_ON_A_RANK[0]}@STEP:RANK, joined by "
            "commas. Unset it for a real run."
        )
    steps: dict[str, set[int]] = {kind: set() for kind in (*_EVERYWHERE, *_ON_A_RANK)}
    for fault in asked:
        assert fault is not None
        everywhere, step, on_rank, its_step, its_rank = fault.groups()
        if everywhere:
            steps[everywhere].add(int(step))
        elif int(its_rank) == rank and generation == 0:
            steps[on_rank].add(int(its_step))
    print(f"{VARIABLE}={text}: a drill makes these faults", file=sys.stderr)
    acts = {step: partial(_act, kind, step) for kind in ONCE for step in steps[kind]}
    acts |= {
        step: partial(log_fault, kind, step) for kind in ("bit", "weight") for step in steps[kind]
    }
    slow = _Slow(min(steps["slow"])) if steps["slow"] else None
    return Faults(
        gradient_steps=frozenset(steps["gradient"]),
        weight_steps=frozenset(steps["weight"]),
        bit_steps=frozenset(steps["bit"]),
        before_step=_BeforeStep(acts, slow) if acts or slow else Faults.before_step,
    )


class _BeforeStep:
    """Faults of this rank, by step."""

    def __init__(self, acts: Mapping[int, Callable[[], None]], slow: "_Slow | None") -> None:
        self._acts = acts
        self._slow = slow

    def __call__(self, step: int) -> None:
        if step in self._acts:
            self._acts[step]()
        if self._slow is not None:
            self._slow(step)


class _Slow:
    """A rank that takes several times as long as the others from a step on."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._typical_s = 0.0
        self._started_s = time.monotonic()

    def __call__(self, step: int) -> None:
        now_s = time.monotonic()
        if step < self._first_step:
            self._typical_s, self._started_s = now_s - self._started_s, now_s
            return
        if step == self._first_step:
            log_fault("slow", step)
        time.sleep(max(_SLOWNESS_S, _SLOWNESS * self._typical_s))


def _act(kind: str, step: int) -> None:
    log_fault(kind, step)
    ONCE[kind]()


def log_fault(kind: str, step: int) -> None:
    """Say in this rank's log, for the drill to read, that a fault strikes now."""
    line = {"kind": kind, "step": step, "t": time.time()}
    print(FAULT_MARK + json.dumps(line), flush=True)

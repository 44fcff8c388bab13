"""Which tests run when: each is of one kind, and a make target takes some kinds.

| kind | what it is | runs in |
|---|---|---|
| (no mark) | starts no process and takes at most half a second | test-fast, test, check, test-all |
| heavy | starts processes, or takes longer: the smallest layouts of each kind | check, test-all |
| system | launchers, schedulers, containers, whole runs, more layouts | test-system, test-all |
| slow | minutes long, or layouts, launchers and benchmarks beyond what CI has time for | test-all |
| gpu | needs an accelerator | by hand |

``make test`` takes the heavy tests of ``CORE`` too: one file of each main part, a minute in all.
``beyond_ci.txt`` names tests that are slow because CI has no time for them, although a smaller one
of their kind is in CI: further layouts, models and numbers of processes.
Whole folders have their kind here; elsewhere a test or a file says it. A mark of a test itself that
comes later in the table wins over one of its file or folder. A test without a mark that starts a
process fails, wherever it is run.
"""

import multiprocessing.process
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

KINDS = ("heavy", "system", "slow", "gpu")
FAST = "fast"
"""The kind of a test without a mark."""

FOLDERS = {"distributed": "heavy", "e2e": "system"}

CORE = frozenset(
    {
        "checkpoint/test_export.py",
        "cli/test_prepare.py",
        "data/test_workers.py",
        "distributed/test_layouts.py",
        "e2e/test_requests.py",
        "elastic/test_hangs.py",
        "launchers/test_local_job.py",
        "library/test_wrap_layouts.py",
        "train/test_plain_loop.py",
    }
)

BEYOND_CI = Path(__file__).with_name("beyond_ci.txt")

_STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
)
_MULTIPROCESSING = "tests.multiprocessing"

_started: list[str] = []
"""Processes that the running test has started so far."""


def kind(item: pytest.Item) -> str:
    """The kind of a test: of its marks, the one that comes last in the table."""
    own = {mark.name for mark in item.iter_markers()}
    return next((name for name in reversed(KINDS) if name in own), FAST)


@cache
def beyond_ci() -> frozenset[str]:
    """Node ids below ``tests/`` that CI leaves out."""
    lines = BEYOND_CI.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def _watch() -> None:
    """See each start of a process from now on; an audit hook stays for good."""
    sys.addaudithook(_note)
    # A fork server is asked by a socket: the interpreter tells nobody of such a start.
    start = multiprocessing.process.BaseProcess.start

    def told(process: Any) -> None:
        sys.audit(_MULTIPROCESSING, process.name)
        start(process)

    multiprocessing.process.BaseProcess.start = told  # type: ignore[assignment,method-assign]


def pytest_configure() -> None:
    _watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and kind(item) == FAST:
            folder = item.path.relative_to(here).parts[0]
            if folder in FOLDERS:
                item.add_marker(FOLDERS[folder])
        if here in item.path.parents and item.path.relative_to(here).as_posix() in CORE:
            item.add_marker("core")
        if item.nodeid.removeprefix("tests/") in beyond_ci():
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    if _started and kind(item) == FAST:
        pytest.fail(
            f"{item.nodeid} starts a process ({_started[0]}) and has no mark. Call a "
            "function instead, or mark it `heavy` or `system`: see tests/selection.py.",
            pytrace=False,
        )
    return result


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS or event == _MULTIPROCESSING:
        _started.append(f"{event} {arguments[:2]}"[:200])

"""What the tests cost, in seconds of processor time, and what a change adds to it.

Wall time says as much about the machine's other users as about a test. A test is charged with what
this process and all its descendants spent while it ran.

`tests/durations.json` holds the seconds of each file by kind of test (tests/selection.py). A run
with ``--account`` compares itself with that and adds itself to `.durations.json`, which git
ignores; ``make durations`` takes that over.
"""

import json
import math
import os
import resource
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.selection import FAST, kind

Seconds = dict[str, dict[str, float]]
"""Test file -> kind -> seconds."""

KEPT = Path(__file__).with_name("durations.json")
LATEST = Path(".durations.json")
FAST_S = 0.5
_WORTH_A_LINE_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--account", action="store_true", help="compare with tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist end at the same time and would write the same file; the main process adds up.
    is_wanted = config.getoption("--account") and not hasattr(config, "workerinput")
    config.pluginmanager.register(Accounts(is_wanted))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The dearest files first where workers share them, so that none waits for one at the end."""
    if hasattr(config, "workerinput") and KEPT.exists():
        kept: Seconds = json.loads(KEPT.read_text())
        kinds = {kind(item) for item in items}
        items.sort(key=lambda item: -known_s(item.nodeid.partition("::")[0], kept, kinds))


class Accounts:
    """Charges each phase of each test, here or in a worker; adds it up where the run ends."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._before_s = 0.0
        self._spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._over: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        self._before_s = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        now_s = spent_s()
        report.spent_s, self._before_s = now_s - self._before_s, now_s
        report.test_kind = kind(item)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped or not hasattr(report, "spent_s"):  # of a worker that died, by xdist
            return
        self._spent[report.nodeid.partition("::")[0]][report.test_kind] += report.spent_s
        if report.when == "call" and report.test_kind == FAST and report.spent_s > FAST_S:
            self._over[report.nodeid] = report.spent_s

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._is_wanted:
            return
        kept: Seconds = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        latest: Seconds = json.loads(LATEST.read_text()) if LATEST.exists() else kept
        LATEST.write_text(as_text(merged(latest, self._spent)))
        terminalreporter.section("processor time")
        for line in comparison(kept, self._spent):
            terminalreporter.line(line)
        for test, seconds in sorted(self._over.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{seconds:8.1f} s over {FAST_S} s without a mark: {test}")


def spent_s() -> float:
    """Processor time of this process and of all descendants, ended or not."""
    own, ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total_s = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    if sys.platform == "linux":
        total_s += _living_ticks() / _TICKS_PER_S
    return total_s


def _living_ticks() -> int:
    # not by pathlib: some tests put something else in its place
    ticks, parents = 0, [os.getpid()]
    while parents:
        for child in _children(parents.pop()):
            with suppress(OSError), open(f"/proc/{child}/stat") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # of it, and of those it waited for
                parents.append(child)
    return ticks


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
                found += [int(child) for child in file.read().split()]
    return found


def merged(kept: Seconds, spent: Seconds) -> Seconds:
    """``kept`` with what was run now; files that are gone are left out."""
    names = [name for name in {*kept, *spent} if Path(name).exists()]
    return {name: {**kept.get(name, {}), **spent.get(name, {})} for name in names}


def comparison(kept: Seconds, spent: Seconds) -> list[str]:
    """The sum, then the files that became dearer or cheaper, the largest change first.

    Files of which one has run nothing now do not count: the two sums are of the same kinds.
    """
    kinds = {name for file in spent.values() for name in file}
    before = {name: _sum(file, kinds) for name, file in kept.items() if name in spent}
    now = {name: _sum(file, kinds) for name, file in spent.items()}
    change = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
    total_s = sum(now.values())
    lines = [
        f"{total_s:8.1f} s, {total_s - sum(before.values()):+.1f} s against tests/durations.json"
    ]
    for name, seconds in sorted(change.items(), key=lambda each: -abs(each[1])):
        if abs(seconds) >= _WORTH_A_LINE_S:
            word = "" if name in before else " (new)"
            lines.append(f"{now[name]:8.1f} s, {seconds:+.1f} s  {name}{word}")
    return lines


def known_s(name: str, kept: Seconds, kinds: set[str]) -> float:
    """What a file's tests of these kinds took; endless where nobody knows: it is begun first."""
    return _sum(kept[name], kinds) if name in kept else math.inf


def as_text(seconds: Seconds) -> str:
    """As JSON of one file a line: changes are read line by line."""
    rows = []
    for name in sorted(seconds):
        row = {kind: round(seconds[name][kind], 1) for kind in sorted(seconds[name])}
        rows.append(f"  {json.dumps(name)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _sum(file: dict[str, float], kinds: set[str]) -> float:
    return sum(seconds for name, seconds in file.items() if name in kinds)

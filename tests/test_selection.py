"""The kinds of tests are kept apart, and what a change adds to their cost is told."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.accounts import KEPT, Accounts, as_text, comparison, known_s, merged, spent_s
from tests.selection import CORE, FAST, FOLDERS, KINDS, beyond_ci

STARTS = {
    "subprocess": "import subprocess\ndef start(): subprocess.run(['true'])\n",
    "fork": "import os\ndef start():\n    pid = os.fork() or os._exit(0)\n    os.waitpid(pid, 0)\n",
    "multiprocessing": "from multiprocessing import get_context\n"
    "def start():\n    child = get_context('forkserver').Process(target=print)\n"
    "    child.start()\n    child.join()\n",
}


def outcome(folder: Path, text: str) -> pytest.ExitCode | int:
    """Of a run of pytest, in this process, over one file."""
    file = folder / f"test_{folder.name}.py"  # one name is imported once
    file.write_text(text)
    options = ["-p", "tests.selection", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    return pytest.main([*options, "-o", "markers=heavy", "-o", "addopts=", str(file)])


@pytest.mark.heavy
@pytest.mark.parametrize("how", STARTS)
def test_a_test_without_a_mark_that_starts_a_process_fails(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(tmp_path, f"{STARTS[how]}\ndef test_it(): start()\n") == 1
    shown = capsys.readouterr().out
    assert "::test_it starts a process (" in shown
    assert "Call a function instead, or mark it `heavy` or `system`" in shown


@pytest.mark.heavy
def test_one_that_says_so_may_and_one_that_starts_none_needs_no_mark(tmp_path: Path) -> None:
    text = f"import pytest\n{STARTS['subprocess']}\n@pytest.mark.heavy\ndef test_it(): start()\n"
    assert outcome(tmp_path, text + "def test_other(): pass\n") == 0


@pytest.mark.heavy
def test_a_process_of_a_fixture_counts(tmp_path: Path) -> None:
    fixture = "import pytest\n@pytest.fixture\ndef started(): start()\n"
    text = f"{STARTS['subprocess']}{fixture}def test_it(started): pass\n"
    assert outcome(tmp_path, text) == 1


def test_every_kind_is_a_mark_and_a_target_says_what_it_takes() -> None:
    root = Path(__file__).parents[1]
    markers = re.search(
        r"^markers = \[$(.*?)^\]$", (root / "pyproject.toml").read_text(), re.M | re.S
    )
    assert markers is not None
    assert set(re.findall(r'"(\w+):', markers.group(1))) == {*KINDS, "core"}
    named = set(
        re.findall(r"\b(?:not )?(\w+)\b", " ".join(_selections(root / "Makefile").values()))
    )
    assert named - {"and", "not", "or"} == {*KINDS, "core"}
    assert all((root / "tests" / folder).is_dir() for folder in FOLDERS)
    assert all((root / "tests" / file).is_file() for file in CORE)


def test_each_test_that_ci_leaves_out_is_there() -> None:
    folder = Path(__file__).parent
    for entry in beyond_ci():
        file, _, name = entry.partition("::")
        function = name.partition("[")[0]
        assert f"def {function}(" in (folder / file).read_text(), entry


def _selections(makefile: Path) -> dict[str, str]:
    """Target -> what it gives to -m."""
    found = re.findall(r'^(test[\w-]*):.*\n\t.*-m "([^"]+)"', makefile.read_text(), re.M)
    return dict(found)


def test_check_and_test_system_take_every_kind_but_two_and_none_twice() -> None:
    makefile = Path(__file__).parents[1] / "Makefile"
    assert re.search(r"^check: lint\n\t.* types test-quick$", makefile.read_text(), re.M)
    assert re.search(r"^test: lint test-core$", makefile.read_text(), re.M)
    run = (makefile.parent / ".ci/run").read_text()
    assert "\nmake check\n" in run and "\nmake test-system\n" in run
    chosen = _selections(makefile)
    takes = {target: _taken(chosen[target]) for target in chosen}
    assert takes["test-quick"] | takes["test-system"] == {FAST, *KINDS} - {"slow", "gpu"}
    assert not takes["test-quick"] & takes["test-system"]
    core = Expression.compile(chosen["test-core"])
    assert core.evaluate(lambda name, /, **_: name in ("heavy", "core"))
    assert takes["test-core"] == takes["test-fast"] == {FAST}
    assert takes["test-all"] == {FAST, *KINDS} - {"gpu"}


def _taken(selection: str) -> set[str]:
    """Kinds of which a test with that mark alone is taken, by pytest's own reading."""
    wanted = Expression.compile(selection)
    taken = set()
    for each in (FAST, *KINDS):
        marks = {each}

        def has(name: str, /, **_: Any) -> bool:
            return name in marks  # noqa: B023

        if wanted.evaluate(has):
            taken.add(each)
    return taken


# --- what they cost -----------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_childs_time_is_counted_while_it_runs_and_after() -> None:
    burn = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()\n"
    )
    before_s = spent_s()
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        assert spent_s() - before_s >= 0.29
        child.communicate("\n")
    assert spent_s() - before_s >= 0.29


def test_a_change_is_told_in_seconds_the_largest_first() -> None:
    kept = {"a.py": {"fast": 1.0, "slow": 50.0}, "b.py": {"heavy": 9.0}, "gone.py": {"fast": 3.0}}
    spent = {"a.py": {"fast": 2.5}, "b.py": {"heavy": 9.4}, "c.py": {"heavy": 4.0}}
    assert comparison(kept, spent) == [
        "    15.9 s, +5.9 s against tests/durations.json",
        "     4.0 s, +4.0 s  c.py (new)",
        "     2.5 s, +1.5 s  a.py",
    ]


def test_a_run_of_some_kinds_leaves_what_is_known_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    kept = {"a.py": {"fast": 1.0, "slow": 50.0}, "gone.py": {"fast": 3.0}}
    found = merged(kept, {"a.py": {"fast": 2.0}})
    assert found == {"a.py": {"fast": 2.0, "slow": 50.0}}
    assert json.loads(as_text(found)) == found


def test_a_new_file_is_begun_before_the_dearest_and_other_kinds_do_not_count() -> None:
    kept = {"a.py": {"fast": 1.0, "system": 50.0}, "b.py": {"heavy": 9.0}}
    files = ["a.py", "b.py", "new.py"]
    order = sorted(files, key=lambda name: -known_s(name, kept, {"fast", "heavy"}))
    assert order == ["new.py", "b.py", "a.py"]


def test_a_worker_that_died_leaves_a_report_without_seconds() -> None:
    Accounts(is_wanted=True).pytest_runtest_logreport(SimpleNamespace(skipped=False))


def test_the_kept_file_holds_seconds_of_kinds_that_exist() -> None:
    kept: dict[str, dict[str, float]] = json.loads(KEPT.read_text())
    assert {name for file in kept.values() for name in file} <= {FAST, *KINDS}
    assert all(seconds >= 0 for file in kept.values() for seconds in file.values())

"""Harmful changes that `make check` must notice: each is made alone, in a copy, and tests are run.

A change is one line of ``mutation_table.py``: a text that stands once in a source file, what takes
its place, and the test files of `make check` that should fail. A change that no test notices is a
hole; one whose text is no longer there is stale and has to be written anew.

    python -m benchmarks.mutations [--only NAME ...]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from benchmarks.mutation_table import MUTATIONS, Mutation
from benchmarks.record import write_result

ROOT = Path(__file__).parents[1]
_KINDS = "not system and not slow and not gpu"
"""The tests of `make check`."""
_TIMEOUT_S = 600

Verdict = Literal["caught", "survived", "stale"]


class Copy:
    """A copy of the tracked files, whose package comes before the installed one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        self._environ = os.environ | {
            "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
            "PYTHONDONTWRITEBYTECODE": "1",  # a change within a second looks like no change
            "OMP_NUM_THREADS": "1",
        }

    def passes(self, tests: Iterable[str]) -> bool:
        """Whether all of some test files pass.

        Raises:
            RuntimeError: They cannot be run.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", _KINDS, *tests],
            cwd=self._folder, env=self._environ, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1, 2):  # 2: a module cannot even be imported
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return done.returncode == 0

    def verdict(self, mutation: Mutation) -> Verdict:
        """Make the change, run its tests, take it back."""
        file = self._folder / "src" / "shardyard" / mutation.file
        text = file.read_text() if file.exists() else ""
        if text.count(mutation.old) != 1:
            return "stale"
        file.write_text(text.replace(mutation.old, mutation.new))
        try:
            return "survived" if self.passes(mutation.tests) else "caught"
        except subprocess.TimeoutExpired:
            return "caught"  # it hangs, and a hanging test is seen
        finally:
            file.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the changes; 0 if each was noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="These changes alone.")
    parser.add_argument("--out", type=Path, help="The result file.")
    given = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if given.only is None or each.name in given.only]
    with tempfile.TemporaryDirectory() as name:
        copy = Copy(Path(name))
        if not copy.passes(sorted({test for each in chosen for test in each.tests})):
            raise SystemExit("the tests fail without any change: mend them first")
        rows: list[dict[str, Any]] = []
        for number, mutation in enumerate(chosen, 1):
            verdict = copy.verdict(mutation)
            rows.append({**asdict(mutation), "verdict": verdict})
            print(f"{number}/{len(chosen)}  {verdict:8}  {mutation.name}", flush=True)
    counts = {word: sum(row["verdict"] == word for row in rows) for word in
              ("caught", "survived", "stale")}  # fmt: skip
    write_result("mutations", {"counts": counts, "mutations": rows}, given.out)
    return 0 if counts["caught"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

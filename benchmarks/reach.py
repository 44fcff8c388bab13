"""How much of the package a reader may have to know of a module: all that it imports, and so on.

Lazy imports count, as tests/test_layers.py counts them, which holds the numbers down.

    python -m benchmarks.reach --before 90d3aba
"""

import argparse
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks.record import write_result
from tests.test_layers import PACKAGE, REACHED, reached

Counts = dict[str, dict[str, int]]


def main() -> None:
    """Count, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="commit that is counted too")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    before, now = _at(args.before), _counts(PACKAGE)
    write_result("reach", {"commit_before": args.before, "before": before, "now": now}, args.out)
    for start in now:
        rows = (
            f"{each['files']} files, {each['lines']:,} lines"
            for each in (before[start], now[start])
        )
        print(f"{start}: {' -> '.join(rows)}")


def _counts(package: Path) -> Counts:
    """Module -> files and lines that it reaches, itself included."""
    found = {}
    for start in REACHED:
        paths = reached(start, package)
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        found[start] = {"files": len(paths), "lines": lines}
    return found


def _at(commit: str) -> Counts:
    """The same of an earlier commit."""
    command = ["git", "archive", commit, "src/shardyard"]
    archive = subprocess.run(command, cwd=PACKAGE.parents[1], capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        return _counts(Path(folder, "src", "shardyard"))


if __name__ == "__main__":
    main()

"""The tests that stand closest to torch, with one version of torch after the other.

Each version gets an environment of its own, installed from the package index as a user would (5 GB:
parts for accelerators come with it), and loses it before the next one begins. The oldest torch runs
with the oldest of all else that is accepted (constraints-oldest.txt), newer ones with what
development uses (constraints.txt). A version writes a result of its own: what was installed, how
many tests passed, and each one that failed or was skipped. No times: nothing here needs an idle
machine.

    python -m benchmarks.torch_versions                   # each that config/versions.py names
    python -m benchmarks.torch_versions 2.15.0 --keep /tmp/torch   # one, and its environment stays
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.record import write_result
from shardyard.config.versions import TORCH

ROOT = Path(__file__).parents[1]
CLOSEST = (
    "models", "parallel", "distributed", "elastic/test_agent.py", "elastic/test_rendezvous.py",
    "train/test_optim.py", "train/test_dry_run.py", "train/test_own_module.py",
    "checkpoint/test_save.py", "checkpoint/test_host_chunks.py", "planner/test_device_ceilings.py",
    "benchmarks/test_gpu_measures.py", "test_torch_private.py", "config/test_compatibility.py",
)  # fmt: skip
SELECTIONS = (
    ("not system and not slow and not gpu", CLOSEST),
    ("not gpu", ("e2e/test_a_whole_run.py",)),
)
"""What pytest's -m is told, and of which parts of tests/."""


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What became of the tests of one call of pytest."""

    command: str
    exit_code: int
    passed: int
    failed: dict[str, str]
    """Test -> first line of what was wrong."""
    skipped: dict[str, int]
    """Reason -> tests."""


def main() -> int:
    """Try the versions, write one result file for each; exit code 1 if a test failed."""
    args = _arguments()
    passes = [_try_version(torch, args.keep) for torch in args.versions]
    return int(not all(passes))


def _try_version(torch: str, keep: Path | None) -> bool:
    """Whether all chosen tests pass with this version in an environment of its own."""
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / f"torch-{torch}"
        constraints = "constraints" + "-oldest" * torch.startswith(TORCH.at_least) + ".txt"
        python = _install(folder, constraints_for(torch, (ROOT / constraints).read_text()))
        told = folder / "tests.xml"
        runs = [_run_tests(python, kinds, parts, told) for kinds, parts in SELECTIONS]
        content = {
            "versions": _installed(python),
            "other_packages_by": constraints,
            "passed": sum(run.passed for run in runs),
            "failed": sum(len(run.failed) for run in runs),
            "skipped": sum(sum(run.skipped.values()) for run in runs),
            "runs": [asdict(run) for run in runs],
        }
    write_result(f"torch-{torch}", content)
    print(f"torch {torch}: {content['passed']} passed, {content['failed']} failed")
    return all(run.exit_code == 0 for run in runs)


def constraints_for(torch: str, constraints: str) -> str:
    """What pip holds all packages to, with another torch."""
    others = [line for line in constraints.splitlines() if not line.startswith("torch==")]
    return "\n".join([*others, f"torch=={torch}", ""])


def _install(folder: Path, constraints: str) -> Path:
    """Make an environment in a folder, or complete the one that is there; return its Python."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    held = folder / "constraints.txt"
    held.write_text(constraints)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", str(held)]
    wanted = ["-e", ".[fp8,plots,tensorboard]", "pytest", "pytest-xdist"]
    subprocess.run([*pip, *wanted], cwd=ROOT, check=True)
    return python


def _run_tests(python: Path, kinds: str, parts: tuple[str, ...], told: Path) -> Outcomes:
    """Run a part of the tests; the exit code is pytest's, as it may end before the first test."""
    paths = [f"tests/{part}" for part in parts]
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", kinds]
    command = ["-m", "pytest", *options, *paths]
    ended = subprocess.run(
        [str(python), *command, f"--junitxml={told}"],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=False,
    )
    passed, failed, skipped = read_outcomes(told.read_text())
    return Outcomes(
        command=shlex.join(["python", *command]),
        exit_code=ended.returncode,
        passed=passed,
        failed=failed,
        skipped=skipped,
    )


def read_outcomes(report: str) -> tuple[int, dict[str, str], dict[str, int]]:
    """Tests that passed, what was wrong with each that failed, and why how many were skipped."""
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    for case in cases:
        for wrong in (*case.iter("failure"), *case.iter("error")):
            line = (wrong.get("message") or "").partition("\n")[0]
            failed[f"{case.get('classname')}::{case.get('name')}"] = line
        skipped.update(reason.get("message") or "" for reason in case.iter("skipped"))
    return len(cases) - len(failed) - skipped.total(), failed, dict(skipped)


def _installed(python: Path) -> dict[str, Any]:
    """Package -> version in an environment, and its Python's."""
    program = (
        "import importlib.metadata as m, json, platform;"
        "found = {d.name: d.version for d in m.distributions()};"
        "print(json.dumps({'python': platform.python_version(), **dict(sorted(found.items()))}))"
    )
    answer = subprocess.run([str(python), "-c", program], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=TORCH.tested, help="of torch, as in 2.15.0")
    parser.add_argument("--keep", type=Path, help="a folder in which the environments stay")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""AGENTS.md stays short and true: its paths, targets and modules are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "AGENTS.md").read_text()
PACKAGE = ROOT / "src" / "shardyard"


def test_the_page_has_at_most_100_lines() -> None:
    assert PAGE.count("\n") <= 100


def test_each_path_exists() -> None:
    words = re.findall(r"`([\w./-]+(?:/|\.py))`", PAGE)
    words += re.findall(r"\b(tests/[\w./]+)", PAGE)
    missing = [word for word in words if not ((ROOT / word).exists() or (PACKAGE / word).exists())]
    assert words and missing == []


def test_each_target_of_make_and_each_benchmark_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in re.findall(r"make ([a-z -]+)", PAGE) for word in line.split()}
    assert named <= targets, named - targets
    modules = re.findall(r"python -m (benchmarks\.\w+)", PAGE)
    assert modules and all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in modules)

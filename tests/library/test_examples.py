"""The two example scripts train alike, and the page shows what differs between them."""

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard import library

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text()
PLAIN, OURS = (
    ROOT / "examples" / "library" / f"{name}.py" for name in ("plain_fsdp", "with_shardyard")
)


def losses(script: Path, *degrees: str, processes: int = 2) -> list[float]:
    """Run a script with torchrun as its first lines say; the losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    where = ["--rdzv-endpoint=localhost:0", f"--nproc-per-node={processes}"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, *where, str(script), *degrees],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(PLAIN)


@pytest.mark.parametrize("degrees", [(), ("tp=2",), ("pp=2",)], ids=str)
def test_the_adapted_script_trains_like_the_plain_one(
    plain: list[float], degrees: tuple[str, ...]
) -> None:
    found = losses(OURS, *degrees)
    assert len(found) == 20 and found[-1] < found[0] - 1
    assert found == pytest.approx(plain, rel=1e-5)


def test_without_torchrun_it_is_one_process(plain: list[float]) -> None:
    done = subprocess.run(
        [sys.executable, str(OURS)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    found = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert found == pytest.approx(plain, rel=1e-5)


def test_the_page_shows_the_real_difference() -> None:
    before, after = (path.read_text().splitlines() for path in (PLAIN, OURS))
    diff = [line.rstrip() for line in difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    shown = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == [line for line in diff if not line.startswith("@@")]


def test_the_page_names_what_there_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)
    named = set(re.findall(r"shardyard\.(\w+)\(", PAGE))
    functions = {name for name in library.__all__ if name[0].islower()}
    assert named == functions

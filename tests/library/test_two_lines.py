"""Scripts of two lines train as those with torch's own DDP and FSDP2, and their diff is that."""

import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.distributed.ranks import run_forked

ROOT = Path(__file__).parents[2]
LIBRARY, SOURCES = ROOT / "examples/library", ROOT / "examples/sources"
PAIRS = {
    "ddp": (LIBRARY / "plain_ddp.py", LIBRARY / "two_lines_ddp.py"),
    "fsdp": (LIBRARY / "plain_fsdp.py", LIBRARY / "two_lines_fsdp.py"),
    "module": (LIBRARY / "plain_module.py", LIBRARY / "two_lines_module.py"),
    "mixtral": (SOURCES / "s3_plain_fsdp.py", SOURCES / "s3_two_lines.py"),
}

Runs = dict[str, tuple[Path, str]]
"""Name -> script and SHARDYARD_PARALLEL."""


def _run(rank: int, world_size: int, ports: list[int], scripts: Runs) -> dict[str, list[float]]:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    found = {}
    for number, (name, (script, parallel)) in enumerate(scripts.items()):
        os.environ["MASTER_PORT"] = str(ports[number])
        os.environ["SHARDYARD_PARALLEL"] = parallel
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
        found[name] = [
            float(x) for x in re.findall(r"^step \d+ loss (\S+)$", said.getvalue(), re.M)
        ]
    return found


def losses(world_size: int, scripts: Runs) -> dict[str, list[float]]:
    # held here until all have ended; one a script, as each group of processes writes the same keys
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts]
    found: dict[str, list[float]] = run_forked(
        _run,
        world_size,
        [store.port for store in stores],
        scripts,
        timeout_s=float(os.environ.get("T", 240)),
    )[0]
    return found


AXES = {"fsdp tp": "tp=2", "fsdp cp": "cp=2", "mixtral ep": "ep=2"}
"""Script of two lines, and an axis on which it trains as it stands."""


def _all(world_size: int) -> Runs:
    scripts = {f"plain {name}": (plain, "") for name, (plain, _) in PAIRS.items()}
    scripts |= {name: (ours, "") for name, (_, ours) in PAIRS.items()}
    if world_size > 1:
        scripts |= {name: (PAIRS[name.split()[0]][1], words) for name, words in AXES.items()}
    return scripts


@pytest.mark.parametrize(
    "world_size",
    [1, 2, pytest.param(4, marks=pytest.mark.slow)],
)
@pytest.mark.heavy
def test_two_lines_train_as_the_plain_script(world_size: int) -> None:
    scripts = _all(world_size)
    found = losses(world_size, scripts)
    for name in scripts:
        if not name.startswith("plain"):
            expected = found[f"plain {name.split()[0]}"]
            assert len(expected) == 20 and expected[-1] < expected[0] - 1
            # another order of sums, whose rounding this rate lets grow from step to step; with four
            # ranks that of experts too, where it moves a token to another one (1.3e-5 at most)
            grows = name in AXES or (name == "mixtral" and world_size == 4)
            allowed = 5e-5 if grows else 1e-6
            assert found[name] == pytest.approx(expected, abs=allowed), name


@pytest.mark.parametrize("name", PAIRS)
def test_the_difference_is_two_lines(name: str) -> None:
    before, after = (path.read_text().splitlines() for path in PAIRS[name])
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    without_head = [line for line in diff if not line.startswith("@@") and "examples/" not in line]
    added = [line[1:].strip() for line in without_head if line.startswith("+")]
    removed = [line[1:].strip() for line in without_head if line.startswith("-")]
    assert [line for line in added if line and not line.startswith('"""')] == [
        "import shardyard",
        "model, optimizer = shardyard.wrap(model, optimizer)",
    ]
    of_torch = r"fully_shard|DistributedDataParallel|^for block in [\w.]+:$|^\"\"\"Train"
    assert all(re.search(of_torch, line) for line in removed), removed


@pytest.mark.system
def test_one_more_line_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    script = (LIBRARY / "two_lines_module.py").read_text()
    line = "for step in range(STEPS):"
    folder = str(tmp_path / "kept")
    kept = f"for step in shardyard.steps(STEPS, {folder!r}, model, optimizer, scheduler, every=4):"
    lost = (
        '\n        if step == 10 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":'
        # On a busy machine the save of step 8, in the background, may end after step 10.
        f"\n            while not os.path.exists({folder + '/step-00000008'!r}):"
        "\n                time.sleep(0.01)"
        "\n            os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert line in script
    plain, killed = tmp_path / "plain.py", tmp_path / "killed.py"
    plain.write_text(script)
    killed.write_text("import os\nimport signal\nimport time\n" + script.replace(line, kept + lost))
    undisturbed, interrupted = _torchrun(plain), _torchrun(killed)
    steps = [step for step, _ in interrupted]
    restart = steps.index(9, 9)  # steps 9 and 10 again, from the checkpoint of step 8
    assert steps == [*range(1, 11), *range(9, 21)]
    whole = [loss for _, loss in interrupted[:8] + interrupted[restart:]]
    assert whole == pytest.approx([loss for _, loss in undisturbed], abs=1e-6)


def _torchrun(script: Path) -> list[tuple[int, float]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    where = ["--rdzv-endpoint=localhost:0", "--nproc-per-node=2", "--max-restarts=1"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # else workers find addresses of their dead predecessors in the store that they share with torch
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [*torchrun, *where, str(script)],
        env={**os.environ, **own},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return [(int(step), float(loss)) for step, loss in found]

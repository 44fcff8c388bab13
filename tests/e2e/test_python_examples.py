"""The scripts that launch from Python, as they stand in examples/, for a few steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
FEW = (
    "model.preset=llama-tiny", "run.steps=4", "cluster.devices=1", "data.seq_len=64",
    "data.vocab_size=512", "task.eval_every_steps=4", "task.generate_tokens=0",
    "checkpoint.every=4",
)  # fmt: skip


def run(name: str, folder: Path, text: Path) -> str:
    """What a script prints, started in an empty folder."""
    words = [*FEW, f"data.source={text}"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text" / "a.txt"
    file.parent.mkdir()
    file.write_text("".join(f"line {number} of a text to learn from\n" for number in range(3000)))
    return file.parent


def test_one_run_is_planned_launched_and_read(tmp_path: Path, text: Path) -> None:
    said = run("launch.py", tmp_path, text)
    assert said.startswith("plan: llama-tiny")
    assert re.search(r"loss of the first step \d\.\d+, of held-out text \{'loss': ", said)
    (weights,) = re.findall(r"^weights: (.*)$", said, re.MULTILINE)
    (page,) = re.findall(r"^open this page: (.*)$", said, re.MULTILINE)
    assert Path(weights).name == "step-00000004" and Path(weights).is_dir()
    assert Path(page).read_text().lower().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_sweep_runs_two_at_a_time_and_prints_the_best(tmp_path: Path, text: Path) -> None:
    said = run("sweep.py", tmp_path, text)
    losses = dict(re.findall(r"^lr (\S+): (\S+) nats a token$", said, re.MULTILINE))
    assert len(losses) == 4 and len(list((tmp_path / "runs").iterdir())) == 4
    best = min(losses, key=lambda lr: float(losses[lr]))
    assert said.endswith(f"the best learning rate is {best}\n")

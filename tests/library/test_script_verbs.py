"""A torchrun script of one's own as a run: killed, started again, and read by each verb.

The reference is the same training in plain torch and transformers, in one process.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardyard import run as own_run
from shardyard.rundir.jsonl import read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.trackers.wandb_file import rows_in

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("default"),  # W&B's client warns at its import
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "library" / "own_run.py"
KILLED_AT = 12
SLOWED = f"""
import os, runpy, time, torch, shardyard
step, run = torch.optim.AdamW.step, shardyard.run
steps_begun = 0
def slow(self, *args):
    global steps_begun
    steps_begun += 1
    if steps_begun > {KILLED_AT} and not os.path.exists("killed"):
        time.sleep(2)
    return step(self, *args)
torch.optim.AdamW.step = slow
shardyard.run = lambda *args: run(*args, observe={{"wandb": {{"project": "tests"}}}})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
"""The example with a tracker, slow from step 13 until the test has killed it.

Only a step after the save commits it, so it cannot wait for the kill.
"""


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 20 * 8 * 64])).view(20, 8, 64)
    found = []
    for tokens in text:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def started(folder: Path) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    where = ["--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*torchrun, *where, "slowed.py"],
        cwd=folder,
        env={
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "WANDB_MODE": "offline",
        },
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def shardyard(folder: Path, *words: str) -> str:
    """What the real command line prints."""
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds runs/ with one run, whose rank 0 was killed after a step and started again."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "slowed.py").write_text(SLOWED)
    process = started(folder)
    try:
        run = _run_at_step(folder, process)
        begun = next(e for e in read_lines(run.events) if e["kind"] == "attempt_started")
        os.kill(begun["workers"][0]["pid"], signal.SIGKILL)
        (folder / "killed").touch()
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert "lost: it ended without a word" in shardyard(folder, "status", "bytes")
    again = started(folder)
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    return folder


def _run_at_step(folder: Path, process: subprocess.Popen[str]) -> RunDir:
    """The run once it has logged step 12 and the checkpoint of step 10 is durable."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and process.poll() is None:
        for path in (folder / "runs").glob("bytes-*"):
            run = RunDir(path)
            at_step = any(line["step"] >= KILLED_AT for line in read_lines(run.metrics))
            if at_step and 10 in _durable_steps(run):
                return run
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def _durable_steps(run: RunDir) -> list[int]:
    return [e["step"] for e in read_lines(run.events) if e["kind"] == "checkpoint_durable"]


@pytest.fixture
def run(folder: Path) -> RunDir:
    (path,) = (folder / "runs").glob("bytes-*")
    return RunDir(path)


def test_the_losses_are_those_of_plain_torch(folder: Path, run: RunDir) -> None:
    plain = plain_losses()
    lines = read_steps(run.metrics)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["loss"] for line in lines] == pytest.approx(plain, rel=1e-5)
    assert {line["attempt"] for line in lines[:10]} == {0}
    assert {line["attempt"] for line in lines[10:]} == {1}
    summary = json.loads(shardyard(folder, "report", run.run_id, "--json"))
    assert summary["loss"] == pytest.approx(plain[-1], rel=1e-5)
    assert (summary["steps_done"], summary["steps_planned"]) == (20, 20)
    assert [each["steps"] for each in summary["attempts"]] == [10, 10]
    assert summary["attempts"][0]["lost_steps"] >= KILLED_AT - 10
    assert summary["world_size"] == 2 and summary["tokens"] == 20 * 8 * 64
    page = run.report_html.read_text()
    assert "hidden" in page and "training stood still" in page
    assert _durable_steps(run) == [5, 10, 15, 20]


def test_each_verb_shows_the_run(folder: Path, run: RunDir) -> None:
    rows = {row["id"]: row for row in json.loads(shardyard(folder, "runs", "--json"))}
    assert (rows[run.run_id]["state"], rows[run.run_id]["step"]) == ("finished", 20)
    assert "a script of your own" in shardyard(folder, "status", "bytes")
    log = shardyard(folder, "logs", "bytes")
    assert "continuing from step 10" in log and re.search(r"step 20/20  loss \d", log)
    board = json.loads(shardyard(folder, "top", "bytes", "--json"))
    assert [rank["rank"] for node in board["nodes"] for rank in node["ranks"]] == [0, 1]
    with own_run("other", {"lr": 1e-3}, dir=run.path.parent) as other:
        for step in range(1, 21):
            other.log(step=step, loss=5.0)
    compared = json.loads(shardyard(folder, "compare", "bytes", "other", "--json"))
    assert {"name": "lr", "values": ["0.003", "0.001"]} in compared["settings"]


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "shardyard", "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    yield found[0].rstrip(".")
                    break
        finally:
            process.kill()


def test_the_page_of_all_runs_has_its_curve(served: str, run: RunDir) -> None:
    address = f"{served.rstrip('/')}/api/curves?run={run.run_id}&y=loss&x=step"
    with urllib.request.urlopen(address, timeout=30) as answer:
        curve = json.load(answer)["curves"]["loss"][run.run_id]
    assert curve["y"] == pytest.approx([line["loss"] for line in read_steps(run.metrics)], rel=1e-4)


def test_a_tracker_gets_each_step_once(folder: Path, run: RunDir) -> None:
    if any(event["kind"] == "not_sent" for event in read_lines(run.events)):
        shardyard(folder, "report", run.run_id, "--send")  # the machine was busy
    files = sorted(run.exporters.glob("wandb/offline-run-*/*.wandb"))
    rows: list[dict[str, Any]] = [row for file in files for row in rows_in(file)]
    logged = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    counted = {line["step"]: line["loss"] for line in read_steps(run.metrics)}
    assert logged == pytest.approx(counted)
    assert {e["service"] for e in read_lines(run.events) if e["kind"] == "tracked"} == {"wandb"}

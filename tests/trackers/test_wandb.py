"""Runs by W&B's own client: into its offline files, and to what stands for its server.

Each is sent by the process that does it, as it is in a run: the client cannot be opened and given
up many times in one.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.trackers import supervisor
from shardyard.trackers.supervisor import UploadResult, exporting, send_now
from tests.report.synthetic import RunWriter
from tests.trackers.front import Front, front_of, wait_until
from tests.trackers.runs import (
    KEY,
    RUN_ID,
    TOKEN,
    begin,
    lose_and_drain,
    new_run,
    resume_and_finish,
    steps_of,
)
from tests.trackers.wandb_file import records, rows_in
from tests.trackers.wandb_server import WandbServer, wandb_server

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("default"),  # the client's own imports warn
]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of whoever tests is used, and nothing is left at home."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL", "0.5")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.setenv("HF_TOKEN", "of-nobody-here")


@pytest.fixture
def server() -> Iterator[tuple[Front, WandbServer]]:
    with wandb_server() as behind, front_of(behind.address) as front:
        yield front, behind


def send(writer: RunWriter, attempt: int, *, within_s: float = 30.0) -> UploadResult:
    """All that is there, and how the attempt ended."""
    (sent,) = send_now(writer.run, attempt, writer.resolved.recipe, os.environ, within_s=within_s)
    return sent


def offline_file(run: RunDir, number: int) -> Path:
    files = run.exporters.glob("wandb/offline-run-*/*.wandb")
    return sorted(files, key=lambda file: file.stat().st_mtime)[number]


def test_offline_files_hold_each_line_over_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = new_run(tmp_path, wandb={"project": "tests"})
    begin(writer)
    run = lose_and_drain(writer)
    assert send(writer, 0).has_all
    resume_and_finish(writer)
    assert send(writer, 1).has_all
    first, second = offline_file(run, 0), offline_file(run, 1)
    rows = [*rows_in(first), *rows_in(second)]
    done = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in done] == steps_of(writer)
    assert [row["_step"] for row in rows] == list(range(1, len(writer.lines) + 1))
    assert all(a["_timestamp"] < b["_timestamp"] for a, b in pairwise(done))
    lines = [line for line in writer.lines if "eval" not in line]
    assert [row["train/loss"] for row in done] == [line["loss"] for line in lines]

    of_second = {each.WhichOneof("record_type"): each for each in records(second)}
    assert of_second["run"].run.run_id == RUN_ID and of_second["run"].run.project == "tests"
    assert of_second["exit"].exit.exit_code == 0
    config = {each.key: json.loads(each.value_json) for each in of_second["run"].run.config.update}
    assert config["optim"]["lr"] == 5e-4 and "secrets" not in config


def test_a_run_with_a_loss_a_drain_and_a_resume_is_one_run_there(
    tmp_path: Path, server: tuple[Front, WandbServer]
) -> None:
    front, behind = server
    writer = new_run(tmp_path, wandb={"project": "tests", "url": front.address})
    begin(writer)
    lose_and_drain(writer)
    front.answers = 401
    refused = send(writer, 0)
    assert refused.unsent == 12 and KEY not in refused.words() and not behind.runs
    assert "W&B rejected the key. Keep a key of that server under secrets" in refused.problem

    front.answers = None
    sent = send(writer, 0)
    assert sent.has_all, sent.words()
    there = behind.runs[RUN_ID]
    assert there.exit_code == 143 and there.is_preempting
    resume_and_finish(writer)
    assert send(writer, 1).has_all
    assert list(behind.runs) == [RUN_ID] and there.exit_code == 0
    done = [row for row in there.rows if "train/loss" in row]
    assert [row["step"] for row in done] == steps_of(writer)
    assert [row["_step"] for row in there.rows] == list(range(1, len(writer.lines) + 1))
    assert there.summary["result/steps_done"] == 20 and there.summary["outcome"] == "finished"
    assert there.summary["plan/parameters"] > 1e6
    assert there.config["optim"]["value"]["lr"] == 5e-4
    assert there.tags == ["team:nlp"]
    assert_keys_are_nowhere(tmp_path, front)


def assert_keys_are_nowhere(folder: Path, front: Front) -> None:
    """But in the head of requests."""
    assert [key for key in front.keys if key], "it is used"
    bodies = [body for _, body in front.requests]
    assert bodies and not [body for body in bodies if b"a-place-of-ours" in body]
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    secrets = (KEY.encode(), TOKEN.encode(), b"of-nobody-here")
    assert not [text for text in (*bodies, *files) if any(secret in text for secret in secrets)]


def test_a_process_that_is_killed_is_started_again_and_goes_on(
    tmp_path: Path, server: tuple[Front, WandbServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_AGAIN_S", 0.1)
    front, behind = server
    writer = new_run(tmp_path, wandb={"project": "tests", "url": front.address})
    run = begin(writer)
    with exporting(run, 0, writer.resolved.recipe, os.environ) as exporters:
        wait_until(lambda: RUN_ID in behind.runs and len(behind.runs[RUN_ID].rows) == 4, 60.0)
        (process,) = exporters._processes
        process._process.terminate()  # as Slurm does to all of a node: the run drains first
        time.sleep(0.2)
        assert process._process.poll() is None
        process._process.kill()
        wait_until(lambda: [e for e in read_lines(run.events) if e["kind"] == "not_sent"])
        (told,) = [event for event in read_lines(run.events) if event["kind"] == "not_sent"]
        writer.events.append(told)
        lose_and_drain(writer)
    assert "its process ended with exit code -9" in told["reason"] and not told["is_end"]
    there = behind.runs[RUN_ID]
    assert [row["_step"] for row in there.rows] == list(range(1, 13)) and there.exit_code == 143
    assert [event for event in read_lines(run.events) if event["kind"] == "not_sent"] == [told]

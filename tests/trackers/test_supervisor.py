"""The processes beside a run: nobody waits for them, and each knows its own secrets alone."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.trackers import supervisor
from shardyard.trackers.service import without_user
from shardyard.trackers.supervisor import UploadResult, environment_for, exporting
from tests.trackers.front import front_of, wait_until
from tests.trackers.runs import KEY, TOKEN, begin, lose_and_drain, new_run

ENVIRON = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_TOKEN": TOKEN, "HF_TOKEN": "hf", "PATH": "/bin"}


def unsent(run: RunDir) -> list[dict[str, object]]:
    return [event for event in read_lines(run.events) if event["kind"] == "not_sent"]


def test_a_process_gets_the_secrets_of_its_service_alone(tmp_path: Path) -> None:
    recipe = new_run(tmp_path).resolved.recipe
    assert environment_for("wandb", recipe, ENVIRON) == {"WANDB_API_KEY": KEY, "PATH": "/bin"}
    assert "WANDB_API_KEY" not in environment_for("mlflow", recipe, ENVIRON)


def test_what_is_missing_is_said_in_words() -> None:
    few = UploadResult(service="mlflow", unsent=1, problem="it was not reached.")
    assert few.words() == (
        "MLflow lacks 1 line of metrics.jsonl and the end of the run: it was not reached."
    )
    maybe = UploadResult(service="wandb", unsent=None, problem="it did not take all in time.")
    assert maybe.words().startswith("W&B may not have all of the run: it did not take all in time.")
    assert not few.has_all and not maybe.has_all
    assert UploadResult(service="mlflow", unsent=0, problem="").has_all


def test_a_run_that_asks_for_no_service_starts_nothing(tmp_path: Path) -> None:
    writer = new_run(tmp_path)
    run = begin(writer)
    with exporting(run, 0, writer.resolved.recipe, ENVIRON):
        assert not run.exporters.exists()


def test_a_folder_that_takes_no_log_is_no_reason_to_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = new_run(tmp_path, wandb={"project": "tests"})
    run = begin(writer)
    run.exporters.write_text("a file in its place")
    with caplog.at_level(logging.WARNING), exporting(run, 0, writer.resolved.recipe, ENVIRON):
        pass
    (told,) = caplog.messages
    assert told.startswith("wandb: no results are sent: ") and "Check that the run folder" in told


@pytest.mark.system
def test_a_client_that_hangs_keeps_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a client does: here it does not even come back from the first call."""
    monkeypatch.setattr(supervisor, "END_S", 1.0)
    with front_of("http://127.0.0.1:1") as front, caplog.at_level(logging.WARNING):
        front.answers = 60.0
        writer = new_run(tmp_path, wandb={"project": "tests", "url": front.address})
        begin(writer)
        run = lose_and_drain(writer)
        with exporting(run, 0, writer.resolved.recipe, os.environ | ENVIRON) as exporters:
            wait_until(lambda: front.requests, 60.0)
            began_s = time.monotonic()
            exporters.end()
        assert time.monotonic() - began_s < 1.0 + supervisor._GRACE_S + 1.0
    (last,) = unsent(run)
    assert last["is_end"] and last["lines"] == 12 and last["service"] == "wandb"
    (told,) = caplog.messages
    assert "observe.wandb: W&B lacks 12 lines" in told and "Is its server well" in told
    assert told.endswith("--send` sends it later") and f"report {run.handle}" in told


@pytest.mark.system
def test_one_whose_run_is_lost_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with front_of("http://127.0.0.1:1") as front:
        front.answers = 401
        writer = new_run(tmp_path, wandb={"project": "tests", "url": front.address})
        begin(writer)
        _start_and_kill_parent(lose_and_drain(writer))


def _start_and_kill_parent(run: RunDir) -> None:
    command = [sys.executable, "-m", "shardyard.trackers", str(run.path), "wandb", "--attempt=0"]
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({command!r}, stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_dead(child), 60.0)


def _is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_address_is_kept_without_the_name_and_password_in_it() -> None:
    assert without_user("https://me:key@wandb.example:8080/p/runs/1?x=1#top") == (
        "https://wandb.example:8080/p/runs/1?x=1#top"
    )
    assert without_user("/runs/r/exporters/wandb") == "/runs/r/exporters/wandb"

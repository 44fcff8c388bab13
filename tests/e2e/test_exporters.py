"""A real run is sent while it trains; what a server refuses comes later, and keys stand nowhere."""

import os
import signal
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines
from tests.e2e.shardyard import Answer, Place, events, wait_for, wait_for_step
from tests.trackers.front import front_of
from tests.trackers.runs import KEY, TOKEN
from tests.trackers.wandb_file import rows_in

RECIPE = """\
secrets: {{WANDB_API_KEY: env, MLFLOW_TRACKING_TOKEN: env}}
observe:
  wandb: {{project: tests}}
  mlflow: {{url: "{url}", experiment: tests}}
"""


@pytest.mark.filterwarnings("default")  # what W&B's client imports warns
def test_a_run_that_loses_a_worker_and_drains_is_sent_though_one_server_refuses_it(
    place: Place, base: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert base.code == 0
    keys = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_TOKEN": TOKEN}
    for name, value in {**keys, "WANDB_MODE": "offline", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    run_dir = place.run_dir("sent")
    with front_of("http://127.0.0.1:1") as front:
        front.answers = 401
        (place.folder / "sent.yaml").write_text(RECIPE.format(url=front.address))
        with place.start(
            "train", "tiny.yaml", "sent.yaml", "run.id=sent", "run.steps=1000000"
        ) as running:
            wait_for_step(run_dir, 10)
            os.kill(events(run_dir, "attempt_started")[0]["workers"][1]["pid"], signal.SIGKILL)
            wait_for(lambda: len(events(run_dir, "rendezvous")) == 2)
            wait_for(lambda: events(run_dir, "not_sent") != [])
            running.send(signal.SIGTERM)
            answer = running.wait()
        assert answer.code == 143
        later = place.run("report", "sent", "--send")
    lines = list(read_lines(run_dir.metrics))
    shown = events(run_dir, "tracked")[0]
    assert shown["service"] == "wandb" and str(run_dir.exporters) in shown["address"]
    first, last, *_ = events(run_dir, "not_sent")  # and again, as it was sent later
    assert "MLflow denied permission (HTTP 401)" in first["reason"] and not first["is_end"]
    assert last["is_end"] and last["lines"] == len(lines)
    assert f"MLflow lacks {len(lines):,} lines of metrics.jsonl" in answer.err
    assert later.code == 3 and "MLflow denied permission" in later.err

    file = min(run_dir.exporters.glob("wandb/offline-run-*/*.wandb"))  # by the time of its folder
    assert [row["step"] for row in rows_in(file)] == [line["step"] for line in lines]
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    secret = (KEY.encode(), TOKEN.encode())
    assert not [path for path in files if any(each in path.read_bytes() for each in secret)]

"""A run that saves to a bucket continues without its folder, bit for bit."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.checkpoint.bucket_lease import LEASE
from shardyard.rundir.jsonl import EventWriter, read_lines
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.launchers.batch_server import BatchServer
from tests.transfer.s3_front import s3_front

pytest.importorskip("boto3", reason="boto3 is an extra")
pytest.importorskip("moto", reason="moto is for development")

STEPS = 6
TO = "s3://runs/team"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def environ(moto: BatchServer) -> dict[str, str]:
    moto.reset()
    moto.client("s3").create_bucket(Bucket="runs")
    return {**moto.environ, "AWS_ENDPOINT_URL": moto.url}


def _sections(processes: int, *, to: str | None = TO, **checkpoint: Any) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS},
        "model": {"dropout": 0.1},
        "task": {"eval_every_steps": 2},
        "checkpoint": {"every": 2, "keep_last": 2, "to": to, **checkpoint},
        "precision": {"reduce": "exact"},
        "cluster": {"devices": processes},
    }


def _train(run_dir: RunDir, attempt: int, environ: dict[str, str], drain_at: int = 99) -> str:
    os.environ.update(environ)
    calls, events = 0, None

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls >= drain_at

    if dist.get_rank() == 0:
        events = EventWriter(run_dir.events, attempt=attempt, generation=0)
    hooks = Hooks(generation=0, drain_requested=drain_requested, events=events)
    try:
        return train(run_dir, attempt, hooks)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _keys(moto: BatchServer, prefix: str) -> list[str]:
    found = moto.client("s3").list_objects_v2(Bucket="runs", Prefix=f"{prefix}/")
    return [each["Key"].removeprefix(f"{prefix}/") for each in found.get("Contents", [])]


def _events(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_lines(run_dir.events) if each["kind"] == kind]


def _manifest(run_dir: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir.checkpoint(STEPS) / "manifest.json").read_text())
    return content


@pytest.mark.system
def test_a_run_that_lost_its_folder_continues_from_the_bucket(
    corpus: Corpus, tmp_path: Path, moto: BatchServer, environ: dict[str, str]
) -> None:
    whole = make_run(tmp_path / "whole", corpus, _sections(2, to=None))
    assert run_on_ranks(_train, 2, whole, 0, environ) == [FINISHED] * 2

    first = make_run(tmp_path / "a" / "run-1", corpus, _sections(2))
    assert run_on_ranks(_train, 2, first, 0, environ, 3) == [DRAINED] * 2
    assert [each["step"] for each in _events(first, "checkpoint_uploaded")][-1] == 3
    assert LEASE not in _keys(moto, "team/run-1")

    # another machine: only the recipe is there, and two processes as before
    second = make_run(tmp_path / "b" / "run-1", corpus, _sections(2))
    assert run_on_ranks(_train, 2, second, 0, environ) == [FINISHED] * 2
    (loaded,) = _events(second, "checkpoint_loaded")
    assert (
        loaded["step"] == 3 and "step 3 was downloaded from s3://runs/team/run-1" in loaded["note"]
    )
    assert _manifest(second)["files"] == _manifest(whole)["files"]

    # retention: the two newest, and the best one
    keys = _keys(moto, "team/run-1")
    steps = {key.partition("/")[0][:13] for key in keys if key.endswith("/manifest.json")}
    best = moto.client("s3").get_object(Bucket="runs", Key="team/run-1/best")["Body"].read()
    assert {"step-00000006", "step-00000004", best.decode()[:13]} == steps
    assert {key.partition("/")[0] for key in keys} - {"latest", "best"} == {
        key.partition("/")[0] for key in keys if key.endswith("/manifest.json")
    }
    for path in [*first.path.rglob("*"), *second.path.rglob("*")]:
        if path.is_file():
            assert environ["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes()

    # the folder's checkpoints are lost, and one process continues
    shutil.rmtree(second.checkpoints)
    third = make_run(second.path, corpus, {**_sections(1), "run": {"steps": STEPS}}, attempt=1)
    assert run_on_ranks(_train, 1, third, 1, environ) == [FINISHED]
    assert _events(third, "checkpoint_loaded")[-1]["step"] == STEPS


@pytest.mark.system
def test_a_busy_or_closed_bucket_is_survived_or_named(
    corpus: Corpus, tmp_path: Path, moto: BatchServer, environ: dict[str, str]
) -> None:
    lost = make_run(tmp_path / "run-0", corpus, _sections(2, to="s3://no-such/team"))
    told = run_on_ranks(_train, 2, lost, 0, environ)
    assert told[0] == told[1] and "bucket 'no-such' does not exist" in told[0]
    assert not lost.metrics.exists()

    with s3_front(moto.url) as front:
        behind = {**environ, "AWS_ENDPOINT_URL": front.url}
        front.failures = {("PUT", "probe-00001"): [(403, "AccessDenied")] * 9}
        run = make_run(tmp_path / "run-1", corpus, _sections(2))
        told = run_on_ranks(_train, 2, run, 0, behind)
        assert told[0] == told[1] and "s3:PutObject" in told[0] and not run.metrics.exists()

        front.failures = {("PUT", "rank-0000"): [(503, "SlowDown")] * 6}
        assert run_on_ranks(_train, 2, run, 0, behind) == [FINISHED] * 2
        assert not front.failures["PUT", "rank-0000"]
    assert [each["step"] for each in _events(run, "checkpoint_uploaded")][-1] == STEPS
    assert not _events(run, "checkpoint_not_uploaded")

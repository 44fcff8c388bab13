"""Runs in MLflow's own server: one for each of ours, whatever happens on the way."""

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import AccessError, LostError, RequestError
from shardyard.rundir.layout import RunDir
from shardyard.trackers import mlflow
from shardyard.trackers.mlflow import MlflowTracker
from shardyard.trackers.run_feed import Uploader, read_attempt_metadata
from tests.image.registries import free_port
from tests.trackers.front import Front, front_of
from tests.trackers.mlflow_server import mlflow_server
from tests.trackers.runs import (
    TOKEN,
    begin,
    lose_and_drain,
    new_run,
    resume_and_finish,
    steps_of,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("default"),  # the client's own imports warn
]
_NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The server behind a door, started once: tests have experiments of their own."""
    with (
        mlflow_server(tmp_path_factory.mktemp("mlflow")) as address,
        front_of(address) as front,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**mlflow._OF_CLIENT, "MLFLOW_TRACKING_TOKEN": TOKEN}.items():
            patch.setenv(name, value)
        yield front


@pytest.fixture
def experiment(server: Front) -> str:
    """One that no other test has."""
    server.answers = None
    del server.requests[:], server.keys[:]
    return f"experiment {next(_NUMBERS)}"


def runs_there(server: Front, experiment: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.address)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def points(server: Front, run: Any, name: str) -> list[tuple[int, float]]:
    """Steps and values as they came."""
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=server.address).get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in sorted(history, key=lambda p: p.timestamp)]


def send(run: RunDir, attempt: int) -> Uploader:
    """By a process of its own, as far as the service can tell; to the end of the attempt."""
    sending = Uploader(
        MlflowTracker(), read_attempt_metadata(run, attempt), on_problem=print, address=print
    )
    assert sending.end(until_s=time.monotonic() + 20.0), sending.problem
    return sending


def test_a_run_with_a_loss_a_drain_and_a_resume_is_one_run_there(
    tmp_path: Path, server: Front, experiment: str
) -> None:
    writer = new_run(tmp_path, mlflow={"url": server.address, "experiment": experiment})
    live = Uploader(
        MlflowTracker(), read_attempt_metadata(begin(writer), 0), on_problem=print, address=print
    )
    live.poll()
    (there,) = runs_there(server, experiment)
    assert there.info.status == "RUNNING" and there.info.run_name == writer.run.run_id

    run = lose_and_drain(writer)
    assert live.end(until_s=time.monotonic() + 20.0)
    (there,) = runs_there(server, experiment)
    assert there.info.status == "KILLED" and there.data.tags["shardyard.outcome"] == "drained"

    send(resume_and_finish(writer), 1)
    (there,) = runs_there(server, experiment)
    assert there.info.status == "FINISHED"
    assert there.info.start_time == int(writer.events[0]["t"] * 1000)
    assert there.info.end_time == int(writer.events[-1]["t"] * 1000)
    lines = [line for line in writer.lines if "eval" not in line]
    assert points(server, there, "train/loss") == [(li["step"], li["loss"]) for li in lines]
    assert [step for step, _ in points(server, there, "train/lr")] == steps_of(writer)
    assert points(server, there, "eval/loss") == [(20, writer.lines[-1]["eval"]["loss"])]
    # the last line of a step that was done twice is the newest there too
    assert there.data.metrics["train/loss"] == lines[-1]["loss"]
    assert there.data.metrics["result/steps_done"] == 20
    assert (
        there.data.metrics["plan/parameters"]
        == read_attempt_metadata(run, 1).predicted["parameters"]
    )
    # parameters cannot be changed there
    assert there.data.params["optim.lr"] == "0.001"
    assert there.data.params["model.preset"] == "llama-laptop"
    changed = {name for name in there.data.tags if name.startswith("attempt-")}
    assert there.data.tags["team"] == "nlp"
    assert changed == {"attempt-1.optim.lr"} and there.data.tags["attempt-1.optim.lr"] == "0.0005"
    assert_token_is_nowhere(tmp_path, server)


def assert_token_is_nowhere(folder: Path, server: Front) -> None:
    """But in the head of each request."""
    assert set(server.keys) == {f"Bearer {TOKEN}"}
    assert not [path for path, body in server.requests if TOKEN.encode() in body or TOKEN in path]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_what_is_sent_twice_is_there_once(tmp_path: Path, server: Front, experiment: str) -> None:
    """A process that is killed before the server's answer comes knows no better."""
    writer = new_run(tmp_path, mlflow={"url": server.address, "experiment": experiment})
    begin(writer)
    run = lose_and_drain(writer)
    send(run, 0)
    service = MlflowTracker()
    sending = Uploader(service, read_attempt_metadata(run, 0), on_problem=print, address=print)
    assert service.open(read_attempt_metadata(run, 0)) == 12, "by the server's word"
    service.send(sending._lines.read(after=0))
    (there,) = runs_there(server, experiment)
    assert [step for step, _ in points(server, there, "train/loss")] == steps_of(writer)


def test_many_lines_are_few_requests(tmp_path: Path, server: Front, experiment: str) -> None:
    writer = new_run(tmp_path, mlflow={"url": server.address, "experiment": experiment})
    begin(writer, last=200)
    send(lose_and_drain(writer), 0)
    batches = [body for path, body in server.requests if path.endswith("log-batch")]
    assert len(batches) < 10
    assert max(len(json.loads(body).get("metrics", ())) for body in batches) <= 900
    (there,) = runs_there(server, experiment)
    assert int(there.data.tags["shardyard.lines"]) == len(writer.lines)


WRONG = {
    401: (AccessError, r"denied permission \(HTTP 401\)\. Keep MLFLOW_TRACKING_TOKEN"),
    403: (AccessError, r"HTTP 403.*under secrets"),
    404: (RequestError, r"HTTP 404.*Is observe\.mlflow\.url a tracking server"),
    500: (LostError, r"did not take it: it answers with HTTP 500\. Look at observe\.mlflow\.url"),
    503: (LostError, r"Look at observe\.mlflow\.url"),
}


@pytest.mark.parametrize("code", WRONG)
def test_a_server_that_is_wrong_is_told_with_what_to_do(
    tmp_path: Path, server: Front, experiment: str, code: int
) -> None:
    run = begin(new_run(tmp_path, mlflow={"url": server.address, "experiment": experiment}))
    server.answers = code
    kind, words = WRONG[code]
    with pytest.raises(kind, match=words) as told:
        MlflowTracker().open(read_attempt_metadata(run, 0))
    assert TOKEN not in str(told.value) and "\n" not in str(told.value)


def test_a_server_that_is_down_or_slow_is_given_up_soon(
    tmp_path: Path, server: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mlflow._OF_CLIENT, "MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    server.answers = 30.0
    for url in (f"http://127.0.0.1:{free_port()}", server.address):
        began_s = time.monotonic()
        run = begin(new_run(tmp_path / url[-5:], mlflow={"url": url}))
        with pytest.raises(LostError, match=r"it was not reached\. Look at observe\.mlflow\.url"):
            MlflowTracker().open(read_attempt_metadata(run, 0))
        assert time.monotonic() - began_s < 8.0


def test_a_deleted_experiment_is_refused(tmp_path: Path, server: Front, experiment: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.address)
    client.delete_experiment(client.create_experiment(experiment))
    run = begin(new_run(tmp_path, mlflow={"url": server.address, "experiment": experiment}))
    with pytest.raises(RequestError, match=r"was deleted.*Restore it there, or name another"):
        MlflowTracker().open(read_attempt_metadata(run, 0))

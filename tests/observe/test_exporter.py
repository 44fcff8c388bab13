"""What Prometheus is told of a run, from files written as a run writes them."""

import json
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from shardyard.config.endpoints import ADDRESS_VARIABLE, MetricsEndpoint, metrics_endpoint
from shardyard.config.schema.observe import Observe
from shardyard.errors import RequestError
from shardyard.observe.exporter import RunReader, serve_metrics
from shardyard.rundir.jsonl import METRIC_KEYS, EventWriter, LineWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.metrics import ALL, STEPS


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "bert-1")
    found.attempt(0).mkdir(parents=True)
    return found


def step(number: int, **other: object) -> dict[str, object]:
    return {**dict.fromkeys(METRIC_KEYS), "step": number, "tokens": 100 * number, **other}


def reader_of(run: RunDir, attempt: int = 0) -> RunReader:
    return RunReader(run, list, attempt=attempt)


def state_in(reader: RunReader) -> dict[str, float]:
    """The states that are not 0."""
    found = samples(reader).items()
    return {
        label: value for (name, label), value in found if name == "shardyard_run_state" and value
    }


def samples(reader: RunReader) -> dict[tuple[str, str], float]:
    return {(metric.name, label): value for metric, label, value in reader.samples()}


def test_the_newest_step_is_told_and_evaluations_are_passed_over(run: RunDir) -> None:
    lines = LineWriter(run.metrics)
    for line in (step(1, loss=3.0), step(2, loss=2.5), {"step": 2, "eval": {"loss": 9.0}}):
        lines.append(line)
    found = samples(reader_of(run))
    assert found["shardyard_step", ""] == 2
    assert found["shardyard_loss", ""] == 2.5
    assert found["shardyard_tokens_total", ""] == 200


def test_what_is_not_known_has_no_sample(run: RunDir) -> None:
    LineWriter(run.metrics).append(step(1))
    found = samples(reader_of(run))
    assert not {"shardyard_mfu_ratio", "shardyard_cost_usd", "shardyard_checkpoint_step"} & {
        name for name, _ in found
    }


def test_events_are_counted_once_over_scrapes_and_from_the_start_in_a_new_file(
    run: RunDir,
) -> None:
    reader, events = reader_of(run), EventWriter(run.events, attempt=0, generation=0)
    events.write("worker_lost", rank=1)
    assert samples(reader)["shardyard_events_total", "worker_lost"] == 1
    with run.events.open("a") as file:
        file.write('{"kind": "worker_')  # a line that is being written
    assert samples(reader)["shardyard_events_total", "worker_lost"] == 1
    with run.events.open("a") as file:
        file.write('lost"}\nnot json\n')
    assert samples(reader)["shardyard_events_total", "worker_lost"] == 2
    run.events.write_text('{"kind": "straggler"}\n')
    found = samples(reader)
    assert found["shardyard_events_total", "worker_lost"] == 0
    assert found["shardyard_events_total", "straggler"] == 1


def test_the_age_of_a_checkpoint_is_by_the_clock_of_the_node_that_is_asked(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("shardyard.observe.exporter.time.monotonic", lambda: now[0])
    monkeypatch.setattr("shardyard.observe.exporter.time.time", lambda: 0.0, raising=False)
    reader = reader_of(run)
    now[0] += 60
    assert samples(reader)["shardyard_checkpoint_age_seconds", ""] == 60
    run.checkpoint(5).mkdir(parents=True)
    run.latest.write_text("step-00000005\n")
    found = samples(reader)
    assert found["shardyard_checkpoint_age_seconds", ""] == 0
    assert found["shardyard_checkpoint_step", ""] == 5


def test_an_evaluation_is_progress_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("shardyard.observe.exporter.time.monotonic", lambda: now[0])
    reader, lines = reader_of(run), LineWriter(run.metrics)
    ages = []
    for line in (None, step(1), None, {"step": 1, "eval": {"loss": 2.0}}):
        now[0] += 5
        if line is not None:
            lines.append(line)
        ages.append(samples(reader)["shardyard_step_age_seconds", ""])
    assert ages == [5, 0, 5, 0]


def test_the_interval_of_checkpoints_is_the_recipes_or_what_the_run_came_to(run: RunDir) -> None:
    name = ("shardyard_checkpoint_every_steps", "")
    assert samples(RunReader(run, list, attempt=0, every=50))[name] == 50
    reader = reader_of(run)
    assert name not in samples(reader)
    EventWriter(run.events, attempt=0, generation=0).write("checkpoint_interval", every=20)
    assert samples(reader)[name] == 20


@pytest.mark.parametrize(
    ("outcome", "exit_code", "state"),
    [("finished", 0, "finished"), ("drained", 143, "drained"), ("failed", 1, "failed"),
     ("failed", 143, "failed"), ("failed", 75, "failed")],
)  # fmt: skip
def test_the_state_is_of_this_attempt_and_has_its_number(
    run: RunDir, outcome: str, exit_code: int, state: str
) -> None:
    before = EventWriter(run.events, attempt=0, generation=0)
    before.write("attempt_started")
    before.write("attempt_ended", outcome="failed", exit_code=1)
    reader = reader_of(run, attempt=1)
    assert state_in(reader) == {"running": 2.0}, "an agent that waits for others is one of the run"
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("attempt_started")
    assert state_in(reader) == {"running": 2.0}
    if outcome == "drained":
        events.write("draining")
        assert state_in(reader) == {"draining": 2.0}
    if outcome == "finished":
        events.write("run_finished")
        assert state_in(reader) == {"running": 2.0}
    events.write("attempt_ended", outcome=outcome, exit_code=exit_code)
    assert state_in(reader) == {state: 2.0}


def test_a_node_that_does_not_see_the_events_counts_none(run: RunDir) -> None:
    found = samples(reader_of(run))
    assert not [name for name, _ in found if name == "shardyard_events_total"]
    assert found["shardyard_run_state", "running"] == 1


def ask(run: RunDir) -> str:
    (file,) = (run.path.parent / ".prometheus").iterdir()
    (target,) = json.loads(file.read_text())
    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_an_endpoint_stays_until_its_last_word_was_heard(run: RunDir) -> None:
    events = EventWriter(run.events, attempt=0, generation=0)
    events.write("attempt_started")
    place, heard = MetricsEndpoint("127.0.0.1", 0), ""

    def ask_once_more() -> None:
        nonlocal heard
        heard = ask(run)

    with serve_metrics(reader_of(run), run, place, node_rank=0) as scrapes:
        for _ in range(2):
            assert 'shardyard_run_state{node="0",run_id="bert-1",state="running"} 1.0' in ask(run)
        events.write("attempt_ended", outcome="failed", exit_code=1)
        later = threading.Timer(0.2, ask_once_more)
        later.start()
        scrapes.wait_for_one_more()
    later.join()
    assert 'shardyard_run_state{node="0",run_id="bert-1",state="failed"} 1.0' in heard


def test_nobody_is_waited_for_who_does_not_ask_or_has_stopped_to(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = MetricsEndpoint("127.0.0.1", 0)
    with serve_metrics(reader_of(run), run, place, node_rank=0) as scrapes:
        scrapes.wait_for_one_more()
        ask(run)
        scrapes.wait_for_one_more()  # once is no habit
        ask(run)
        later_s = time.monotonic() + 3600
        monkeypatch.setattr("shardyard.observe.exporter.time.monotonic", lambda: later_s)
        scrapes.wait_for_one_more()
    with serve_metrics(reader_of(run), run, None, node_rank=0) as scrapes:
        scrapes.wait_for_one_more()


def test_ranks_of_the_node_are_told_apart(run: RunDir) -> None:
    found = samples(RunReader(run, lambda: [(7, 0.25), (7, 0.5)], attempt=0))
    assert found["shardyard_rank_compute_seconds", "1"] == 0.5
    assert found["shardyard_rank_step", "0"] == 7


def test_it_is_served_found_by_prometheus_and_gone_at_the_end(run: RunDir) -> None:
    LineWriter(run.metrics).append(step(3, loss=2.0))
    place = run.path.parent / ".prometheus" / "bert-1.node-1.json"
    with serve_metrics(reader_of(run), run, MetricsEndpoint("127.0.0.1", 0), node_rank=1):
        (target,) = json.loads(place.read_text())
        address = target["targets"][0]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert target["labels"] == {}
    assert 'shardyard_loss{node="1",run_id="bert-1"} 2.0' in text
    assert not place.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=30)


def test_a_taken_port_is_told(run: RunDir) -> None:
    with serve_metrics(reader_of(run), run, MetricsEndpoint("127.0.0.1", 0), node_rank=0):
        (target,) = json.loads((run.path.parent / ".prometheus" / "bert-1.node-0.json").read_text())
        port = int(target["targets"][0].rpartition(":")[2])
        other = serve_metrics(reader_of(run), run, MetricsEndpoint("127.0.0.1", port), node_rank=1)
        with pytest.raises(RequestError, match=r"node 1 cannot listen there.*or port 0"), other:
            pass


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        (9400, "127.0.0.1:9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("[::1]:9400", "::1:9400"),
    ],
)
def test_a_port_alone_is_loopback(setting: int | str, place: str) -> None:
    Observe(prometheus=setting)
    assert str(metrics_endpoint(setting)) == place


def test_in_a_pod_a_port_alone_is_the_pods_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.7")
    assert metrics_endpoint(9400) == MetricsEndpoint("10.0.0.7", 9400)
    assert metrics_endpoint("127.0.0.1:9400") == MetricsEndpoint("127.0.0.1", 9400)


@pytest.mark.parametrize("setting", ["9400", "host", "host:x", ":9400", 70000, -1])
def test_what_is_no_place_is_refused(setting: int | str) -> None:
    with pytest.raises(ValueError, match="prometheus"):
        Observe(prometheus=setting)


def test_names_are_as_prometheus_wants_them() -> None:
    for metric in ALL:
        assert metric.name.startswith("shardyard_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert {metric.key for metric in STEPS} <= set(METRIC_KEYS)


def test_devices_are_told_by_the_newest_line_of_this_attempts_telemetry(run: RunDir) -> None:
    file = run.telemetry_of(0)
    head = {"t": 1.0, "node": "a", "attempt": 0, "cores": 8, "names": ["H100"] * 2,
            "memory_bytes": [1, 1]}  # fmt: skip
    lines = LineWriter(file)
    lines.append(head)
    lines.append({"t": 2.0, "devices": {"power_w": [1.0, 1.0]}})
    lines.append({"t": 3.0, "devices": {"power_w": [650.5, None], "ecc_uncorrected": [0, 2]}})
    found = samples(RunReader(run, list, attempt=0, telemetry=file))
    assert found["shardyard_device_power_watts", "0"] == 650.5
    assert ("shardyard_device_power_watts", "1") not in found
    assert found["shardyard_device_ecc_errors_total", "1"] == 2
    later = samples(RunReader(run, list, attempt=1, telemetry=file))
    assert not [name for name, _ in later if name.startswith("shardyard_device_")]

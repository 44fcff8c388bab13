"""A real Prometheus finds two nodes of a run by their files, and what its own files say is shown.

Devices are faked: an endpoint in the form of DCGM's exporter. So is what no CPU has (MFU, a price),
by a second run whose files are written by hand and served by the same exporter.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.endpoints import MetricsEndpoint
from shardyard.io.yaml import write_yaml
from shardyard.launchers.monitoring import alerts, dashboards
from shardyard.launchers.monitoring.alerts import DEVICE_LABELS, DEVICES, XID
from shardyard.observe.exporter import RunReader, discovery_pattern, serve_metrics
from shardyard.rundir.jsonl import METRIC_KEYS, EventWriter, LineWriter, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.telemetry import DEVICE_FIELDS
from tests.debian_packages import need
from tests.e2e.shardyard import Answer, Place, events, wait_for, wait_for_step
from tests.image.registries import free_port
from tests.launchers.local_runs import TWO_NODES, LocalRuns

NOT_ON_A_CPU = ("shardyard_mfu_ratio", "shardyard_cost_usd", "shardyard_device_")
OFF_THE_BUS = 79


@contextmanager
def prometheus(folder: Path, runs: Path, *, devices: str) -> Iterator[str]:
    """A server of its own data; its address."""
    need("prometheus")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    config, rules = folder / "prometheus.yml", folder / "rules.yaml"
    rules.write_text(write_yaml(alerts.render()))
    found = {"files": [str(discovery_pattern(runs))], "refresh_interval": "1s"}
    jobs = [
        {"job_name": "shardyard", "file_sd_configs": [found]},
        {"job_name": "dcgm", "static_configs": [{"targets": [devices]}]},
    ]
    often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    content = {"global": often, "rule_files": [str(rules)], "scrape_configs": jobs}
    config.write_text(json.dumps(content))
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(lambda: process.poll() is not None or bool(asked(address, "vector(1)")))
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield address
        finally:
            process.terminate()
            process.wait()


def asked(address: str, query: str) -> list[dict[str, Any]]:
    words = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{words}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:  # it is not up yet
        return []
    return found


@contextmanager
def fake_devices() -> Iterator[str]:
    """Two GPUs as DCGM's exporter tells of them, one of which is off the bus; its address."""
    lines = []
    for metric in DEVICES:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
        for gpu in ("0", "1"):
            told = {"gpu": gpu, "Hostname": "n0"}
            labels = ",".join(f'{name}="{told.get(name, "x")}"' for name in DEVICE_LABELS)
            value = OFF_THE_BUS * int(gpu) if metric is XID else 50
            lines.append(f"{metric.name}{{{labels}}} {value}")
    text = ("\n".join(lines) + "\n").encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def written_run(runs: Path) -> Iterator[str]:
    """A run of devices whose peak and price are known, from files alone; its id."""
    run = RunDir(runs / "written")
    run.attempt(0).mkdir(parents=True)
    LineWriter(run.metrics).append({**dict.fromkeys(METRIC_KEYS, 1), "mfu": 0.4})
    told = EventWriter(run.events, attempt=0, generation=0)
    told.write("attempt_started")
    told.write("spent", usd=2.5, usd_per_hour=98.0)
    run.checkpoint(1).mkdir(parents=True)
    run.latest.write_text("step-00000001\n")
    telemetry = LineWriter(run.telemetry_of(0))
    telemetry.append({"t": 1.0, "node": "n0", "attempt": 0, "names": ["H100"], "memory_bytes": [1]})
    telemetry.append({"t": 2.0, "devices": {field.name: [1] for field in DEVICE_FIELDS}})
    reader = RunReader(run, lambda: [(1, 0.5)], attempt=0, every=500, telemetry=run.telemetry_of(0))
    try:
        with serve_metrics(reader, run, MetricsEndpoint("127.0.0.1", 0), node_rank=0):
            yield run.run_id
    finally:
        shutil.rmtree(run.path)


def queries(board: dashboards.Dashboard, **chosen: str) -> set[str]:
    """Of all panels, with what a reader chose on the page."""
    found = {expr.replace("$__range", "1h") for panel in board.panels for expr, _ in panel.queries}
    for name, value in chosen.items():
        found = {expr.replace(f'"${name}"', f'"{value}"') for expr in found}
    return found


def wait_for_answers(address: str, wanted: set[str]) -> None:
    left = set(wanted)

    def answered() -> bool:
        left.difference_update([query for query in left if asked(address, query)])
        return not left

    wait_for(answered)


@pytest.fixture
def runs(place: Place, prepared: Answer) -> Iterator[LocalRuns]:
    assert prepared.code == 0
    made = LocalRuns(place)
    yield made
    made.tidy_up()


def test_every_panel_and_alert_finds_what_a_real_run_and_its_devices_tell(
    place: Place, runs: LocalRuns, tmp_path: Path
) -> None:
    run_dir = place.run_dir("watched")
    endless = ("run.steps=1000000", "checkpoint.every=20", "task.eval_every_steps=null")
    job = runs.launch(
        "watched", *TWO_NODES, *endless, "observe.prometheus=0", "elastic.max_restarts=0"
    )
    folder = run_dir.path.parent
    with (
        fake_devices() as devices,
        written_run(folder) as written,
        prometheus(tmp_path, folder, devices=devices) as address,
    ):
        wait_for_step(run_dir, 20)
        of_watched = queries(dashboards.RUN, run="watched")
        missing = {query for query in of_watched if any(name in query for name in NOT_ON_A_CPU)}
        wait_for_answers(address, of_watched - missing)
        wait_for_answers(address, queries(dashboards.RUN, run=written))
        wait_for_answers(address, queries(dashboards.CLUSTER, node=".*"))
        assert [query for query in missing if asked(address, query)] == []
        assert len(missing) == 3 + len(DEVICE_FIELDS)

        of_both = 'last_over_time(shardyard_loss{run_id="watched"}[10m])'
        wait_for(lambda: len(asked(address, of_both)) == 2)  # each node is asked in its own time
        (loss, other) = asked(address, of_both)
        assert set(loss["metric"]) - {"__name__"} == {"instance", "job", "node", "run_id"}
        assert {loss["metric"]["node"], other["metric"]["node"]} == {"0", "1"}
        of_ranks = 'shardyard_rank_step{run_id="watched"}'
        wait_for(lambda: len(asked(address, of_ranks)) == 2)
        ranks = asked(address, of_ranks)
        assert {(one["metric"]["node"], one["metric"]["local_rank"]) for one in ranks} == {
            ("0", "0"), ("1", "0"),
        }  # fmt: skip
        wait_for(lambda: bool(firing(address)))
        assert firing(address) == {("ShardyardDeviceXid", "1")}

        # A worker dies and may not be restarted: the agents end once their last word was heard,
        # by who has asked them more than once (Scrapes.wait_for_one_more).
        twice = 'count_over_time(shardyard_run_state{run_id="watched",state="failed"}[10m]) > 1'
        wait_for(lambda: len(asked(address, twice)) == 2)
        (started,) = events(run_dir, "attempt_started")
        os.kill(started["workers"][1]["pid"], signal.SIGKILL)
        assert runs.wait(job).exit_code == 1
        wait_for(lambda: ("ShardyardRunFailed", "watched") in firing(address))
        wait_for(lambda: not asked(address, 'shardyard_run_state{run_id="watched"}'))
        assert ("ShardyardRunFailed", "watched") in firing(address), "it is remembered"
    losses = {line["loss"] for line in read_steps(run_dir.metrics)}
    assert float(loss["value"][1]) in losses
    assert not list(discovery_pattern(folder).parent.iterdir())


def firing(address: str) -> set[tuple[str, str]]:
    """Alerts, each with the run or the GPU that it is about."""
    found = [one["metric"] for one in asked(address, 'ALERTS{alertstate="firing"}')]
    return {(one["alertname"], one.get("run_id") or one["gpu"]) for one in found}

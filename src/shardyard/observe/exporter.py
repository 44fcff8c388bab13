"""Endpoint for Prometheus on each node: content of the run folder on request, without a store.

The node's agent serves it, outside of the training processes. It reads only at a scrape:
the last lines of metrics.jsonl, and the new ones of events.jsonl.
"""

import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.config.endpoints import MetricsEndpoint
from shardyard.errors import RequestError
from shardyard.io.files import make_folder, parse_json, write_text
from shardyard.rundir.jsonl import EVENT_KINDS, latest_steps, read_lines_backwards
from shardyard.rundir.layout import RunDir, step_of_name
from shardyard.rundir.metrics import (
    CHECKPOINT_AGE,
    CHECKPOINT_EVERY,
    CHECKPOINT_STEP,
    COST,
    COST_RATE,
    DEVICES,
    EVENTS,
    RANK_COMPUTE,
    RANK_STEP,
    STATE,
    STATES,
    STEP_AGE,
    STEPS,
    RunMetric,
)
from shardyard.rundir.state import read_spending, state_of
from shardyard.rundir.telemetry import latest_sample

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

RankSeconds = Callable[[], list[tuple[int, float]]]
"""Function returning each local rank's step and last step's seconds outside of collectives."""

Sample = tuple[RunMetric, str, float]
"""A metric, the value of its own label (empty: it has none), and its value."""

_TELLING = ("attempt_started", "draining", "run_finished", "attempt_ended")
"""Kinds of events that tell an attempt's state."""


class RunReader:
    """Reads a run folder at each scrape."""

    def __init__(
        self,
        run: RunDir,
        ranks: RankSeconds,
        *,
        attempt: int,
        every: int | None = None,
        telemetry: Path | None = None,
    ) -> None:
        """Begin to count ages.

        Args:
            telemetry: This node's.
            every: Steps between checkpoints; None: ``auto``, which the run's events tell.
        """
        self._run = run
        self._ranks = ranks
        self._attempt = attempt
        self._every = every
        self._telemetry = telemetry
        self._events: Counter[str] = Counter()
        self._telling: list[dict[str, Any]] = []
        self._read_bytes = 0
        self._latest: Mapping[str, Any] = {}
        self._checkpoint: str | None = None
        self._stepped_s = self._seen_s = time.monotonic()

    def samples(self) -> Iterator[Sample]:
        """All that is known now; what is not known has no sample."""
        self._read_events()
        now = self._state()
        for state in STATES:
            yield STATE, state, float(self._attempt + 1 if state == now else 0)
        line = self._latest_step()
        for metric in STEPS:
            value = line.get(metric.key)
            if value is not None:
                yield metric, "", float(value)
        yield STEP_AGE, "", time.monotonic() - self._stepped_s
        yield from self._checkpoints()
        for kind in EVENT_KINDS if self._events else ():
            yield EVENTS, kind, float(self._events[kind])
        spending = read_spending(self._run)
        if spending is not None:
            yield COST, "", spending.usd
            yield COST_RATE, "", spending.usd_per_hour
        for local_rank, (step, seconds) in enumerate(self._ranks()):
            yield RANK_STEP, str(local_rank), float(step)
            yield RANK_COMPUTE, str(local_rank), seconds
        yield from self._of_devices()

    def _of_devices(self) -> Iterator[Sample]:
        newest = None if self._telemetry is None else latest_sample(self._telemetry)
        if newest is None or newest.head.attempt != self._attempt:
            return
        for metric in DEVICES:
            for device, value in enumerate(newest.devices.get(metric.key, ())):
                if value is not None:
                    yield metric, str(device), float(value)

    def _state(self) -> str:
        has_ended = any(event["kind"] == "attempt_ended" for event in self._telling)
        return state_of(self._telling, is_leased=not has_ended)

    def _latest_step(self) -> Mapping[str, Any]:
        newest = next(read_lines_backwards(self._run.metrics), None)
        if newest is not None and newest != self._latest:  # an evaluation is progress too
            self._latest, self._stepped_s = newest, time.monotonic()
        return next(latest_steps(self._run.metrics), {})

    def _checkpoints(self) -> Iterator[Sample]:
        folder = self._run.latest_checkpoint()
        name = None if folder is None else folder.name
        if name != self._checkpoint:  # by this machine's own clock: another's may be wrong
            self._checkpoint, self._seen_s = name, time.monotonic()
        yield CHECKPOINT_AGE, "", time.monotonic() - self._seen_s
        if name is not None:
            yield CHECKPOINT_STEP, "", float(step_of_name(name) or 0)
        if self._every is not None:
            yield CHECKPOINT_EVERY, "", float(self._every)

    def _read_events(self) -> None:
        """Read the whole lines that are new; a file that became shorter is read again."""
        try:
            with self._run.events.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_bytes:
                    self._events.clear()
                    self._telling.clear()
                    self._read_bytes = 0
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        self._read_bytes += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                self._note(parse_json(line))

    def _note(self, event: dict[str, Any]) -> None:
        kind = str(event["kind"])
        self._events[kind] += 1
        if kind in _TELLING and event.get("attempt") == self._attempt:
            self._telling.append(event)
        if kind == "checkpoint_interval":
            self._every = int(event["every"])


class ScrapeMonitor:
    """When the endpoint was asked, by which it is known when it will be asked again."""

    _LATE_S = 10.0
    """A scrape may come so much later than expected, at least."""
    _MOST_S = 60.0
    """Nodes that bill wait no longer for a scrape, however seldom one comes."""

    def __init__(self) -> None:
        self._started_s: deque[float] = deque(maxlen=4)
        self._scraped = threading.Condition()

    def instrument(self, app: "WSGIApplication") -> "WSGIApplication":
        """The same endpoint, each of whose answers is noted once it is sent."""

        def ask(environ: "WSGIEnvironment", start: "StartResponse") -> Iterator[bytes]:
            begun_s = time.monotonic()
            yield from app(environ, start)
            with self._scraped:
                self._started_s.append(begun_s)
                self._scraped.notify_all()

        return ask

    def wait_for_one_more(self) -> None:
        """Return once a scraper that has not yet seen the current state has asked.

        It does not wait for scrapers that ask irregularly, or have stopped to.
        """
        now_s = time.monotonic()
        with self._scraped:
            gaps_s = [after - before for before, after in pairwise(self._started_s)]
            if gaps_s:
                late_s = max(0.5 * max(gaps_s), self._LATE_S)
                patience_s = self._started_s[-1] + max(gaps_s) + late_s - now_s
                self._scraped.wait_for(
                    lambda: self._started_s[-1] >= now_s, min(patience_s, self._MOST_S)
                )


def discovery_pattern(runs: Path) -> Path:
    """Prometheus' pattern for the endpoints of all runs in a folder; it takes one ``*``."""
    return runs / ".prometheus" / "*.json"


class _Collector:
    """Collector that prometheus_client calls at each scrape."""

    def __init__(self, reader: RunReader, labels: Mapping[str, str]) -> None:
        self._reader = reader
        self._labels = dict(labels)
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        with self._lock:  # of two who ask at once, each would count the same new events
            samples = list(self._reader.samples())
        for metric, label, value in samples:
            family = families.get(metric.name)
            if family is None:
                names = [*self._labels, *([metric.label] if metric.label else [])]
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = families[metric.name] = kind(metric.name, metric.help, labels=names)
            family.add_metric([*self._labels.values(), *([label] if metric.label else [])], value)
        return families.values()


@contextmanager
def serve_metrics(
    reader: RunReader, run: RunDir, endpoint: MetricsEndpoint | None, *, node_rank: int
) -> Iterator[ScrapeMonitor]:
    """Serve the metrics of a run while the block runs, and write down where for Prometheus.

    ``.prometheus/<run id>.node-<k>.json`` next to the runs has the form of its file_sd_configs,
    which look into one folder.

    Raises:
        RequestError: The address cannot be listened at.
    """
    scrapes = ScrapeMonitor()
    if endpoint is None:
        yield scrapes
        return
    from prometheus_client import start_http_server
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    labels = {"run_id": run.run_id, "node": str(node_rank)}
    registry.register(_Collector(reader, labels))
    try:
        server, thread = start_http_server(endpoint.port, endpoint.host, registry)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"observe.prometheus={endpoint}: node {node_rank} cannot listen there: {error}. "
            "Another "
            "process has the port, or the address is not this machine's. Give another, or port 0 "
            f"for any free one; Prometheus finds it by {discovery_pattern(run.path.parent)}."
        ) from error
    app = server.get_app()
    assert app is not None, "it was made with one"
    server.set_app(scrapes.instrument(app))
    host = socket.gethostname() if endpoint.host in ("0.0.0.0", "::") else endpoint.host
    target = f"[{host}]" if ":" in host else host
    file = discovery_pattern(run.path.parent).with_name(f"{run.run_id}.node-{node_rank}.json")
    make_folder(file.parent)
    # Without labels: Prometheus would call those of the samples exported_run_id.
    content = [{"targets": [f"{target}:{server.server_port}"], "labels": {}}]
    write_text(file, json.dumps(content) + "\n")
    try:
        yield scrapes
    finally:
        with suppress(OSError):
            file.unlink()
        server.shutdown()
        server.server_close()
        thread.join()

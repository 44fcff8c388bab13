"""MLflow: one run for each of ours, found again by a tag; a server takes a point once.

The server keys a point by name, step, time and value, and all of these follow from the
run's folder. Lines that are sent twice, as the answer was lost, are stored once. A tag that
comes with the lines holds the number that the server has had.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardyard.errors import AccessError, LostError, RequestError, ShardyardError
from shardyard.trackers.service import (
    CALL_S,
    AttemptEnd,
    AttemptMetadata,
    MetricsRow,
    Outcome,
    flat,
)

_PAGE = "exporters#keys"

_RUN_ID, _LINES = "shardyard.run_id", "shardyard.lines"
_OUTCOME, _REASON = "shardyard.outcome", "shardyard.reason"

_STATUS: dict[Outcome, str] = {
    "finished": "FINISHED",
    "drained": "KILLED",  # it has no word for what was stopped and can go on
    "failed": "FAILED",
    "lost": "FAILED",
}

_MOST_METRICS, _MOST_PARAMS = 900, 100
"""Most in one request; servers reject more than 1,000 values in all, and 100 parameters."""
_LONGEST = 500
"""Characters of a parameter that servers of any version take."""

_OF_CLIENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # what calls it tries again, and tells of it
    "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{CALL_S:.0f}",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowTracker:
    """A tracking server."""

    keeps_count = True

    def __init__(self) -> None:
        self.address = ""
        self._client: Any = None
        self._id = ""

    def open(self, metadata: AttemptMetadata) -> int:
        """Find the run by its tag, or create it."""
        os.environ.update(_OF_CLIENT)
        import mlflow.exceptions
        from mlflow import MlflowClient

        mlflow_section = metadata.observe.mlflow
        assert mlflow_section.url is not None
        try:
            self._client = MlflowClient(tracking_uri=mlflow_section.url)
            experiment = self._experiment(mlflow_section.experiment)
            found = self._find(metadata, experiment)
            self._id = found.info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._log_settings(metadata, found)
        except mlflow.exceptions.MlflowException as error:
            raise _convert_error(error) from error
        url = mlflow_section.url.rstrip("/")
        self.address = f"{url}/#/experiments/{experiment}/runs/{self._id}"
        return int(found.data.tags.get(_LINES, 0))

    def send(self, rows: Sequence[MetricsRow]) -> None:
        """Log rows in few requests, each with the number of its last line."""
        import mlflow.exceptions
        from mlflow.entities import Metric, RunTag

        try:
            for some in _in_requests(rows):
                points = [
                    Metric(name, value, int(row.t * 1000), row.step)
                    for row in some
                    for name, value in row.values.items()
                ]
                tags = [RunTag(_LINES, str(some[-1].number))]
                self._client.log_batch(self._id, metrics=points, tags=tags)
        except mlflow.exceptions.MlflowException as error:
            raise _convert_error(error) from error

    def close(self, end: AttemptEnd) -> None:
        """Log the result, and how it ended."""
        import mlflow.exceptions
        from mlflow.entities import Metric, RunTag

        t_ms = int(end.t * 1000)
        points = [Metric(f"result/{name}", value, t_ms, 0) for name, value in end.result.items()]
        tags = [RunTag(_OUTCOME, end.outcome), RunTag(_REASON, end.reason[:_LONGEST])]
        try:
            self._client.log_batch(self._id, metrics=points, tags=tags)
            self._client.set_terminated(self._id, status=_STATUS[end.outcome], end_time=t_ms)
        except mlflow.exceptions.MlflowException as error:
            raise _convert_error(error) from error

    def _experiment(self, name: str | None) -> str:
        """Its id; made where there is none of the name."""
        if name is None:
            return "0"  # the one that every server begins with
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name))
        if found.lifecycle_stage != "active":
            raise RequestError(
                f"observe.mlflow.experiment={name} was deleted on the server, which keeps its "
                "name. Restore it there, or name another."
            )
        return str(found.experiment_id)

    def _find(self, metadata: AttemptMetadata, experiment: str) -> Any:
        run_id = metadata.run.run_id
        wanted = f"tags.`{_RUN_ID}` = '{run_id}'"
        # the oldest, should a second one ever have been made
        found = self._client.search_runs(
            [experiment], wanted, max_results=1, order_by=["attributes.start_time ASC"]
        )
        if found:
            return found[0]
        tags = {_RUN_ID: run_id, "mlflow.source.name": "shardyard"}
        return self._client.create_run(
            experiment, start_time=int(metadata.started_t * 1000), tags=tags, run_name=run_id
        )

    def _log_settings(self, metadata: AttemptMetadata, run: Any) -> None:
        """Parameters cannot be changed there: what a resume has changed becomes a tag."""
        from mlflow.entities import Metric, Param, RunTag

        params = {name: _text(value) for name, value in flat(metadata.settings).items()}
        before = run.data.params
        new = [Param(name, text) for name, text in params.items() if name not in before]
        changed = [
            RunTag(f"attempt-{metadata.attempt}.{name}", text)
            for name, text in params.items()
            if name in before and before[name] != text
        ]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMS])
        t_ms = int(metadata.attempt_t * 1000)
        plan = [
            Metric(f"plan/{name}", value, t_ms, 0) for name, value in metadata.predicted.items()
        ]
        tags = [RunTag(name, value) for name, value in metadata.tags.items()]
        self._client.log_batch(self._id, metrics=plan, tags=[*changed, *tags])


def _in_requests(rows: Sequence[MetricsRow]) -> Iterator[list[MetricsRow]]:
    some: list[MetricsRow] = []
    count = 0
    for row in rows:
        if some and count + len(row.values) > _MOST_METRICS:
            yield some
            some, count = [], 0
        some.append(row)
        count += len(row.values)
    if some:
        yield some


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _convert_error(error: Any) -> ShardyardError:
    """A refusal of the client in our words, by the status that the server answered with."""
    status = error.get_http_status_code()
    words = str(error).partition("Response body")[0].splitlines()[0][:200]
    if status in (401, 403):
        return AccessError(
            f"MLflow denied permission (HTTP {status}). Keep MLFLOW_TRACKING_TOKEN, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, under secrets.",
            page=_PAGE,
        )
    if 400 <= status < 500 and status not in (408, 429):
        return RequestError(
            f"MLflow rejected the request (HTTP {status}): {words}. Is observe.mlflow.url a "
            "tracking server of MLflow?"
        )
    text = str(error)
    answered = re.search(r"too many (\d+) error responses", text)
    if answered:
        why = f"it answers with HTTP {answered[1]}"
    elif "Max retries" in text or "timed out" in text.lower() or "Connection aborted" in text:
        why = "it was not reached"
    else:
        why = words
    return LostError(f"MLflow did not take it: {why}. Look at observe.mlflow.url.")

"""Interface of every service to the process that sends to it, and the data to send."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from shardyard.config.schema.observe import Observe
from shardyard.rundir.layout import RunDir

Outcome = Literal["finished", "drained", "failed", "lost"]

CALL_S = 10.0
"""Seconds that one call waits for an answer."""

PREFIXES = {"wandb": "WANDB_", "mlflow": "MLFLOW_"}
"""Service -> prefix of the variables that its client reads; it gets only secrets with it."""

WORDS = {"wandb": "W&B", "mlflow": "MLflow"}
"""Service -> its name."""


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One line of metrics.jsonl that has something to show."""

    number: int
    """Number of the line, from 1: lines are never taken back, so that it only grows."""
    step: int
    t: float
    """Unix seconds at which the step ended."""
    values: Mapping[str, float]
    """``train/loss``, ``eval/loss``, ..., and ``epoch``, ``tokens``, ``samples``."""


@dataclass(frozen=True, kw_only=True)
class AttemptMetadata:
    """Facts about an attempt before its first step."""

    run: RunDir
    attempt: int
    observe: Observe
    started_t: float
    """Unix seconds at which the run began."""
    attempt_t: float
    """Unix seconds at which this attempt was written down."""
    settings: Mapping[str, Any]
    """The resolved recipe by section, without what is not for others' eyes."""
    predicted: Mapping[str, float]
    """Values predicted by the plan."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """``run.tags`` of the attempt."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """End of an attempt."""

    outcome: Outcome
    """lost: it said no word."""
    exit_code: int
    reason: str
    t: float
    result: Mapping[str, float]
    """The report's numbers."""


class Service(Protocol):
    """A place where runs are shown. It is spoken to by one thread of one process.

    Any method raises a ShardyardError where the service does not take what it is given: it is down,
    slow, wrong, or permission is missing. The same is then tried again from ``open`` on.
    """

    def open(self, metadata: AttemptMetadata) -> int:
        """Find the run there, or make it.

        Returns:
            How many lines of metrics.jsonl it has had, by its own word.
        """

    def send(self, rows: Sequence[MetricsRow]) -> None:
        """Show rows, in order."""

    def close(self, end: AttemptEnd) -> None:
        """Say how the attempt ended; all rows are there when it returns."""

    @property
    def keeps_count(self) -> bool:
        """Whether rows that ``send`` has returned from are safely stored."""

    @property
    def address(self) -> str:
        """Address at which a person sees the run."""


def flat(settings: Mapping[str, Any], *, at: str = "") -> dict[str, Any]:
    """Dotted name -> value of each setting that has one."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, at=f"{at}{key}.")
        elif value is not None:
            flattened[f"{at}{key}"] = value
    return flattened


def without_user(address: str) -> str:
    """An address without the name and password that may be in it."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


# The services, by name.

SERVICES = {
    "wandb": "shardyard.trackers.wandb:WandbTracker",
    "mlflow": "shardyard.trackers.mlflow:MlflowTracker",
}


def service_named(name: str) -> Service:
    """A service; its client is imported when it is opened."""
    module, _, kind = SERVICES[name].partition(":")
    service: Service = getattr(import_module(module), kind)()
    return service

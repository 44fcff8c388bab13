"""The section ``observe`` of a recipe: logs, services that also show a run, profiles, alerts."""

from typing import Annotated, Literal

from pydantic import Field

from shardyard.config.schema.base import Section

_URL = r"^https?://[^/\s?#]+[^\s?#]*$"
_URL_WORDS = "an http(s) address"


class Wandb(Section):
    """Weights & Biases."""

    project: Annotated[str, Field(min_length=1, max_length=128, description="text")] | None = None
    """W&B project to log to; needs shardyard[wandb]. null: off."""
    entity: str | None = None
    """W&B user or team. null: the default of your key."""
    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of your own W&B server. null: W&B's cloud, or WANDB_BASE_URL."""


class Mlflow(Section):
    """MLflow."""

    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of the MLflow tracking server to log to; needs shardyard[mlflow]. null: off."""
    experiment: Annotated[str, Field(min_length=1, max_length=500, description="text")] | None = (
        None
    )
    """MLflow experiment, created if missing. null: the server's default."""


# A profile that the recipe asks for: ``observe.profile``; its meaning: ``observe.py``.

MOST_STEPS = 20
"""Most steps of one profile: viewers fail on traces of some hundred megabytes, and memory
holds them.
"""


class Profile(Section):
    """Profile that a run takes by itself."""

    at_step: Annotated[int, Field(ge=1)] | None = None
    """Step at which to start a profile, as `shardyard profile` does. null: only on request."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    """Steps to profile, with observe.profile.at_step."""
    ranks: str = "auto"
    """Ranks to profile, with observe.profile.at_step: 0-3,8 or all, at most 64. auto: all of up to
    8, else 8 spread evenly."""


# Alerts when a run fails, makes no progress, costs too much or is done: ``observe.alerts``.

When = Literal["failed", "stalled", "target", "cost", "device_problem"]


class Alert(Section):
    """Address that gets alerts, and their events."""

    when: Annotated[tuple[When, ...], Field(min_length=1, strict=False)]
    """Events. failed: an attempt ended with an error; stalled: no step for long (launched runs);
    target: run.target reached; cost: above_usd exceeded; device_problem: a device fails or computes
    wrong bits."""
    webhook: str
    """Name in `secrets` of the address that receives a POST of JSON."""
    above_usd: Annotated[float, Field(gt=0)] | None = None
    """Dollars of the whole run, for cost."""


class Observe(Section):
    """Logs, metrics, profiles and alerts."""

    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines, where the output is not a terminal."""
    sample_ids: bool = False
    """Log the ids of each rank's samples at each step, to audit data and order."""
    tensorboard: bool = False
    """Write TensorBoard files to the run folder; needs shardyard[tensorboard]."""
    wandb: Wandb = Wandb()
    """Log to Weights & Biases; see docs/exporters.md."""
    mlflow: Mlflow = Mlflow()
    """Log to an MLflow tracking server; see docs/exporters.md."""
    telemetry_every_s: Annotated[float, Field(ge=0.5, le=3600)] | None = 5.0
    """Seconds between records of devices, processors and ranks in telemetry/node-<k>.jsonl. null:
    off."""
    prometheus: (
        Annotated[int, Field(ge=0, le=65535)]
        | Annotated[
            str,
            Field(pattern=r"^([A-Za-z0-9.-]+|\[[0-9a-f:]+\]):\d{1,5}$", description="host:port"),
        ]
        | None
    ) = None
    """Port of each node's Prometheus endpoint, on loopback (in a pod: its address). 0: any free
    port. Needs shardyard[prometheus]."""
    alerts: Annotated[tuple[Alert, ...], Field(strict=False)] = ()
    """Webhooks: `[{when: [failed], webhook: NAME}]`, NAME in secrets (docs/monitoring.md)."""
    callbacks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Your own functions of (kind, values), each package.module:function, called on rank 0 after
    steps, validations and checkpoints (docs/tutorials/own-code.md)."""
    profile: Profile = Profile()
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak TFLOP/s of one device for MFU, if the catalogue does not know the device."""

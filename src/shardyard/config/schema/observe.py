"""The section ``observe`` of a recipe: logs, services that also show a run, profiles, alerts."""

from typing import Annotated, Literal

from pydantic import Field

from shardyard.config.schema.base import Section

_URL = r"^https?://[^/\s?#]+[^\s?#]*$"
_URL_WORDS = "an http(s) address"


class Wandb(Section):
    """Weights & Biases."""

    project: Annotated[str, Field(min_length=1, max_length=128, description="text")] | None = None
    """W&B project that shows the run; needs shardyard[wandb]. null: no data is sent."""
    entity: str | None = None
    """User or team whose project it is; null: the default one of the key."""
    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of a W&B server of your own; null: W&B's cloud, or WANDB_BASE_URL."""


class Mlflow(Section):
    """MLflow."""

    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of the MLflow tracking server that shows the run; needs shardyard[mlflow]. null:
    no data is sent.
    """
    experiment: Annotated[str, Field(min_length=1, max_length=500, description="text")] | None = (
        None
    )
    """Experiment that the run is in, made where it is missing; null: the server's default one."""


# A profile that the recipe asks for: ``observe.profile``; its meaning: ``observe.py``.

MOST_STEPS = 20
"""Most steps of one profile: viewers fail on traces of some hundred megabytes, and memory
holds them.
"""


class Profile(Section):
    """A profile that is taken without being asked for."""

    at_step: Annotated[int, Field(ge=1)] | None = None
    """Profile from this step on, as `shardyard profile` does; null: not unless somebody asks."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    """With observe.profile.at_step: how many steps."""
    ranks: str = "auto"
    """With observe.profile.at_step: whose traces, as 0-3,8 or all, 64 at most; auto: all of up to
    8, else 8 spread evenly."""


# Alerts when a run fails, makes no progress, costs too much or is done: ``observe.alerts``.

When = Literal["failed", "stalled", "target", "cost", "device_problem"]


class Alert(Section):
    """One address, and the events that it receives."""

    when: Annotated[tuple[When, ...], Field(min_length=1, strict=False)]
    """failed: an attempt ended with an error; stalled: no step for long (launched runs); target:
    run.target is reached; cost: above_usd is; device_problem: a device or its bits are wrong."""
    webhook: str
    """Name in `secrets` of the address that takes a POST of JSON; an address is a secret."""
    above_usd: Annotated[float, Field(gt=0)] | None = None
    """For cost: dollars of the whole run."""


class Observe(Section):
    """Output shown and written while training."""

    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between lines in a log that is no terminal."""
    sample_ids: bool = False
    """Write into each rank's log which samples it reads at each step, to audit data and order."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder; needs shardyard[tensorboard]."""
    wandb: Wandb = Wandb()
    """Also send the run to Weights & Biases; see docs/exporters.md."""
    mlflow: Mlflow = Mlflow()
    """Also send the run to an MLflow tracking server; see docs/exporters.md."""
    telemetry_every_s: Annotated[float, Field(ge=0.5, le=3600)] | None = 5.0
    """Seconds between the lines of telemetry/node-<k>.jsonl: each node's devices, processors and
    ranks; null: none are written."""
    prometheus: (
        Annotated[int, Field(ge=0, le=65535)]
        | Annotated[
            str,
            Field(pattern=r"^([A-Za-z0-9.-]+|\[[0-9a-f:]+\]):\d{1,5}$", description="host:port"),
        ]
        | None
    ) = None
    """Port at which each node's agent offers metrics to Prometheus, on loopback (in a pod: its own
    address); 0: any free one; host:port: there. Needs shardyard[prometheus]."""
    alerts: Annotated[tuple[Alert, ...], Field(strict=False)] = ()
    """Addresses that get an alert when a run fails, stalls, reaches its target, costs more than
    a sum or has a device problem: `[{when: [failed], webhook: NAME}]`, NAME one of secrets.
    """
    profile: Profile = Profile()
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak TFLOP/s of one device for MFU, where the catalogue does not know the device."""

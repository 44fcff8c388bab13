"""Where else a run is shown: ``observe.wandb`` and ``observe.mlflow``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shardyard.config.section import Section
from shardyard.errors import Problem

if TYPE_CHECKING:
    from shardyard.config.schema import Recipe

_URL = r"^https?://[^/\s?#]+[^\s?#]*$"
_URL_WORDS = "an http(s) address"


class Wandb(Section):
    """Weights & Biases."""

    project: Annotated[str, Field(min_length=1, max_length=128, description="text")] | None = None
    """Project that the run is shown in, by W&B; needs shardyard[wandb]. null: nothing is sent."""
    entity: str | None = None
    """User or team whose project it is; null: the default one of the key."""
    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of a W&B server of your own; null: W&B's cloud, or WANDB_BASE_URL."""


class Mlflow(Section):
    """MLflow."""

    url: Annotated[str, Field(pattern=_URL, description=_URL_WORDS)] | None = None
    """Address of the MLflow tracking server that the run is shown by; needs shardyard[mlflow].
    null: nothing is sent."""
    experiment: Annotated[str, Field(min_length=1, max_length=500, description="text")] | None = (
        None
    )
    """Experiment that the run is in, made where it is missing; null: the server's default one."""


def services_of(recipe: "Recipe") -> tuple[str, ...]:
    """Names of the services that a run is sent to."""
    observe = recipe.observe
    wanted = {"wandb": observe.wandb.project, "mlflow": observe.mlflow.url}
    return tuple(name for name, setting in wanted.items() if setting is not None)


def exporter_problems(recipe: "Recipe") -> Iterable[Problem]:
    """Settings of a service that nothing is sent to, as the one that asks for it is missing."""
    wandb, mlflow = recipe.observe.wandb, recipe.observe.mlflow
    if wandb.project is None:
        for name, value in (("entity", wandb.entity), ("url", wandb.url)):
            if value is not None:
                text = f"={value} and no observe.wandb.project: nothing is sent. Give the project."
                yield Problem(f"observe.wandb.{name}", text)
    elif any(char in wandb.project for char in "/\\#?%:"):
        text = f"={wandb.project} holds one of / \\ # ? % : which W&B refuses. Leave it out."
        yield Problem("observe.wandb.project", text)
    if mlflow.url is None and mlflow.experiment is not None:
        text = f"={mlflow.experiment} and no observe.mlflow.url: nothing is sent. Give the address."
        yield Problem("observe.mlflow.experiment", text)

"""To which services a run is sent, and what of their settings makes no sense."""

from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem


def services_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the services that a run is sent to."""
    observe = recipe.observe
    wanted = {"wandb": observe.wandb.project, "mlflow": observe.mlflow.url}
    return tuple(name for name, setting in wanted.items() if setting is not None)


def exporter_problems(recipe: Recipe) -> Iterable[Problem]:
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

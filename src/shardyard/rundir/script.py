"""attempts/<n>/script.json: what a training script of the user's own gave to ``shardyard.run``."""

from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.validate import recipe_of
from shardyard.errors import RequestError
from shardyard.io.files import read_json_object, write_json
from shardyard.rundir.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """Facts about an attempt whose training loop is a script's own."""

    name: str
    config: dict[str, Any]
    """Settings of the script, without credentials."""
    tags: dict[str, str]
    observe: dict[str, Any]
    """Sections ``wandb`` and ``mlflow`` of a recipe's ``observe``."""

    def recipe(self) -> Recipe:
        """Return a recipe with the settings that a script shares with one.

        Raises:
            RecipeError: Values out of bounds; all of them.
        """
        return recipe_of({"run": {"name": self.name, "tags": self.tags}, "observe": self.observe})


def write_script(run: RunDir, attempt: int, script: ScriptRequest) -> None:
    """Write attempts/<n>/script.json at once.

    Raises:
        StorageError: The run folder cannot be written.
    """
    write_json(run.script(attempt), asdict(script))


def read_script(run: RunDir, attempt: int) -> ScriptRequest | None:
    """Return what a script gave; None: a recipe made the attempt, or the file is torn."""
    try:
        script = ScriptRequest(**read_json_object(run.script(attempt)))
    except (OSError, ValueError, TypeError):
        return None
    sections = (script.config, script.tags, script.observe)
    is_formed = isinstance(script.name, str) and all(isinstance(each, dict) for each in sections)
    return script if is_formed else None


def latest_script(run: RunDir) -> ScriptRequest | None:
    """Return what the newest attempt's script gave; None: the run is a recipe's."""
    found = (read_script(run, number) for number in reversed(run.attempts()))
    return next((script for script in found if script is not None), None)


def check_has_recipe(run: RunDir, *, verb: str, instead: str) -> None:
    """Raise if a run's loop is a script's own.

    Args:
        verb: What needs a recipe.
        instead: What to do, as a sentence.
    """
    script = latest_script(run)
    if script is not None:
        raise RequestError(
            f"run {run.run_id} is the loop of a script (shardyard.run), and {verb} needs a "
            f"recipe. {instead}"
        )

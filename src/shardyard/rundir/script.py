"""Training scripts of the user's own, as both halves know them.

attempts/<n>/script.json is what a script gave to ``shardyard.run``. ``launch -- SCRIPT`` gives the
nodes of a job a command in a variable, and the script its run's folder in another.
"""

import json
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.config.validate import recipe_of
from shardyard.errors import RequestError
from shardyard.io.files import parse_json, read_json_object, write_json
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


SCRIPT_VARIABLE = "SHARDYARD_SCRIPT"
"""Variable that makes a job's nodes run a script; they then train no recipe."""
RUN_DIR_VARIABLE = "SHARDYARD_RUN_DIR"
"""Variable that gives a launched script the folder of its run."""


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """Script that the nodes of a job run."""

    words: tuple[str, ...]
    """Script and arguments, or ``-m``, module and arguments, as torchrun takes them."""
    processes: int
    """Number of processes on each node."""

    def to_text(self) -> str:
        """Return the text that its nodes are given."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "ScriptCommand":
        """Read ``to_text``.

        Raises:
            RequestError: Another version wrote it.
        """
        try:
            content = parse_json(text)
            words, processes = content["words"], content["processes"]
        except (ValueError, KeyError, TypeError):
            words, processes = (), 0
        is_whole = isinstance(words, list) and all(isinstance(word, str) for word in words)
        if not is_whole or not words or type(processes) is not int or processes < 1:
            raise RequestError(
                f"{SCRIPT_VARIABLE}={text[:100]!r} is not a script of this version of Shardyard. "
                "The command line writes it; if both are not of one version, let the nodes' image "
                "or Python have that of the command line."
            )
        return ScriptCommand(words=tuple(words), processes=processes)


def take_script(environ: MutableMapping[str, str]) -> ScriptCommand | None:
    """Take this node's script out of `environ`; None: it trains a recipe, or measures."""
    text = environ.pop(SCRIPT_VARIABLE, "")
    return ScriptCommand.from_text(text) if text else None


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

"""Reads a manifest that a launch rendered: the recipe is in it, or named by it.

Kubernetes: a ConfigMap of ours holds it. AWS Batch: a variable of the job definition.
Slurm: the script names the file in the run's folder.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from shardyard.errors import RequestError

_VARIABLE = "SHARDYARD_RECIPE"
"""Same name as in ``launchers/aws_batch/requests.py``; a test holds the two together."""


def recipe_in(content: Any) -> str | None:
    """The recipe that a rendered object carries; None: it is no object of ours with a recipe."""
    if not isinstance(content, dict):
        return None
    labels = (content.get("metadata") or {}).get("labels") or {}
    if content.get("kind") == "ConfigMap" and (
        labels.get("app.kubernetes.io/managed-by") == "shardyard"
    ):
        text = (content.get("data") or {}).get("recipe.yaml")
        return text if isinstance(text, str) else None
    return None


def recipe_of_calls(calls: list[Any]) -> str | None:
    """The recipe in the calls that a launch on AWS Batch renders."""
    for call in calls:
        params = call.get("params", {}) if isinstance(call, dict) else {}
        for group in params.get("nodeProperties", {}).get("nodeRangeProperties", []):
            for pair in group.get("container", {}).get("environment", []):
                if pair.get("name") == _VARIABLE:
                    return str(pair.get("value"))
    return None


def recipe_of_script(name: str, text: str) -> str | None:
    """The recipe that a script of ours names; None: it is none of ours.

    Raises:
        RequestError: The file that it names is not to be seen from here.
    """
    if not re.search(r"^#SBATCH --comment=shardyard-run=", text, re.MULTILINE):
        return None
    found = re.search(r"^node=\((.*)\)$", text, re.MULTILINE)
    words = shlex.split(found[1]) if found else []
    file = next((word for word in words if word.endswith(".yaml")), None)
    if file is not None and Path(file).is_file():
        return Path(file).read_text(encoding="utf-8")
    raise RequestError(
        f"{name} was rendered from a recipe and names it without holding it: "
        f"{file or 'launch/recipe.yaml in its run folder'}, which is not to be seen from here. "
        "Use that file itself: it is the recipe."
    )

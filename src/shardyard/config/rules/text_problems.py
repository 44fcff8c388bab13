"""What no text of a recipe may hold, because something that it is handed to would break on it.

Texts become file names, lines of scripts, arguments, variables and YAML. What is refused here is
refused for all of them, so that no launcher needs a rule of its own.
"""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardyard.config.credentials import find_credential, show, without_secrets
from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_remote, why_no_address
from shardyard.errors import Problem

MAPPINGS = frozenset(
    {
        "launch.env", "launch.kubernetes.node_selector", "launch.kubernetes.side_node_selector",
        "launch.slurm.options", "secrets",
    }
)  # fmt: skip
"""Settings whose keys are the user's own names."""

_PROSE = re.compile(r"task\.prompt|launch\.env(\..*)?|launch\.aws_batch\.user_data")
"""Texts that may have several lines; all others are names, paths and addresses."""

PATHS = frozenset(
    {
        "run.dir", "model.path", "model.dir", "model.config", "cluster.file",
        "data.source", "data.mixture.source", "data.eval_source", "data.mixture.eval_source",
        "data.dir", "data.tokenizer",
        "launch.run_dir", "launch.code", "launch.volumes.path", "launch.volumes.host",
        "launch.image_paths", "launch.slurm.python",
    }
)  # fmt: skip

SOURCES = ("data.source", "data.mixture.source", "data.eval_source", "data.mixture.eval_source")
"""Paths that may be addresses of places elsewhere, too."""

_PART_BYTES = 255
"""Of one name in a path: NAME_MAX of Linux's file systems."""

_WHOLE_BYTES = 4096 - 512
"""PATH_MAX of Linux, less what a run's own files add behind it. No other name is as long."""

_INSTEAD_OF_A_URL = {
    "data.tokenizer": "Give a folder that holds tokenizer.json, or a hub name such as owner/name.",
    "model.path": "Give a folder that holds config.json and weights; a repository of the Hugging "
    "Face hub is model.hub: owner/name.",
    "model.hub": "A repository of the Hugging Face hub is written owner/name.",
}
"""Settings that a URL is likely to be tried for -> what can be done today."""

_A_PATH = "Give a path, such as one where it is mounted."

_PLAIN = re.compile(r"[A-Za-z0-9_./-]{1,100}")
"""Names that may stand in the dotted name of a setting in a message."""


def text_problems(recipe: Recipe) -> Iterable[Problem]:
    """Every text that cannot be written, passed on or opened."""
    for setting, text in texts(recipe.model_dump()):
        why = _why_not(setting, text)
        if why:
            yield Problem(setting, f"={show(without_secrets(text))} {why}")


def texts(tree: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Every text with its dotted name: values, and the names that a user made."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if path in MAPPINGS:
                yield path, key
                is_plain = _PLAIN.fullmatch(key) and not find_credential(key)
                yield from texts(value, f"{path}.{key}" if is_plain else path)
            else:
                yield from texts(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from texts(value, path)
    elif isinstance(tree, str):
        yield path, tree


def why_no_path(text: str, instead: str = _A_PATH) -> str | None:
    """Why a text can be no path of this machine; None: it can be one.

    Args:
        instead: What to do now if it is a URL.
    """
    return _why_no_text(text) or _why_no_line(text) or _why_url(text, instead) or _why_no_name(text)


def _why_not(setting: str, text: str) -> str | None:
    if _PROSE.fullmatch(setting):
        return _why_no_text(text)
    if setting in SOURCES and is_remote(text):
        return _why_no_text(text) or _why_no_line(text) or why_no_address(text)
    if setting in PATHS:
        return why_no_path(text, _INSTEAD_OF_A_URL.get(setting, _A_PATH))
    why = _why_no_text(text) or _why_no_line(text)
    if why is None and setting in _INSTEAD_OF_A_URL:
        return _why_url(text, _INSTEAD_OF_A_URL[setting])
    return why


def _why_no_text(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL, which no file name and no variable can. Remove it."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is no Unicode text: half of a character stands alone in it. Write it as UTF-8."
    return None


def _why_no_line(text: str) -> str | None:
    control = next((c for c in text if unicodedata.category(c) == "Cc"), None)
    if control is not None:
        return (
            f"holds the control character {control!r}, which breaks the lines of scripts and logs "
            "that it stands in. Remove it."
        )
    size = len(text.encode())
    if size > _WHOLE_BYTES:
        most = f"{_WHOLE_BYTES:,}"
        return f"has {size:,} bytes, and no path or name has more than {most}. Shorten it."
    return None


def _why_url(text: str, instead: str) -> str | None:
    return f"is a URL, which is not opened here. {instead}" if is_remote(text) else None


def _why_no_name(text: str) -> str | None:
    if not text.strip():
        return "is empty. Write . if the current folder is meant."
    longest = max(text.split("/"), key=lambda part: len(part.encode()))
    if len(longest.encode()) > _PART_BYTES:
        return (
            f"has a name of {len(longest.encode()):,} bytes in it, and file systems take "
            f"{_PART_BYTES}. Shorten it."
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        return "begins with the home folder of a user that is not known here. Write the whole path."
    return None

"""Site files, which lie below every recipe, and the origin of each value that comes from one.

A team keeps in them what is the same for all of its runs: the image, the queue, the bucket. A
setting that names a run or decides what it learns is rejected there, so that two colleagues who
train the same recipe train the same model.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.config.limits import SECTION, Limit, read_limits
from shardyard.config.origins import leaves
from shardyard.config.validate import kind_of, recognized_settings, validate_types
from shardyard.errors import Problem, RequestError, StorageError
from shardyard.io.files import read_user_file
from shardyard.io.yaml import key_lines, read_yaml

VARIABLE = "SHARDYARD_SITE"
"""Environment variable with a site file that wins over the others, or ``none``: read no file."""
NO_FILE = "none"
_MACHINE = Path("/etc/shardyard.yaml")
_USER = Path(".config/shardyard.yaml")
_MOST_BYTES = 2**20

SITE_SECTIONS = ("cluster", "launch", "observe", "secrets", "elastic", "checkpoint", "memory")
"""Sections that a site file may hold: about how and where a run runs."""
SITE_SETTINGS = ("run.dir", "run.tags", "model.dir", "data.workers", "data.prefetch_steps")
"""Settings of other sections that a site file may hold."""
_NOT_OF_A_SITE = ("cluster.nodes", "cluster.devices")
"""Settings that decide the batch where ``optim.batch_per_device`` is given."""


@dataclass(kw_only=True)
class Site:
    """Content of all site files, later ones above earlier ones."""

    files: list[Path] = field(default_factory=list)
    """Files that were read."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Sections with settings."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted setting, or key of one that is a mapping -> file and line."""
    limits: list[Limit] = field(default_factory=list)
    """Limits of all files."""
    problems: list[Problem] = field(default_factory=list)


def site_files() -> list[Path]:
    """Return the site files that exist, the winning one last.

    Raises:
        RequestError: The file that ``SHARDYARD_SITE`` names does not exist.
    """
    named = os.environ.get(VARIABLE, "")
    if named == NO_FILE:
        return []
    found = [_MACHINE]
    with suppress(RuntimeError):  # a user without a home
        found.append(Path.home() / _USER)
    found = [file for file in found if os.path.lexists(file)]
    if named:
        file = Path(named).expanduser()
        if not file.exists():
            raise RequestError(
                f"{VARIABLE}={named} does not exist. Name a YAML file of settings, or set "
                f"{VARIABLE}={NO_FILE} to read no site file."
            )
        found.append(file)
    return found


def read_site() -> Site:
    """Read and check all site files.

    Raises:
        RequestError: One cannot be read or is no YAML mapping.
    """
    site = Site()
    for file in site_files():
        _add(site, file)
        site.files.append(file)
    return site


def _add(site: Site, file: Path) -> None:
    text, content = _read(file)
    lines = key_lines(text)
    errors: list[Problem] = []
    if SECTION in content:
        given = content.pop(SECTION)
        limits, errors = read_limits(given, lambda name: _location(file, lines, name))
        site.limits += limits
    tree = recognized_settings(content, errors)
    for name in list(leaves(tree)):
        if not may_be_of_site(name):
            errors.append(Problem(name, _not_of_a_site()))
            _drop(tree, name)
    errors += validate_types(tree)[1]
    site.problems += [
        Problem(problem.path, f"{problem.text} ({_location(file, lines, problem.path)})")
        for problem in errors
    ]
    for name in leaves(tree):
        for hidden in [one for one in site.origins if one.startswith(f"{name}.")]:
            del site.origins[hidden]
        site.origins[name] = _location(file, lines, name)
    _put_over(site.settings, tree)


def may_be_of_site(name: str) -> bool:
    """Whether a site file may hold a setting, or a key of one that is a mapping."""
    if name in _NOT_OF_A_SITE:
        return False
    is_of_setting = any(name == one or name.startswith(f"{one}.") for one in SITE_SETTINGS)
    return name.partition(".")[0] in SITE_SECTIONS or is_of_setting


def _put_over(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _put_over(into[key], value)
        else:
            into[key] = value


def _drop(tree: dict[str, Any], name: str) -> None:
    *above, key = name.split(".")
    for section in above:
        tree = tree[section]
    del tree[key]


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = read_user_file(file, limit_bytes=_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError, StorageError) as error:
        raise RequestError(
            f"site file {file} cannot be read: {error}. Make it a readable YAML file, or set "
            f"{VARIABLE}={NO_FILE} to read no site file."
        ) from error
    content = read_yaml(text, source=f"site file {file}")
    if not isinstance(content, dict | None):
        raise RequestError(
            f"site file {file} holds {kind_of(content)} at the top, not sections. Write sections "
            "with settings, such as `launch: {image: NAME}`."
        )
    return text, content or {}


def _location(file: Path, lines: Mapping[str, int], name: str) -> str:
    """File and line of a setting; the line of its section where its own is not known."""
    shown = str(file)
    with suppress(RuntimeError, ValueError):
        shown = f"~/{file.relative_to(Path.home())}"
    path = name.partition("[")[0]
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return f"{shown}, line {lines[path]}" if path else shown


def _not_of_a_site() -> str:
    return (
        "is not allowed in a site file: it names a run or decides what it learns, so two "
        "colleagues would train different models by one recipe. Move it to the recipe."
    )

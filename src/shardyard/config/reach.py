"""Paths that the system cannot follow: told by the name of the setting, before anything opens one.

That nothing is there yet is no such problem: whoever needs a file says so in its own words.
"""

import glob
import os
from pathlib import Path

from shardyard.config.schema import Data, Recipe
from shardyard.errors import Problem

_NO_PATH = Data().source
"""python-stdlib, which is a name."""


def reach_problems(recipe: Recipe) -> list[Problem]:
    """Every path of this machine in a recipe that cannot be followed."""
    data = recipe.data
    sources = (data.source,) if isinstance(data.source, str) else data.source
    places = [
        ("run.dir", recipe.run.dir),
        ("model.path", recipe.model.path),
        ("data.dir", data.dir),
        *(("data.source", _fixed_part(entry)) for entry in sources if entry != _NO_PATH),
    ]
    if data.tokenizer.startswith(("/", ".", "~")):  # else a hub name, or a word
        places.append(("data.tokenizer", data.tokenizer))
    return [
        Problem(setting, f"={place} {why}")
        for setting, place in places
        if place is not None and (why := why_not_reached(place)) is not None
    ]


def why_not_reached(place: str) -> str | None:
    """Why the system cannot follow a path; None: it can, or nothing is there."""
    path = Path(place).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        file = next((above for above in path.parents if _is_file(above)), path)
        return f"leads through {file}, which is a file and no folder. Mend the path."
    except PermissionError:
        return (
            "cannot be looked at: this user may not enter a folder above it. Take another place, "
            "or let its owner give you access."
        )
    except OSError as error:
        return f"cannot be followed: {error.strerror}. Mend the path, or what it leads to."
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _fixed_part(entry: str) -> str:
    """A path up to its first wildcard."""
    if not glob.has_magic(entry) or os.path.lexists(Path(entry).expanduser()):
        return entry
    fixed = []
    for part in Path(entry).parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return str(Path(*fixed)) if fixed else "."

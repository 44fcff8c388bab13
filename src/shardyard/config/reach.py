"""Paths that the system cannot follow: told by the name of the setting, before anything opens one.

That nothing is there yet is no such problem: whoever needs a file says so in its own words.
"""

from pathlib import Path

from shardyard.config.schema.recipe import Recipe
from shardyard.config.sight import Sight, fixed_part
from shardyard.config.sources import is_name, is_remote
from shardyard.errors import Problem


def reach_problems(recipe: Recipe, sight: Sight | None = None) -> list[Problem]:
    """Every path of this machine in a recipe that cannot be followed.

    Args:
        sight: What the nodes see that open the paths; None: this machine opens them.
    """
    data, config = recipe.data, recipe.model.config
    ours = [("run.dir", recipe.run.dir), *([("model.config", config)] if config else [])]
    places = [
        ("model.path", recipe.model.path),
        ("model.dir", recipe.model.dir),
        ("data.dir", data.dir),
        *(
            (setting, fixed_part(entry))
            for setting, entry in data.entries
            if not is_name(entry) and not is_remote(entry)
        ),
    ]
    if data.tokenizer.startswith(("/", ".", "~")):  # else a hub name, or a word
        places.append(("data.tokenizer", data.tokenizer))
    if sight is not None:
        is_ours = sight.sees_this_machine
        places = [(name, at) for name, at in places if is_ours and not sight.holds(at or "")]
    return [
        Problem(setting, f"={place} {why}")
        for setting, place in [*ours, *places]
        if isinstance(place, str) and (why := why_not_reached(place)) is not None
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

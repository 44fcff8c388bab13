"""What a process's environment can hold: names and values of `launch.env`, names of `secrets`.

The same for all launchers, so that a recipe that one of them takes is not another one's surprise.
"""

import re
from collections.abc import Iterable

from shardyard.config.credentials import HIDDEN, find_credential, is_hex_key, show
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secret_reference import is_variable
from shardyard.errors import Problem

LONGEST_BYTES = 128 * 1024 - 1
"""Of NAME=VALUE: Linux starts no program with a longer one (MAX_ARG_STRLEN, execve(2))."""

_TAKEN = re.compile(
    r"(?:SHARDYARD|PET|SLURM|SLURMD|AWS_BATCH)_.*"
    r"|AWS_BATCH.*"  # as Batch itself refuses them
    r"|JOB_COMPLETION_INDEX|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
"""Variables with which schedulers, torch and we say where a process stands among the others."""

_NAMES_A_COMMIT = re.compile(
    r"(?:^|_)(?:GIT|COMMIT|SHA1?|REV|REVISION|REF|HASH|DIGEST|CHECKSUM|VERSION|BUILD|TAG|ETAG)(?:_|$)",
    re.IGNORECASE,
)


def environment_problems(recipe: Recipe) -> Iterable[Problem]:
    """Every variable that no process can be given, or whose name says that it is a secret."""
    for name, value in recipe.launch.env.items():
        yield from _name_problems("launch.env", name)
        size = len(f"{name}={value}".encode(errors="replace"))
        if size > LONGEST_BYTES:
            text = (
                f"has {size:,} bytes, and Linux starts no process with a variable of more than "
                f"{LONGEST_BYTES:,}. Put the content into a file, and its path here."
            )
            yield Problem(f"launch.env.{name}" if is_variable(name) else "launch.env", text)
        is_called_so = is_variable(name) and is_called_a_secret(name, value)
        if is_called_so and not find_credential(value):
            text = (
                f"has the name of a secret {HIDDEN}, and this section is copied into run folders "
                f"and jobs. Say where the secret is kept instead: `secrets: {{{name}: env}}`."
            )
            yield Problem(f"launch.env.{name}", text)
        if is_hex_key(value) and is_variable(name) and not _NAMES_A_COMMIT.search(name):
            text = (
                f"holds 40 hexadecimal digits {HIDDEN}, as a W&B key does, and this section is "
                "copied into run folders and jobs. Say where the key is kept instead: `secrets: "
                f"{{{name}: env}}`. If it is a commit or a digest, say so in the name, such as "
                f"{name}_COMMIT."
            )
            yield Problem(f"launch.env.{name}", text)
    for name in recipe.secrets:
        yield from _name_problems("secrets", name)


def _name_problems(section: str, name: str) -> Iterable[Problem]:
    if not is_variable(name):
        text = (
            f"{show(name)} is no name of an environment variable. Use letters, digits and "
            "underscores, and begin with no digit, such as HF_HOME."
        )
        yield Problem(section, text)
    elif _TAKEN.fullmatch(name):
        text = (
            "is set by the scheduler or by shardyard: it says where a process stands among the "
            "others, or how it reports. Remove it; a number of nodes is cluster.nodes."
        )
        yield Problem(f"{section}.{name}", text)

"""Propose a job whose nodes run a script of the user's own: `shardyard launch -- python SCRIPT`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardyard.config.load import Source, is_override
from shardyard.config.resolved import flatten
from shardyard.config.schema.base import NAME
from shardyard.config.secrets import find_credential
from shardyard.control.request import Request
from shardyard.control.submission import (
    Proposal,
    check_run_is_new,
    propose,
    with_machines,
)
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.io.yaml import read_yaml
from shardyard.launchers.base import Launcher
from shardyard.rundir.layout import RunDir, new_run_id

_SETTINGS = (
    "run.id", "run.dir", "run.name", "run.tags", "cluster", "launch", "secrets",
    "elastic.max_restarts", "elastic.drain_timeout_s",
)  # fmt: skip
"""Settings of a job; a script decides all others itself."""
_NO_TRAINING: dict[str, Any] = {
    "run": {"steps": 1},
    "model": {"preset": "llama-laptop"},
    "data": {"source": "python-stdlib"},
    "optim": {"batch_per_device": 1},
}
"""Sections that each recipe needs, and that the nodes of a script do not read."""
_PYTHON = re.compile(r"python([0-9.]*)", re.ASCII)


def script_proposal(
    words: Sequence[Source],
    command: Sequence[str],
    launcher: Launcher,
    *,
    is_dry_run: bool = False,
) -> Proposal:
    """Return what would be submitted for a script, without creating anything.

    Args:
        words: Files and overrides with settings of the job.
        command: ``python script.py ARGUMENTS``, or ``python -m module ARGUMENTS``.

    Raises:
        RequestError: It cannot be launched there as it is.
    """
    script = _script_words(command)
    check_script_settings(words)
    named = {**_NO_TRAINING, "run": {**_NO_TRAINING["run"], "name": _name_of(script)}}
    request = Request.read(
        with_machines([named, *words], launcher),
        needs_weights=False,
        only_looks=True,
        sees=launcher.node_paths,
    )
    run, limit = request.recipe.run, request.recipe.launch.max_usd
    if limit is not None:
        raise RequestError(
            f"launch.max_usd={limit:g} needs a known number of steps, and a script's is not known. "
            "Set launch.max_usd=null, and launch.time_limit, which ends the job."
        )
    run_id = run.id or new_run_id(str(run.name))
    run_dir = RunDir(Path(run.dir).expanduser().resolve() / run_id)
    check_run_is_new(run_dir)
    return propose(request, launcher, run_dir=run_dir, is_dry_run=is_dry_run, script=script)


def _script_words(command: Sequence[str]) -> tuple[str, ...]:
    """The words for torchrun, which starts Python itself.

    Raises:
        RequestError: It is no Python program, or holds a credential.
    """
    words = tuple(command)
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        words = words[1:]
    is_module = words[:1] == ("-m",) and len(words) > 1
    if not is_module and not (words and words[0].endswith(".py")):
        raise RequestError(
            f"launch -- {' '.join(command)}: give a Python script with its arguments, such as "
            "`-- python train.py --lr 0.1`, or `-- python -m package.train`. Each process of a "
            "node runs it, as with torchrun."
        )
    for word in words:
        if (kind := find_credential(word)) is not None:
            raise RequestError(
                f"an argument of the script holds {kind}, which others can read in the process "
                "list and the ledger. Name it in secrets, such as secrets.HF_TOKEN=env, and let "
                "the script read the variable."
            )
    return words


def _name_of(script: Sequence[str]) -> str:
    """First part of the run's id: the script's name, as far as it is one."""
    stem = script[1].rpartition(".")[2] if script[0] == "-m" else Path(script[0]).stem
    near = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:40].strip("-")
    return near if re.fullmatch(NAME, near) else "script"


def check_script_settings(words: Sequence[Source]) -> None:
    """Check the settings of a job whose nodes run a script.

    Raises:
        RecipeError: Settings that a script decides itself; all of them.
    """
    wrong = [
        Problem(name, "is not used: the script decides it. Leave it out, or give it to the script.")
        for name in dict.fromkeys(_names_in(words))
        if not any(name == known or name.startswith(f"{known}.") for known in _SETTINGS)
    ]
    if wrong:
        raise RecipeError(wrong, "launch of a script")


def _names_in(words: Sequence[Source]) -> Iterator[str]:
    for word in words:
        if isinstance(word, str) and is_override(word):
            yield word.partition("=")[0]
        elif isinstance(word, Mapping):
            yield from flatten(dict(word))
        elif isinstance(word, str | Path):
            with suppress(OSError):  # the recipe's own check says why
                content = read_yaml(Path(word).read_text(), source=str(word))
                yield from flatten(content if isinstance(content, dict) else {})

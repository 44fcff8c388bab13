"""Whether nodes may fetch what a recipe names on the Hugging Face hub: asked before a submission.

Without it a gated model is found out on the nodes, after they are paid for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from shardyard.config.paths import NodePaths, is_tokenizer_path
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tokenizer_kinds import TOKENIZER_WORDS
from shardyard.launchers.base import Launcher
from shardyard.launchers.secrets import store_commands

TOKEN = "HF_TOKEN"
"""The variable that hub libraries read it from."""

_TIMEOUT_S = 3.0


def access_errors(recipe: Recipe, launcher: Launcher) -> list[str]:
    """Return a sentence for each repository that the hub would deny the nodes; asks the hub.

    A repository without an answer has no sentence: what nodes can reach is not known here.
    """
    if TOKEN in recipe.secrets or _is_logged_in(launcher, launcher.node_paths(recipe)):
        return []
    return [
        f"{setting}={name} is {why} on the Hugging Face hub, and secrets.{TOKEN} is not set: the "
        f"nodes of {launcher.name} could not fetch it. Accept its terms on its page, then keep "
        f"your token where they can read it:\n{_ways(recipe, launcher)}\nIf it lies in the nodes' "
        "store already, --force submits it all the same."
        for setting, name in _repositories(recipe)
        if (why := _access_restriction(name)) is not None
    ]


def _repositories(recipe: Recipe) -> Iterator[tuple[str, str]]:
    tokenizer = recipe.data.tokenizer
    if recipe.model.hub is not None:
        yield "model.hub", recipe.model.hub
    if tokenizer not in (*TOKENIZER_WORDS, recipe.model.hub) and not is_tokenizer_path(tokenizer):
        yield "data.tokenizer", tokenizer


def _is_logged_in(launcher: Launcher, node_paths: NodePaths) -> bool:
    """Whether nodes have a token of this user: in their environment, or from `hf auth login`."""
    from huggingface_hub import constants, get_token

    if launcher.capabilities.is_this_machine:
        return bool(get_token())
    token = os.environ.get("HF_TOKEN_PATH") or constants.HF_TOKEN_PATH
    return node_paths.shares_filesystem and Path(token).is_file()


def _access_restriction(name: str) -> str | None:
    """Why the hub shows a repository to some only; None: to all, or it gave no answer."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = HfApi().model_info(name, timeout=_TIMEOUT_S)
    except errors.GatedRepoError:
        return "gated"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return "private, or not there at all,"
    except Exception:  # noqa: BLE001 (of requests or of httpx, as the library's version has it)
        return None
    return "gated" if info.gated else "private" if info.private else None


def _ways(recipe: Recipe, launcher: Launcher) -> str:
    found = store_commands(TOKEN, launcher.capabilities.secrets, recipe.launch)
    return "\n".join(f"  {line}\n  and secrets.{TOKEN}={reference}" for line, reference in found)

"""Packages that only some sources need: imported on first use, with how to install them."""

from importlib import import_module
from typing import Any

from shardyard.errors import RequestError


def extra(name: str, *modules: str, what: str) -> Any:
    """The first of some modules that is there.

    Args:
        name: Of the extra in pyproject.toml that brings it.
        what: What needs it, to begin a sentence.

    Raises:
        RequestError: None is there; says how to install one.
    """
    for module in modules:
        try:
            return import_module(module)
        except ImportError as error:
            why = error
    raise RequestError(
        f"{what} is read with {modules[-1].partition('.')[0]}, which is not installed ({why}). "
        f"Install it: pip install 'shardyard[{name}]'"
    ) from why

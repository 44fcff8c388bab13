"""Secrets among the variables of a process, which its children get only if they use them.

Any process of the same user can read what a program was started with
(``/proc/PID/environ``). So can core dumps and every program that it starts in turn.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secrets import find_credential


def secret_variables(environ: Mapping[str, str], *, named: Collection[str] = ()) -> dict[str, str]:
    """Variables that hold a secret, by their names or values.

    Args:
        named: Those that a recipe lists under ``secrets``.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in named or is_called_a_secret(name, value) or find_credential(value)
    }


def without_secrets(environ: Mapping[str, str], *, named: Collection[str] = ()) -> dict[str, str]:
    """All variables but those."""
    hidden = secret_variables(environ, named=named)
    return {name: value for name, value in environ.items() if name not in hidden}


@contextmanager
def withheld(
    environ: MutableMapping[str, str], *, named: Collection[str] = ()
) -> Iterator[dict[str, str]]:
    """Take secrets out of an environment while the block starts children; gives what they are."""
    hidden = secret_variables(environ, named=named)
    for name in hidden:
        del environ[name]
    try:
        yield hidden
    finally:
        environ.update(hidden)

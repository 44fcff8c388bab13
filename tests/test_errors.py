"""The drawing at the top of errors.py is the tree of classes, with the exit codes they have.

Schedulers restart by these numbers, and scripts of users read them.
"""

import re

from shardyard import errors
from shardyard.errors import ShardyardError


def drawn() -> dict[str, tuple[str, int]]:
    """Class -> the one above it, and its exit code."""
    found: dict[str, tuple[str, int]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if entry := re.match(r"    ([│├└─ ]*)(\w+Error) +(?:exit code )?(\d+):", line):
            depth = len(entry[1]) // 4
            above[depth:] = [entry[2]]
            found[entry[2]] = (above[depth - 1] if depth else "Exception", int(entry[3]))
    return found


def test_the_drawing_names_every_error_with_its_parent_and_exit_code() -> None:
    classes: list[type[ShardyardError]] = [ShardyardError]
    for each in classes:
        classes += [kind for kind in each.__subclasses__() if kind.__module__ == errors.__name__]
    assert drawn() == {
        each.__name__: (each.__bases__[0].__name__, each.exit_code) for each in classes
    }


def test_exit_codes_are_those_that_schedulers_and_scripts_were_told() -> None:
    codes = {each.exit_code for each in ShardyardError.__subclasses__()}
    assert codes | {ShardyardError.exit_code, errors.EXIT_INTERRUPTED, errors.EXIT_DRAINED} == {
        1,
        2,
        3,
        4,
        75,
        130,
        143,
    }
    assert errors.LostNodeError.exit_code == 75
    assert (errors.EXIT_INTERRUPTED, errors.EXIT_DRAINED) == (130, 143)

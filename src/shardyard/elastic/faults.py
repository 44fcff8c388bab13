"""Faults for drills: NaN in a gradient or a weight at a step, as a broken device would make it.

``SHARDYARD_FAULTS=gradient@7,gradient@30,weight@12`` in the environment of the command that starts
the processes. Each of them says so in its log. Nothing else of Shardyard sets the variable.
"""

import re
import sys
from collections.abc import Mapping

from shardyard.errors import RequestError
from shardyard.train.hooks import Faults

VARIABLE = "SHARDYARD_FAULTS"

_FAULT = re.compile(r"(gradient|weight)@([1-9]\d{0,8})", re.ASCII)


def read_faults(environment: Mapping[str, str]) -> Faults:
    """The faults that the environment asks for: none, except in a drill.

    Raises:
        RequestError: The variable is not of the form above.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return Faults()
    asked = [_FAULT.fullmatch(part) for part in text.split(",")]
    if not all(asked):
        raise RequestError(
            f"{VARIABLE}={text!r} is no list of faults for a drill. It reads gradient@STEP and "
            "weight@STEP, joined by commas. Unset it for a real run."
        )
    steps: dict[str, set[int]] = {"gradient": set(), "weight": set()}
    for fault in asked:
        assert fault is not None
        steps[fault[1]].add(int(fault[2]))
    print(f"{VARIABLE}={text}: a drill; NaN is put in at these steps", file=sys.stderr)
    return Faults(frozenset(steps["gradient"]), frozenset(steps["weight"]))

"""Where two runs of a drill differ, bit for bit, asked of the half that can read tensors."""

import subprocess
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shardyard.errors import ShardyardError
from shardyard.io.files import parse_json
from shardyard.python_program import python_program
from shardyard.rundir.layout import RunDir

Outcome = Literal["equal", "different", "not proven"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_MODULE = "shardyard.checkpoint.bitwise_compare"


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What two runs are to each other; the fields are those of the program's answer."""

    outcome: Outcome
    why: str
    step: int | None = None
    """The first that differs."""
    tensor: str | None = None
    """The first that differs in the checkpoint of that step, or in the first one after it."""
    rank: int | None = None
    """Who wrote its first element that differs."""


def compare_bits(twin: RunDir, run: RunDir) -> Bits:
    """Compare all steps and checkpoints that two runs both have.

    Raises:
        ShardyardError: A checkpoint cannot be read.
    """
    program = python_program(_MODULE, str(twin.path), str(run.path))
    answer = subprocess.run(
        program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        told: dict[str, Any] = parse_json(answer.stdout)
    except ValueError as error:
        raise ShardyardError(
            f"{twin.path} and {run.path} cannot be compared: {answer.stderr.strip()[-300:]}"
        ) from error
    return Bits(**told)

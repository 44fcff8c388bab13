"""What devices this machine has, asked in a process of its own.

The question needs torch, which the control half never imports; the answer is one line of JSON.
"""

import subprocess
import sys
from collections.abc import Sequence

from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine
from shardyard.io.files import parse_json
from shardyard.python_program import python_program

_PROGRAM = python_program("shardyard.parallel.device")
_TIMEOUT_S = 180.0
"""A cold file system can take a minute to import torch."""


def probe(program: Sequence[str] = _PROGRAM) -> Machine:
    """Describe this machine's devices.

    Args:
        program: What prints the description.

    Raises:
        RequestError: torch cannot be imported, or its accelerator does not answer.
    """
    try:
        answer = subprocess.run(
            program, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return Machine(**parse_json(answer.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise _failed(f"gave no answer in {_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no output"]
        raise _failed(f"failed with exit code {error.returncode}: {lines[-1]}") from error
    except (ValueError, TypeError, IndexError) as error:
        raise _failed("gave an answer that is no description of devices") from error


def _failed(what: str) -> RequestError:
    return RequestError(
        f"the look at this machine's devices {what}. Nothing can be trained before torch and the "
        f"device driver work. See for yourself with `{sys.executable} -m "
        "shardyard.parallel.device`."
    )

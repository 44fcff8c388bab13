"""Allocation of a rank, measured with the real model on fake devices, in a process of its own.

The process needs torch, which the control half never imports. It answers with one line of
JSON, after a line for each phase (`train/dry_run.py`). It is slower than
``planner/memory.py`` by a factor of a hundred thousand, and serves to check that module.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Event, Timer
from typing import Any

from shardyard.config.layout import Layout
from shardyard.config.rules.check import check_trainable
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem, RecipeError, RequestError, ShardyardError
from shardyard.families.shape import ModelShape
from shardyard.io.files import parse_json
from shardyard.own_processes import python_program

_PROGRAM = python_program("shardyard.train.dry_run")
_TIMEOUT_S = 900.0
"""A block takes about 0.1 s: the deepest models need a minute, on a busy machine several."""


OnPhase = Callable[[str, int, int], None]
"""Callback for each phase as it begins.

Its arguments are the name, the number of earlier phases, and the total; 0: not known yet.
"""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """When a phase of the step holds most."""

    phase: str
    """forward (until the first logits), loss, backward or optimizer step."""
    micro_batch: int
    """From 1; 0 in the optimizer step."""
    operator: str
    """Operator that allocated last, by torch's name."""
    bytes: int
    terms: dict[str, int]
    """Bytes by what they are for; they add up to ``bytes``. Every term is there, some are 0:
    parameters, gradients, optimizer, gathered parameters, unreduced gradients, activations, logits
    and loss, temporary (`internals/dry-run.md`)."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Memory of rank 0's tensors in a step, as the CUDA caching allocator rounds them."""

    moments: tuple[PhasePeak, ...]
    """In the order of the step."""
    attention: str
    """``flash``, or ``unfused`` where the matrix of scores is written to memory."""
    micro_batches: int
    """Micro-batches that were run: those after the second allocate what the second did."""
    seconds: float
    """Duration of the dry run, without the start of its process."""
    torch: str
    """Version."""

    @property
    def peak(self) -> PhasePeak:
        """When the step holds most: the allocated peak."""
        return max(self.moments, key=lambda entry: entry.bytes)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "DryRun":
        """The answer of the program as a value."""
        moments = tuple(PhasePeak(**moment) for moment in content["moments"])
        return DryRun(**{**content, "moments": moments})


def dry_run(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    *,
    on_phase: OnPhase | None = None,
    program: Sequence[str] = _PROGRAM,
) -> DryRun:
    """Take one step of the real model without devices: what rank 0 allocates, which holds most.

    Args:
        recipe: Without any ``auto`` in data, optim, precision and memory.
        layout: Wins over the degrees in ``recipe.parallel``.
        on_phase: None: progress is not reported.
        program: Command that answers.

    Raises:
        RecipeError: The training half cannot build this model or layout yet.
        ShardyardError: The process failed.
    """
    _check_dry_run_supported(recipe, layout)
    request = {
        "recipe": recipe.model_dump(mode="json"),
        "shape": shape.to_dict(),
        "layout": asdict(layout),
    }
    output = _output(program, json.dumps(request), on_phase or _untold)
    try:
        return DryRun.from_json(parse_json(output))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _failed("did not answer with a description of memory") from error


def _untold(_phase: str, _done: int, _of: int) -> None:
    pass


def _output(program: Sequence[str], request: str, on_phase: OnPhase) -> str:
    """Return the last line that the program prints; lines of phases are reported as they come."""
    on_phase("starting torch", 0, 0)
    last, is_late = "", Event()
    # Files, not pipes: stderr is read at the end only, and a full pipe would block the program.
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as said:
        asked.write(request)
        asked.seek(0)
        with subprocess.Popen(
            program, stdin=asked, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:

            def end() -> None:
                is_late.set()
                process.kill()

            limit = Timer(_TIMEOUT_S, end)
            limit.start()
            try:
                assert process.stdout is not None  # it was asked for
                for line in process.stdout:
                    if (phase := _phase(line)) is None:
                        last = line
                    else:
                        on_phase(*phase)
            # Popen's exit ends no process: without this the program would outlive a Ctrl-C.
            except BaseException:  # Ctrl-C
                process.kill()
                raise
            finally:
                limit.cancel()
        said.seek(0)
        words = said.read().strip()
    # A killed process has an exit code too, so the time limit is checked before it.
    if is_late.is_set():
        raise _failed(f"gave no answer in {_TIMEOUT_S:.0f} s")
    # The training half rejected the recipe, with a message written for the user: pass it on.
    if process.returncode == RequestError.exit_code and words:
        raise RequestError(words)
    if process.returncode:
        end_line = (words.splitlines() or ["no output"])[-1]
        raise _failed(f"failed with exit code {process.returncode}: {end_line}")
    return last


def _phase(line: str) -> tuple[str, int, int] | None:
    """Read the phase that a line announces. None if it is another line."""
    try:
        content = parse_json(line)
        return content["phase"], content["done"], content["of"]
    except (ValueError, TypeError, KeyError):
        return None


def _check_dry_run_supported(recipe: Recipe, layout: Layout) -> None:
    degrees = {axis: getattr(layout, axis) for axis in ("cp", "tp", "pp", "ep")}
    # The layout wins over the recipe's degrees, so the check has to see the layout's.
    parallel = recipe.parallel.model_copy(update=degrees)
    found = check_trainable(recipe.model_copy(update={"parallel": parallel}))
    if layout.pp > 1:
        text = (
            f"={layout.pp}: a stage waits for other ranks, and fake devices have no other ranks. "
            "Use 1 for a dry run, with as many blocks as a stage has."
        )
        found.append(Problem("parallel.pp", text))
    if recipe.memory.offload != "none":
        text = f"={recipe.memory.offload}: fake devices have one memory. Use none for a dry run."
        found.append(Problem("memory.offload", text))
    if recipe.model.compile is True:
        text = "=true: what a compiler fuses is not seen on fake devices. Use false for a dry run."
        found.append(Problem("model.compile", text))
    if found:
        hint = "A dry run builds the real model; without it everything here can be planned."
        raise RecipeError(found, "the dry run", hint=hint)


def _failed(what: str) -> ShardyardError:
    return ShardyardError(
        f"the dry run of the model {what}. Its memory is unknown; the plan is valid without it. "
        f"Check that torch and transformers work with `{sys.executable} -m "
        "shardyard.parallel.device`, then try again."
    )

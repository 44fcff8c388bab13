"""What a rank would allocate, asked of the real model on fake devices, in a process of its own.

The question needs torch, which the control half never imports; the answer is one line of JSON
(`train/dry_run.py`). It is slower than ``planner/memory.py`` by a factor of a hundred thousand, and
what that is checked against.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.layout import Layout
from shardyard.config.schema import Recipe
from shardyard.config.trainable import trainable_problems
from shardyard.errors import Problem, RecipeError, RequestError, ShardyardError
from shardyard.families.shape import ModelShape

_PROGRAM = (sys.executable, "-m", "shardyard.train.dry_run")
_TIMEOUT_S = 900.0
"""A block takes about 0.1 s: the deepest models need a minute, on a busy machine several."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a phase of the step holds most."""

    phase: str
    """forward (until the first logits), loss, backward or optimizer step."""
    micro_batch: int
    """From 1; 0 in the optimizer step."""
    operator: str
    """That allocated last, by torch's name."""
    bytes: int
    terms: dict[str, int]
    """Bytes by what they are for; they add up to ``bytes``. Every term is there, some are 0:
    parameters, gradients, optimizer, gathered parameters, unreduced gradients, activations, logits
    and loss, temporary (`docs/design/dry-run.md`)."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What the tensors of rank 0 take in a step, as the CUDA caching allocator rounds them."""

    moments: tuple[Moment, ...]
    """In the order of the step."""
    attention: str
    """``flash``, or ``unfused`` where the matrix of scores is written to memory."""
    micro_batches: int
    """How many were run: those after the second allocate what the second did."""
    seconds: float
    """That it took, without the start of its process."""
    torch: str
    """Version."""

    @property
    def peak(self) -> Moment:
        """When the step holds most: the allocated peak."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "DryRun":
        """The answer of the program as a value."""
        moments = tuple(Moment(**moment) for moment in content["moments"])
        return DryRun(**{**content, "moments": moments})


def dry_run(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    *,
    program: Sequence[str] = _PROGRAM,
) -> DryRun:
    """Take one step of the real model without devices: what rank 0 allocates, which holds most.

    Args:
        recipe: Without any ``auto`` in data, optim, precision and memory.
        layout: Wins over the degrees in ``recipe.parallel``.
        program: What answers.

    Raises:
        RecipeError: The training half cannot build this model or layout yet.
        ShardyardError: The process failed.
    """
    _refuse_untrainable(recipe, layout)
    request = {
        "recipe": recipe.model_dump(mode="json"),
        "shape": shape.to_dict(),
        "layout": asdict(layout),
    }
    try:
        answer = subprocess.run(
            program,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return DryRun.from_json(json.loads(answer.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise _failed(f"gave no answer in {_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        if error.returncode == RequestError.exit_code and error.stderr.strip():
            raise RequestError(error.stderr.strip()) from error
        lines = error.stderr.strip().splitlines() or ["no output"]
        raise _failed(f"failed with exit code {error.returncode}: {lines[-1]}") from error
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _failed("gave an answer that is no description of memory") from error


def _refuse_untrainable(recipe: Recipe, layout: Layout) -> None:
    degrees = {axis: getattr(layout, axis) for axis in ("cp", "tp", "pp", "ep")}
    parallel = recipe.parallel.model_copy(update=degrees)
    found = trainable_problems(recipe.model_copy(update={"parallel": parallel}))
    if layout.pp > 1:
        text = (
            f"={layout.pp}: a stage waits for what other ranks send, and on fake devices there are "
            "none. Use 1 for a dry run, with as many blocks as a stage has."
        )
        found.append(Problem("parallel.pp", text))
    if recipe.memory.offload != "none":
        text = f"={recipe.memory.offload}: fake devices have one memory. Use none for a dry run."
        found.append(Problem("memory.offload", text))
    if recipe.model.compile:
        text = "=true: what a compiler fuses is not seen on fake devices. Use false for a dry run."
        found.append(Problem("model.compile", text))
    if found:
        hint = "A dry run builds the real model; without it everything here can be planned."
        raise RecipeError(found, "the dry run", hint=hint)


def _failed(what: str) -> ShardyardError:
    return ShardyardError(
        f"the dry run of the model {what}. What it holds is unknown; the plan does not need it and "
        "stands without. See that torch and transformers work with "
        f"`{sys.executable} -m shardyard.parallel.device`, then try again."
    )

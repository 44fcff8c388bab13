"""Settings that contradict ``precision.reduce=exact``: it promises every bit, on any ranks.

Settings not listed here are tested for it (``tests/distributed/test_exact.py``).
"""

from collections.abc import Iterable

from shardyard.config.formulas import first_batch
from shardyard.config.optimizers import OPTIMIZERS, optimizer_of
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Optim, Recipe
from shardyard.config.tasks import TASKS, task_row
from shardyard.errors import Problem, RecipeError

BY_EXACT = "precision.reduce=exact adds up micro-batches, so that others are rounded otherwise"

MOST_MICRO_BATCHES = 2**20
"""Summands of a step: each doubling costs all of them a bit (parallel/reproducible_sums.py)."""


def check_reproducible(recipe: Recipe) -> Iterable[Problem]:
    """Every one, with what to use instead."""
    if recipe.precision.reduce != "exact":
        return
    for path, value, is_wrong, why, remedy in _rules(recipe):
        if is_wrong:
            text = f"={value} with precision.reduce=exact: {why}. {remedy}, or reduce=fp32."
            yield Problem(path, text)


def require_reproducible(resolved: Resolved) -> None:
    """Check again, when no setting is ``auto`` and the model is known.

    Raises:
        RecipeError: A bit of a step would depend on the ranks, or may.
    """
    recipe, shape = resolved.recipe, resolved.shape
    if recipe.precision.reduce != "exact":
        return
    problems = list(check_reproducible(recipe))
    if shape is None and resolved.network is None:
        text = "=exact needs a model of a known family. Use fp32."
        problems.append(Problem("precision.reduce", text))
    if shape is not None and shape.num_experts:
        text = "=exact with experts, whose routers count in floating point. Use fp32."
        problems.append(Problem("precision.reduce", text))
    number = micro_batches(recipe.optim)
    if number > MOST_MICRO_BATCHES:
        text = f"={recipe.optim.micro_batch} makes {number:,} micro-batches of a step, and a sum "
        text += f"of integers has room for {MOST_MICRO_BATCHES:,}. Use a larger one."
        problems.append(Problem("optim.micro_batch", text))
    if problems:
        raise RecipeError(problems)


def micro_batches(optim: Optim) -> int:
    """Return the number of micro-batches of a step: by resolved settings, the same on any ranks."""
    return -(-first_batch(optim) // int(optim.micro_batch))


def _rules(recipe: Recipe) -> Iterable[tuple[str, object, bool, str, str]]:
    """Setting, value, whether it is wrong, why, and what to do."""
    parallel, precision, optim, model = (
        recipe.parallel,
        recipe.precision,
        recipe.optim,
        recipe.model,
    )
    for axis in ("tp", "cp", "pp", "ep"):
        degree = getattr(parallel, axis)
        why = "this axis sums in floating point, in an order of its ranks"
        yield f"parallel.{axis}", degree, degree > 1, why, f"Use {axis}=1"
    why = "its scales depend on what was summed before"
    is_scaled = precision.compute in ("fp16", "fp8")
    yield "precision.compute", precision.compute, is_scaled, why, "Use fp32 or bf16"
    why = "that is not held to the same bits by a test"
    yield (
        "precision.optimizer_states", precision.optimizer_states,
        precision.optimizer_states != "fp32", why, "Use fp32",
    )  # fmt: skip
    offload = recipe.memory.offload
    yield "memory.offload", offload, offload != "none", why, "Use none"
    name, exact = recipe.task.name, [name for name, row in TASKS.items() if row.sums_exactly]
    is_inexact = not task_row(name).sums_exactly
    yield "task.name", name, is_inexact, why, f"Use {' or '.join(exact)}"
    yield "model.lora.rank", model.lora.rank, model.lora.rank is not None, why, "Train all weights"
    yield "model.frozen", ", ".join(model.frozen), bool(model.frozen), why, "Train all weights"
    why = "what is inside of it is not known"
    yield "model.module", model.module, model.module is not None, why, "Use a known model"
    why = "what a compiler makes of a block may differ from process to process"
    yield "model.compile", "true", model.compile is True, why, "Use false"
    why = "it normalises by sums over all ranks in floating point"
    yield ("model.batch_norm", model.batch_norm, model.batch_norm == "step", why, "Use micro_batch")
    why = "it needs norms of whole parameters, which are summed in floating point"
    by_part = [name for name, row in OPTIMIZERS.items() if not row.needs_all]
    needs_all = optimizer_of(optim).needs_all
    yield "optim.name", optim.name, needs_all, why, f"Use {' or '.join(by_part)}"
    why = "where a shard is cut would tell in its last bit"
    yield "optim.ema_decay", optim.ema_decay, optim.ema_decay is not None, why, "Leave it out"
    why = "a step on other devices is then another step"
    follows = optim.batch_per_device is not None
    yield "optim.batch_per_device", optim.batch_per_device, follows, why, "Use optim.global_batch"
    why = "it follows the number of ranks"
    is_open = optim.micro_batch == "auto"
    yield "optim.micro_batch", optim.micro_batch, is_open, why, "Give a number"

"""One step of the real model on fake devices: what a rank allocates, without having one.

Everything is as in training (model, sharding, recompute, step, optimizer) except that tensors have
sizes and no content, and that the other ranks do not exist: collectives return at once. Any world
size runs in one process.

Run as a program: a request (`planner/dry_run.py`) as JSON on stdin, the answer as one line of JSON;
before it a line for each phase as it begins, which says how far it is.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from shardyard import torch_private
from shardyard.config.data_choices import predicted_rows
from shardyard.config.formulas import step_samples
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.errors import RequestError, ShardyardError
from shardyard.families.shape import ModelShape
from shardyard.io.files import parse_json
from shardyard.parallel.mesh import build_mesh
from shardyard.tasks.base import task_class
from shardyard.tasks.loss_computation import LossSums
from shardyard.train.allocations import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    SET_UP,
    AllocationLog,
    StepPhase,
)
from shardyard.train.build import build_optimizer, build_sharded, ema_of
from shardyard.train.loss_scaling import LossScaling
from shardyard.train.state import OF_OPTIMIZER
from shardyard.train.step import Stepper

OnPhase = Callable[[str, int, int], None]
"""Callback of each phase as it begins: its name, number of phases before it, total number."""

_OF_EACH_PASS = 3
"""Forward, loss and backward."""


def _ignore_phase(_phase: str, _done: int, _of: int) -> None:
    pass


def dry_run(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    *,
    most_passes: int = 2,
    on_phase: OnPhase = _ignore_phase,
) -> dict[str, Any]:
    """Build the model and take one step as rank 0, which holds most.

    Args:
        recipe: Without any ``auto`` in data, optim, precision and memory.
        most_passes: Micro-batches to run where the step has more. The first finds no gradients and
            the last reduces them; those between allocate no more than the last.

    Returns:
        ``moments``: the peak of each phase of the step, ``allocations.Peak``; ``attention``;
        ``micro_batches``: how many were run; ``seconds``; ``torch``: its version.
    """
    if recipe.precision.reduce == "exact":
        raise RequestError(
            "precision.reduce=exact: a dry run has sizes and no numbers, and such a step looks at "
            "its largest gradients. Use precision.reduce=fp32: gradients then take 4 bytes of a "
            "parameter where exact takes 8; all else is the same."
        )
    if recipe.optim.module is not None:
        raise RequestError(
            f"optim.module={recipe.optim.module}: a dry run has sizes and no numbers, and your "
            "optimizer takes trial steps with numbers. Use optim.name=adamw here: its states take "
            "8 bytes of a parameter."
        )
    started = time.monotonic()
    passes = min(most_passes, _passes(recipe, layout))
    phases = _Phases(on_phase, passes=passes)
    phases.begin(f"building the model for {layout.world_size:,} ranks")
    chunk = recipe.memory.loss_chunk
    log = AllocationLog(
        vocab_size=-(-shape.logits_width // (layout.tp if shape.family.head.split else 1)),
        tokens=_logits_rows(recipe, shape, layout),
        micro_batches=passes,
        chunk=chunk if isinstance(chunk, int) else None,
        on_phase=phases.of_step,
    )
    with _rank_0_of(layout.world_size):
        _take_a_step(recipe, shape, layout, log=log, passes=passes)
    phases.begin("finding the peaks")
    moments = [asdict(peak) for peak in log.peaks() if peak.phase != SET_UP]
    return {
        "moments": moments,
        "attention": _attention(log.operators),
        "micro_batches": passes,
        "seconds": round(time.monotonic() - started, 3),
        "torch": torch.__version__,
    }


class _Phases:
    """Counts what has begun."""

    def __init__(self, on_phase: OnPhase, *, passes: int) -> None:
        self._on_phase, self._passes = on_phase, passes
        self._of = 3 + _OF_EACH_PASS * passes  # the model, the optimizer step, the peaks
        self._started = 0

    def begin(self, name: str) -> None:
        """Say that a phase begins."""
        self._on_phase(name, self._started, self._of)
        self._started += 1

    def of_step(self, phase: StepPhase) -> None:
        """The same of a phase of the step."""
        which = f", micro-batch {phase.micro_batch} of {self._passes}" if phase.micro_batch else ""
        self.begin(f"{phase.name}{which}")


@contextmanager
def _rank_0_of(world_size: int) -> Iterator[None]:
    # Rank 0 holds most: shards are as long as its own, or shorter. On the others FSDP pads a short
    # shard, and on fake tensors twice, as it decides by addresses whether it has done so.
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        gc.collect()  # the model must be gone before the process group is
        dist.destroy_process_group()


def _take_a_step(
    recipe: Recipe, shape: ModelShape, layout: Layout, *, log: AllocationLog, passes: int
) -> None:
    # always cpu: a fake mesh of accelerators fails where torch was built without them
    device = torch.device("cpu")
    mesh = build_mesh(layout, device.type)  # reads ranks back from tensors, so none may be fake
    # sharding cuts each parameter into as many pieces as there are ranks: slow on fake tensors
    computation = build_sharded(recipe, shape, mesh, device=device)
    with torch_private.fake_tensors(), log:
        # Inside of the log, as this gives the model its storage.
        optimizer = build_optimizer(recipe, computation, mesh, device=device)
        averages = ema_of(recipe, computation)
        stepper = _Watched(
            computation,
            optimizer,
            mesh,
            device=device,
            grad_clip=recipe.optim.grad_clip,
            ema=averages,
            scaling=LossScaling.of(recipe, device=device),
        )
        tensors = stepper.state_tensors()
        log.mark(computation.model.buffers(), PARAMETERS)
        for kind, category in (("model.", PARAMETERS), (OF_OPTIMIZER, OPTIMIZER)):
            log.mark((held for name, held in tensors.items() if name.startswith(kind)), category)
        stepper.log = log
        # one for all: a device holds one at a time
        batch = task_class(recipe.task.name).empty_batch(recipe)
        log.begin_step()
        stepper.run([batch] * passes, lr=1.0, drain=False)


class _Watched(Stepper):
    """Says which allocations are the gradients, before the optimizer has them."""

    log: AllocationLog

    def accumulate(self, batches: Sequence[MicroBatch]) -> LossSums:
        found = super().accumulate(batches)
        # Afterwards the optimizer takes the gradients from their parameters.
        self.log.mark(self._optimizer.gradients(), GRADIENTS)
        return found


def _micro_batch_tokens(recipe: Recipe) -> int:
    return int(recipe.optim.micro_batch) * int(recipe.data.seq_len)


def _logits_rows(recipe: Recipe, shape: ModelShape, layout: Layout) -> int:
    """Tokens of a micro-batch whose logits a rank computes."""
    tokens = _micro_batch_tokens(recipe) // layout.cp
    if shape.label_head == "samples":
        return int(recipe.optim.micro_batch)
    if shape.label_head == "tokens":
        return tokens // layout.tp
    if shape.is_causal:
        return tokens
    held = tokens // layout.tp
    return layout.tp * min(held, predicted_rows(held))


def _passes(recipe: Recipe, layout: Layout) -> int:
    samples = step_samples(recipe.optim, devices=layout.world_size)
    micro_batches = -(-samples // int(recipe.optim.micro_batch))
    return -(-micro_batches // layout.data_ranks)


def _attention(operators: set[str]) -> str:
    """``flash`` keeps q, k, v, output and one number a row; ``unfused`` the matrix of scores."""
    return "unfused" if torch_private.FLASH_ATTENTIONS.isdisjoint(operators) else "flash"


def main() -> int:
    """Answer the request on stdin; a rejection is reported on stderr."""
    request = parse_json(sys.stdin.read())
    try:
        answer = dry_run(
            Recipe.model_validate(request["recipe"]),
            ModelShape(**request["shape"]),
            Layout(**request["layout"]),
            on_phase=_print_phase,
        )
    except ShardyardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer))
    return 0


def _print_phase(phase: str, done: int, of: int) -> None:
    print(json.dumps({"phase": phase, "done": done, "of": of}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

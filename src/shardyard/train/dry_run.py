"""One step of the real model on fake devices: what a rank allocates, without having one.

Everything is as in training (model, sharding, recompute, step, optimizer) except that tensors have
sizes and no content, and that the other ranks do not exist: collectives return at once. Any world
size runs in one process.

Run as a program: a request (`plan/dry_run.py`) as JSON on stdin, the answer as one line of JSON.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.config.schema import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.errors import ShardyardError
from shardyard.parallel.mesh import build_mesh
from shardyard.train.allocations import OPTIMIZER, PARAMETERS, SET_UP, AllocationLog
from shardyard.train.setup import build_model
from shardyard.train.step import Stepper

_MICRO_BATCHES = 2
"""At most this many are run. The first finds no gradients and the last reduces them; those between
allocate what the last one does up to its peak."""


def dry_run(recipe: Recipe, shape: ModelShape, layout: Layout, *, rank: int = 0) -> dict[str, Any]:
    """Build the model and take one step.

    Args:
        recipe: Without any ``auto`` in data, optim, precision and memory.
        rank: Whose memory is asked for; 0 holds most, as shards of uneven size begin with it.

    Returns:
        ``moments``: the peak of each phase of the step, ``allocations.Peak``; ``attention``;
        ``micro_batches``: how many were run; ``seconds``; ``torch``: its version.
    """
    started = time.monotonic()
    passes = _passes(recipe, layout)
    log = AllocationLog(
        vocab_size=shape.vocab_size, tokens=_micro_batch_tokens(recipe), micro_batches=passes
    )
    with _fake_ranks(layout.world_size, rank):
        _take_a_step(recipe, shape, layout, log=log, passes=passes)
    moments = [asdict(peak) for peak in log.peaks() if peak.phase != SET_UP]
    return {
        "moments": moments,
        "attention": _attention(log.operators),
        "micro_batches": passes,
        "seconds": round(time.monotonic() - started, 3),
        "torch": torch.__version__,
    }


@contextmanager
def _fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
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
    with FakeTensorMode(), log:
        task, optimizer = build_model(recipe, shape, mesh=mesh, layout=layout, device=device)
        tensors = optimizer.tensors()
        log.mark(task.model.buffers(), PARAMETERS)
        for kind, category in (("model.", PARAMETERS), ("optim.", OPTIMIZER)):
            log.mark((held for name, held in tensors.items() if name.startswith(kind)), category)
        stepper = Stepper(task, optimizer, layout, device=device, grad_clip=recipe.optim.grad_clip)
        batches = [_micro_batch(recipe) for _ in range(passes)]
        log.begin_step()
        stepper.run(batches, lr=1.0, drain=False)


def _micro_batch(recipe: Recipe) -> MicroBatch:
    samples, seq_len = int(recipe.optim.micro_batch), int(recipe.data.seq_len)
    tokens_BL, targets_BL, positions_BL = torch.zeros(
        3, samples, seq_len, dtype=torch.int64
    ).unbind()
    return MicroBatch(tokens_BL, targets_BL, positions_BL, torch.zeros(samples, dtype=torch.int64))


def _micro_batch_tokens(recipe: Recipe) -> int:
    return int(recipe.optim.micro_batch) * int(recipe.data.seq_len)


def _passes(recipe: Recipe, layout: Layout) -> int:
    micro_batches = -(-int(recipe.optim.global_batch) // int(recipe.optim.micro_batch))
    return min(_MICRO_BATCHES, -(-micro_batches // layout.data_ranks))


def _attention(operators: set[str]) -> str:
    """``flash`` keeps q, k, v, output and one number a row; ``unfused`` the matrix of scores."""
    is_flash = "aten::_scaled_dot_product_flash_attention_for_cpu" in operators
    return "flash" if is_flash else "unfused"


def main() -> int:
    """Answer the request on stdin; a refusal is told on stderr."""
    request = json.loads(sys.stdin.read())
    try:
        answer = dry_run(
            Recipe.model_validate(request["recipe"]),
            ModelShape(**request["shape"]),
            Layout(**request["layout"]),
            rank=request["rank"],
        )
    except ShardyardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

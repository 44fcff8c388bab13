"""How long a loop stands still for a save: ``steps()``, torch's ``async_save``, ``torch.save``.

Two processes hold one model and its AdamW state. In each round all three save it once, in changing
order; after each save the processes train on, until its files are written, so that no write falls
on another's save. Blocked is the time from the end of a step to the begin of the next one; waiting
for others included, the longer of both ranks counts.

    OMP_NUM_THREADS=1 python -m benchmarks.blocked_by_saves
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard
from benchmarks.record import write_result
from shardyard.library.model import sharded
from tests.distributed.ranks import run_on_ranks

RANKS, SAMPLES, SEQ_LEN, SIZE = 2, 1, 64, 4096
STEPS_BESIDE, WIDTH = 3, 384
WAYS = ("shardyard.steps", "torch.distributed.checkpoint.async_save", "torch.save on rank 0")


class _Saving:
    """The three ways over one model; each returns what waits until its files are written."""

    def __init__(self, folder: Path, model: Any, optimizer: Any) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._loop: Iterator[int] = shardyard.steps(
            1_000_000, folder / "steps", model, optimizer, every=1
        )
        self._group: Any = dist.new_group(backend="gloo")
        next(self._loop)

    def by(self, way: str, number: int) -> Callable[[], Any]:
        if way == WAYS[0]:
            next(self._loop)
            wait: Any = sharded(self._model).finish_saves
            return wait  # type: ignore[no-any-return]
        if way == WAYS[1]:
            model, optimizer = get_state_dict(self._model, self._optimizer)
            future: Any = state_dict_saver.async_save(
                {"model": model, "optimizer": optimizer},
                checkpoint_id=self._folder / f"other-{number}",
                process_group=self._group,
            )
            return future.result  # type: ignore[no-any-return]
        if dist.get_rank() == 0:
            states = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(states, self._folder / f"other-{number}.pt")
        dist.barrier()
        return lambda: None


def _remove_others(folder: Path) -> None:
    for path in folder.glob("other-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _step(model: Any, optimizer: Any) -> None:
    tokens = torch.randint(0, SIZE, (SAMPLES, SEQ_LEN))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def blocked_s(
    folder: str, rounds: int, width: int
) -> tuple[int, dict[str, list[tuple[float, float]]]]:
    """Bytes of the state, and by way: seconds blocked, and until its files are written."""
    os.environ["SHARDYARD_PARALLEL"] = f"dp_replicate={RANKS},dp_shard=1"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = shardyard.wrap(model, optimizer)
    _step(model, optimizer)
    saving = _Saving(Path(folder), model, optimizer)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            _step(model, optimizer)
            dist.barrier()
            began_s = time.perf_counter()
            wait = saving.by(way, number)
            stood_s = time.perf_counter() - began_s
            for _ in range(STEPS_BESIDE):
                _step(model, optimizer)
            wait()
            written_s = time.perf_counter() - began_s
            dist.barrier()
            if dist.get_rank() == 0:
                _remove_others(Path(folder))
            times = torch.tensor([stood_s, written_s])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            if number:  # the first of each also makes what it keeps
                found[way].append((float(times[0]), float(times[1])))
    return 12 * sum(param.numel() for param in model.parameters()), found


def main() -> int:
    """Measure, print, write the result file; returns 1 if steps() stands still for longest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size, found = run_on_ranks(blocked_s, RANKS, folder, given.rounds, WIDTH, timeout_s=900)[0]
    rows = []
    for way, times in found.items():
        stood = sorted(each for each, _ in times)
        rows.append(
            {
                "way": way,
                "blocked_s": statistics.median(stood),
                "blocked_s_range": [stood[0], stood[-1]],
                "written_s": statistics.median(each for _, each in times),
                "blocked_s_by_round": [each for each, _ in times],
            }
        )
        print("{way:42} blocked {blocked_s:.3f} s, written {written_s:.2f} s".format(**rows[-1]))
    content = {"ranks": RANKS, "state_bytes": size, "rounds": given.rounds, "rows": rows}
    write_result("blocked-by-saves", content, given.out)
    ours, *others = [row["blocked_s"] for row in rows]
    return int(ours > min(others))


if __name__ == "__main__":
    sys.exit(main())

"""Memory of each process while a Hugging Face folder is opened sharded, and while one is exported.

A Llama of random weights, as a folder of several safetensors files, is opened by two processes with
FULL_SHARD, saved by both as a checkpoint, and exported from that by one. A process of its own reads
``RssAnon`` of the others every millisecond: what they allocate, and not the mapped pages of files,
which the kernel drops when it needs room. Counted from when the model is there without storage, or
the program has been imported. Bar: a rank takes its share of the model and one tensor; an export,
whose share is nothing, one tensor.

    python -m benchmarks.folder_memory [--layers 16] [--hidden 1024] [--out FILE]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import write_result
from shardyard.checkpoint.export import export
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.safetensors_writer import write_tensors
from shardyard.checkpoint.save import Saver
from shardyard.config.model.source import read_shape
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.families.file_tensors import file_tensors, whole_shape
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape
from shardyard.io.files import write_json
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from shardyard.models.local_shard import local_shard
from shardyard.parallel.mesh import build_mesh
from shardyard.train.build import build_sharded

RANKS = 2
VOCABULARY = 32000
FILE_BYTES = 200 * 10**6
EVERY_S = 0.001

Marks = list[tuple[str, float]]
"""What a process has reached, and when (``time.monotonic``, one clock for all)."""


def shape_of(*, layers: int, hidden: int) -> ModelShape:
    """A Llama with heads of 64."""
    return replace(
        PRESETS["llama-tiny"].shape, vocab_size=VOCABULARY, hidden_size=hidden,
        intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
    )  # fmt: skip


def write_folder(shape: ModelShape, folder: Path) -> int:
    """A folder of random fp32 weights; returns the bytes of its largest tensor."""
    shapes = {name: each.shape for name, each in build_on_meta(shape).named_parameters()}
    tensors = file_tensors(shapes, family_of(shape.model_type))
    sizes = {name: whole_shape(pieces) for name, pieces in tensors.items()}
    files: list[list[str]] = [[]]
    for name in sizes:
        if sum(_bytes(sizes[each]) for each in files[-1]) > FILE_BYTES:
            files.append([])
        files[-1].append(name)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        made = ([0.02 * torch.randn(sizes[name])] for name in names)
        write_tensors(folder / file, {n: sizes[n] for n in names}, torch.float32, tensor_rows=made)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    config = hf_config(shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return max(map(_bytes, sizes.values()))


def _bytes(shape: tuple[int, ...]) -> int:
    return 4 * torch.Size(shape).numel()


def resolved_of(folder: Path, shape: ModelShape) -> Resolved:
    """What a run of the folder's model would be, as far as building and exporting ask."""
    return Resolved(
        recipe=Recipe.model_validate(
            {
                "model": {"path": str(folder), "dropout": 0.0},
                "data": {"seq_len": 32},
                "precision": {"compute": "fp32", "output": "fp32"},
                "memory": {"loss_chunk": "none"},
                "cluster": {"device": "cpu", "devices": RANKS},
                "parallel": {"strategy": "FULL_SHARD"},
            }
        ),
        reasons={}, shape=shape, steps=1, model_dir=str(folder),
        data=DatasetMetadata(
            dir=str(folder), fingerprint="0", vocab_size=shape.vocab_size, train_tokens=1,
            eval_tokens=1, train_documents=1, eval_documents=1, unigram_entropy=1.0,
        ),
    )  # fmt: skip


def open_and_save(rank: int, rendezvous: str, folder: Path, to: Path) -> dict[str, Any]:
    """One rank: open the folder sharded, then save a checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    shape = read_shape(Model(path=str(folder)), folder, 0)
    recipe = resolved_of(folder, shape).recipe
    layout, _ = resolve_layout(recipe.parallel, world_size=RANKS, devices_per_node=RANKS)
    mesh = build_mesh(layout, "cpu")
    computation = build_sharded(recipe, shape, mesh, device=torch.device("cpu"))
    marks: Marks = [("open", time.monotonic())]
    materialize(computation.model, torch.device("cpu"), stages=computation.roots)
    fill_weights(computation.model, folder=folder, seed=0)
    marks.append(("opened", time.monotonic()))
    tensors: dict[str, Tensor] = {
        f"model.{name}": each for name, each in computation.model.named_parameters()
    }
    share = sum(local_shard(each).tensor.nbytes for each in tensors.values())
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    saver = Saver(to, group=group, rank=rank, world_size=RANKS, keep_last=1)
    saver.save(1, tensors, {})
    saver.wait()
    saver.close()
    dist.destroy_process_group()
    return {"marks": marks, "share_bytes": share}


def export_it(_rank: int, _rendezvous: str, folder: Path, to: Path) -> dict[str, Any]:
    """The program that exports."""
    torch.set_num_threads(1)
    resolved = resolved_of(folder, read_shape(Model(path=str(folder)), folder, 0))
    marks: Marks = [("export", time.monotonic())]
    export(to / step_name(1), resolved, to / "exported", max_shard_bytes=FILE_BYTES)
    marks.append(("exported", time.monotonic()))
    return {"marks": marks, "share_bytes": 0}


def watched(task: Callable[..., dict[str, Any]], number: int, *args: Any) -> list[dict[str, Any]]:
    """Run a task in processes; what each takes between its two marks, beyond the first of them."""
    context = get_context("spawn")
    processes, ends = [], []
    for rank in range(number):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, task, rank, *args))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
    seen: list[list[tuple[float, int]]] = [[] for _ in processes]
    while any(process.is_alive() for process in processes):
        for process, samples in zip(processes, seen, strict=True):
            held = _anonymous_bytes(process.pid)
            if held is not None:
                samples.append((time.monotonic(), held))
        time.sleep(EVERY_S)
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed; its message is above")
    return [_taken(end.recv(), samples) for end, samples in zip(ends, seen, strict=True)]


def _run(end: Connection, task: Callable[..., dict[str, Any]], *args: Any) -> None:
    end.send(task(*args))


def _taken(told: dict[str, Any], samples: list[tuple[float, int]]) -> dict[str, Any]:
    (_, begin), (_, finish) = told["marks"]
    before = next(held for at, held in reversed(samples) if at <= begin)
    within = [held for at, held in samples if begin <= at <= finish]
    return {
        "share_bytes": told["share_bytes"],
        "peak_bytes": max(within, default=before) - before,
        "before_bytes": before,
        "samples": len(within),
    }


def _anonymous_bytes(pid: int | None) -> int | None:
    """None: the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None


def rows_of(told: list[dict[str, Any]], tensor_bytes: int) -> Iterator[dict[str, Any]]:
    """Each process beside its bar."""
    for rank, each in enumerate(told):
        bar = each["share_bytes"] + tensor_bytes
        yield {"rank": rank, **each, "bar_bytes": bar, "holds": each["peak_bytes"] <= bar}


def measure(*, layers: int, hidden: int, place: Path) -> dict[str, Any]:
    """Open, save and export in a folder; the content of the result."""
    shape, folder, to = shape_of(layers=layers, hidden=hidden), place / "hf", place / "saved"
    folder.mkdir()
    to.mkdir()
    tensor_bytes = write_folder(shape, folder)
    rendezvous = f"file://{place / 'rendezvous'}"
    opened = watched(open_and_save, RANKS, rendezvous, folder, to)
    exported = watched(export_it, 1, rendezvous, folder, to)
    return {
        "model_bytes": 4 * shape.parameters,
        "largest_tensor_bytes": tensor_bytes,
        "import": list(rows_of(opened, tensor_bytes)),
        "export": list(rows_of(exported, tensor_bytes)),
    }


def main(argv: list[str]) -> int:
    """Measure, print a line for each process, and write the raw result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.folder_memory")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        found = measure(layers=asked.layers, hidden=asked.hidden, place=Path(place))
    for kind in ("import", "export"):
        for row in found[kind]:
            told = ", ".join(
                f"{name} {row[f'{name}_bytes'] / 1e6:,.1f} MB" for name in ("share", "peak", "bar")
            )
            print(f"{kind} rank {row['rank']}: {told}")
    write_result("folder-memory", found, asked.out)
    return 0 if all(row["holds"] for row in (*found["import"], *found["export"])) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))

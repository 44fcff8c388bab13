"""What is measured: loads, contenders, recompute settings, and the first try at a fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from shardyard.config.rules.layout import resolve_layout
from shardyard.config.schema.recipe import Recipe
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.planner.memory import memory
from shardyard.planner.workload import workload_of

CONTENDERS = ("shardyard", "bare", "trainer")
RECOMPUTES = ("none", "selective", "full")
_OURS_ALONE = ("selective",)
"""Recompute settings that neither the bare loop nor the Trainer has."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one model, the same for every contender."""

    preset: str
    seq_len: int
    sequences: int
    """Samples of one optimizer step on each device, in however many micro-batches."""
    blocks: int | None = None
    """Fewer blocks than the preset has; None: all."""

    def shape_of(self, shape: ModelShape) -> ModelShape:
        """The preset's shape with so many blocks."""
        return shape if self.blocks is None else replace(shape, num_hidden_layers=self.blocks)


LOADS = {
    "llama-1b": Load(preset="llama-1b", seq_len=4096, sequences=8),
    "llama2-7b": Load(preset="llama2-7b", seq_len=4096, sequences=4),
    "llama3-8b": Load(preset="llama3-8b", seq_len=4096, sequences=4),
}
REHEARSAL = {"llama-tiny": Load(preset="llama-tiny", seq_len=64, sequences=2)}
"""Small enough for a CPU; its numbers mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender with one load and one recompute setting."""

    load: Load
    contender: str
    recompute: str
    micro_batch: int
    compile: bool = False
    """Each block by torch.compile; the Trainer its whole model, as it does."""
    variant: str = ""
    settings: Sequence[str] = ()
    """Overrides of the recipe."""
    halves: bool = True
    """Whether it is tried again with half the micro-batch where it is out of memory."""

    def with_half_micro_batch(self) -> "Cell":
        """The same work in twice as many pieces."""
        return replace(self, micro_batch=self.micro_batch // 2)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where everything runs."""

    device: str
    """cpu, cuda, xpu or hpu."""
    devices: int
    memory_bytes: int
    """Of one device."""
    source: str
    vocab_size: int
    """Of the tokenizer; presets with a vocabulary of their own have room for it."""
    prepared: Path


def cells(
    loads: Sequence[Load],
    recomputes: Sequence[str],
    contenders: Sequence[str],
    place: Place,
    *,
    compiles: Sequence[bool] = (False,),
    settings: Sequence[str] = (),
) -> Iterator[Cell]:
    """All cells; who is first changes from one comparison to the next.

    Args:
        compiles: Whether blocks are compiled: one or both, for every contender alike.
        settings: Overrides of our own contender's recipe.
    """
    turn = 0
    for load, is_compiled, recompute in product(loads, compiles, recomputes):
        found = [c for c in contenders if c == "shardyard" or recompute not in _OURS_ALONE]
        shift = turn % len(found) if found else 0
        for contender in found[shift:] + found[:shift]:
            yield _fitted(
                Cell(
                    load=load, contender=contender, recompute=recompute, compile=is_compiled,
                    micro_batch=load.sequences,
                    settings=settings if contender == "shardyard" else (),
                ),
                place,
            )  # fmt: skip
        turn += len(found) > 1


def recipe(cell: Cell, place: Place) -> Recipe:
    """The recipe of a cell, as our own contender trains it."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 10**6},  # the clock ends it, and its last step never comes
        "model": {
            "preset": cell.load.preset, "weights": "random", "dropout": 0.0,
            "compile": cell.compile,
        },
        "data": {
            "source": place.source, "tokenizer": "train", "vocab_size": place.vocab_size,
            "eval_fraction": 0.0, "seq_len": cell.load.seq_len, "dir": str(place.prepared),
        },
        "optim": {
            "name": "adamw", "lr": LR, "weight_decay": 0.1,
            "schedule": "constant", "warmup_steps": 0,
            "global_batch": cell.load.sequences * place.devices, "micro_batch": cell.micro_batch,
        },
        "precision": {"compute": "bf16", "reduce": "fp32", "output": "bf16"},
        "memory": {"recompute": cell.recompute},
        "checkpoint": {"every": 10**6},
        "cluster": {"device": place.device, "devices": place.devices},
    }  # fmt: skip
    for setting in cell.settings:
        path, _, value = setting.partition("=")
        section, key = path.split(".")
        sections[section][key] = yaml.safe_load(value)
    return Recipe.model_validate(sections)


def reference(cell: Cell) -> Cell:
    """The same work without compilation, for its losses: full recompute, which fits before all."""
    return replace(cell, compile=False, recompute="full", variant=REFERENCE)


REFERENCE = "reference"
"""Variant of cells that are measured for their losses alone, in as few steps as those need."""

LR = 1e-4
"""Peak learning rate of all contenders."""


def _fitted(cell: Cell, place: Place) -> Cell:
    """Begin with the largest micro-batch whose tensors fit; what does not after all is halved.

    Counted without what the allocator wastes: too large a beginning costs one try, too small a one
    costs the measurement. All contenders keep the same: fp32 states and a copy in bf16.
    """
    while cell.micro_batch > 1 and tensor_bytes(cell, place) > place.memory_bytes:
        cell = cell.with_half_micro_batch()
    return cell


def tensor_bytes(cell: Cell, place: Place) -> int:
    """What its tensors take by the plan, without what the allocator wastes."""
    asked, shape = recipe(cell, place), cell.load.shape_of(PRESETS[cell.load.preset].shape)
    if not shape.vocab_size:
        shape = replace(shape, vocab_size=place.vocab_size)
    layout, _ = resolve_layout(
        asked.parallel, world_size=place.devices, devices_per_node=place.devices
    )
    return memory(workload_of(asked, shape, layout)).allocated_bytes

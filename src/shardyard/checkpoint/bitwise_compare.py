"""Compare two runs of one recipe bit for bit: their steps, and their last checkpoints.

It is for runs that ought to be equal: ``precision.reduce=exact`` on other ranks, with other
losses on the way. There are three answers, as missing data prove neither. They are *equal*,
*different* with the first step, and *not proven*. Where checkpoints show it, *different* also
names the tensor and the rank that wrote it.

As a program, for the half that cannot read tensors:
``python -m shardyard.checkpoint.bitwise_compare RUN
RUN`` prints the verdict as JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from shardyard.checkpoint.load import load_tensors, read_shapes
from shardyard.io.files import parse_json
from shardyard.rundir.jsonl import read_counted
from shardyard.rundir.layout import RunDir

_COMPARED = ("loss", "grad_norm", "lr", "tokens", "samples", "targets")
"""Fields of a step's line that are compared; others are times, sizes and places."""


@dataclass(frozen=True, kw_only=True)
class BitwiseComparison:
    """Verdict on two runs."""

    outcome: Literal["equal", "different", "not proven"]
    why: str
    step: int | None = None
    """The first that differs."""
    tensor: str | None = None
    """The first of that step's checkpoint, or of the first checkpoint after it, that differs."""
    rank: int | None = None
    """Rank that wrote its first element that differs, of the second run."""


def compare_bits(left: RunDir, right: RunDir) -> BitwiseComparison:
    """Compare every line of every step, and all tensors of the newest checkpoint of both."""
    steps = [_lines_by_step(run) for run in (left, right)]
    shared = sorted(steps[0].keys() & steps[1].keys())
    step = next((s for s in shared if len(steps[0][s] | steps[1][s]) > 1), None)
    saved = sorted(set(left.checkpoint_steps()) & set(right.checkpoint_steps()))
    for number in saved:
        # A checkpoint from before the first step that differs cannot show what went wrong there.
        if step is None or number >= step or number == saved[-1]:
            found = _first_difference(left.checkpoint(number), right.checkpoint(number))
            if found is not None:
                tensor, rank = found
                first = number if step is None else step
                why = f"step {first}; {tensor} of step {number}, written by rank {rank}"
                return BitwiseComparison(
                    outcome="different", why=why, step=first, tensor=tensor, rank=rank
                )
    if step is not None:
        return BitwiseComparison(
            outcome="different", why=f"step {step}: {_describe_step(steps, step)}", step=step
        )
    return _equal_or_not_proven(steps, saved)


def _equal_or_not_proven(steps: list[dict[int, set[str]]], saved: list[int]) -> BitwiseComparison:
    """Judge two runs without a difference in anything that both have."""
    last = max([*steps[0], *steps[1]], default=0)
    for number, found in enumerate(steps, 1):
        lacking = next((s for s in range(1, last + 1) if s not in found), None)
        if lacking is not None:
            return BitwiseComparison(
                outcome="not proven", why=f"run {number} has no line of step {lacking}"
            )
    if not last or last not in saved:
        why = f"there are not two checkpoints of step {last}"
        return BitwiseComparison(outcome="not proven", why=why)
    return BitwiseComparison(outcome="equal", why=f"{last} steps and all tensors of step {last}")


def _lines_by_step(run: RunDir) -> dict[int, set[str]]:
    """Return the compared fields of each step's lines, by step.

    A step that was repeated after lost work has several. A lost step that was not repeated has
    none.
    """
    lines: dict[int, set[str]] = {}
    found = read_counted(run.metrics)
    done = {line["step"] for line in found.steps}
    for line in (*found.steps, *found.lost):
        if line["step"] in done:
            told = json.dumps({key: line.get(key) for key in _COMPARED})
            lines.setdefault(line["step"], set()).add(told)
    return lines


def _describe_step(steps: list[dict[int, set[str]]], step: int) -> str:
    return " and ".join(" or ".join(sorted(found[step])) for found in steps)


def _first_difference(left: Path, right: Path) -> tuple[str, int | None] | None:
    """The first tensor whose bits differ, and the rank that wrote where they do."""
    one, other = _read(left), _read(right)
    for name in sorted({*one, *other}):
        if name not in one or name not in other or one[name].shape != other[name].shape:
            return name, None
        differs = _bits(one[name]) != _bits(other[name])
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            # The last index is that of a byte within the element.
            return name, _rank_of(right, name, place[: one[name].dim()])
    return None


def _read(path: Path) -> dict[str, Tensor]:
    shapes = read_shapes(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    load_tensors(path, tensors)
    return tensors


def _bits(tensor: Tensor) -> Tensor:
    """Bytes of each element, in a dimension of their own: two NaN may be the same, 0 and -0 not."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def _rank_of(path: Path, name: str, index: tuple[int, ...]) -> int | None:
    """The rank whose file has an element of a tensor."""
    for file in sorted(path.glob("rank-*.safetensors")):
        with safe_open(file, framework="pt") as held:
            if name not in held.keys():  # noqa: SIM118 (it is no mapping)
                continue
            about = parse_json((held.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            shape = held.get_slice(name).get_shape()
        starts = about.get(name, {}).get("saved_offsets", [0] * len(shape))
        if all(s <= p < s + n for s, p, n in zip(starts, index, shape, strict=True)):
            return int(file.stem.removeprefix("rank-"))
    return None


def main(argv: list[str]) -> int:
    """Print the verdict; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.checkpoint.bitwise_compare")
    parser.add_argument("left", type=Path)
    parser.add_argument("right", type=Path)
    asked = parser.parse_args(argv)
    print(json.dumps(asdict(compare_bits(RunDir(asked.left), RunDir(asked.right)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

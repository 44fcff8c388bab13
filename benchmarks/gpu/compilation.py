"""Compiled code of one call, kept for the next: one file a cell instead of thousands.

Torch finds what is in it by the content of a graph, so a file of other code or of another version
does no harm: it is compiled anew.
"""

import sys
from pathlib import Path

import torch

from benchmarks.gpu.cells import Cell

_MOST_BYTES = 16 * 2**20
"""A larger file may not come back from where it was made (ours)."""


def load_compiled(folder: Path) -> int:
    """Give torch all that the folder has; returns how many files that were."""
    files = sorted(folder.glob("*.bin"))
    for file in files:
        torch.compiler.load_cache_artifacts(file.read_bytes())
    return len(files)


def save_compiled(folder: Path, cell: Cell) -> int | None:
    """Write what this process compiled; returns its bytes, None where there is nothing."""
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        return None
    content, _ = found
    if len(content) > _MOST_BYTES:
        print(f"compiled code of {len(content)} bytes is not kept: too large", file=sys.stderr)
    else:
        name = f"{cell.load.preset}-{cell.contender}-{cell.recompute}-{cell.micro_batch}"
        (folder / f"{name}.bin").write_bytes(content)
    return len(content)

"""A part of a model: the modules of one pipeline stage, under the names they have in the whole.

Names decide initial weights, dropout and checkpoints, so a block keeps its number wherever it is. A
head that is the table of tokens brings the table with it, so that the last stage has it too.
"""

from collections.abc import Sequence

from torch import nn

from shardyard.families.family import Family
from shardyard.models.submodules import blocks_of, is_tied, part_of


def keep_blocks(
    model: nn.Module, family: Family, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> None:
    """Remove from a whole model all blocks but these; what is before the blocks unless first, and
    what is after them unless last."""
    blocks = list(blocks_of(model, family).values())
    here = _ends(model, family, is_first=is_first, is_last=is_last)
    everywhere = _ends(model, family, is_first=True, is_last=True)
    _place(model, family.blocks, nn.ModuleDict({str(n): blocks[n] for n in numbers}))
    for name in everywhere:
        if name not in here:
            _place(model, name, None)


def stage_of(
    model: nn.Module, family: Family, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> nn.Module:
    """A module of one stage whose modules are those of ``model``, shared and equally named."""
    blocks, stage = blocks_of(model, family), nn.Module()
    own = {str(number): blocks[f"{family.blocks}.{number}"] for number in numbers}
    _place(stage, family.blocks, nn.ModuleDict(own))
    if family.rotary is not None:
        _place(stage, family.rotary, part_of(model, family.rotary))
    here = _ends(model, family, is_first=is_first, is_last=is_last)
    for name in _ends(model, family, is_first=True, is_last=True):
        _place(stage, name, part_of(model, name) if name in here else None)
    return stage


def _ends(model: nn.Module, family: Family, *, is_first: bool, is_last: bool) -> list[str]:
    """Names of what comes before the first block and after the last."""
    before = [row.module for row in family.before]
    before += [] if family.embedding_end is None else [family.embedding_end]
    after = [row.module for row in family.after if part_of(model, row) is not None]
    if family.end is not None:  # it holds them, and parameters of its own
        outside = [name for name in after if not name.startswith(f"{family.end}.")]
        after = [family.end, *outside]
    table = [family.embedding.module] if is_tied(model, family) else []
    names = [*(before if is_first else []), *([*table, *after] if is_last else [])]
    return list(dict.fromkeys(names))


def _place(root: nn.Module, name: str, module: nn.Module | None) -> None:
    """Set a module by its full name, which may pass through modules that are not there yet."""
    *parents, child = name.split(".")
    at = root
    for parent in parents:
        if getattr(at, parent, None) is None:
            at.add_module(parent, nn.Module())
        at = at.get_submodule(parent)
    if hasattr(at, child):
        delattr(at, child)
    at.add_module(child, module)

"""Tensor parallelism of any module by a plan: which of its matrices are split, and how.

=============  =================================  ================================================
word           of                                 what happens
=============  =================================  ================================================
columns        nn.Linear                          each rank makes a run of the outputs
rows           nn.Linear                          each takes a run of the inputs; sums are added up
vocabulary     nn.Embedding; nn.Linear (a head)   rows of a table; outputs, gathered again
=============  =================================  ================================================

Between columns and rows lies what works on each output alone: heads, or the inner width of an MLP.
Everything else is computed by every rank alike, as one process would. Each rank's loss counts as
its part of the whole (loss / ranks), so the gradients of parameters that all ranks hold are partial
sums wherever they stand, and ``rows`` adds up gradients as it adds up outputs.
"""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardyard.errors import Problem
from shardyard.parallel.collectives import gather, sum_over
from shardyard.parallel.product import is_plain
from shardyard.parallel.tensor import Split, compute_on_shares, look_up_share, sum_after

WORDS = ("columns", "rows", "vocabulary")

_SPLIT_SIZE = {"columns": "out_features", "rows": "in_features", "vocabulary": "out_features"}
"""Word -> the size of an nn.Linear that is split."""


def read_plan(
    model: nn.Module, plan: Mapping[str, str], *, tp: int
) -> tuple[dict[str, str], list[Problem]]:
    """Which module gets which word, and everything that is wrong with the plan.

    Args:
        plan: Name of a module, or pattern of names (``layers.*.out``), -> a word.
    """
    named = {name: module for name, module in model.named_modules() if name}
    words: dict[str, str] = {}
    found: list[Problem] = []
    for pattern, word in plan.items():
        path = f"plan[{pattern!r}]"
        matched = names_matching(pattern, named)
        if word not in WORDS:
            text = f"={word!r} is no way to split a module. Use {', '.join(WORDS)}."
            found.append(Problem(path, text))
        elif not matched:
            found.append(Problem(path, f"names no module. {_nearest(pattern, named)}"))
        else:
            wrong = (_misfit(named[name], name, word, tp=tp) for name in matched)
            found += [Problem(path, text) for text in wrong if text]
        twice = [name for name in matched if words.get(name, word) != word]
        if twice:
            text = f"={word!r}, but another pattern says {words[twice[0]]!r} of {twice[0]}."
            found.append(Problem(path, f"{text} Use one."))
        words |= dict.fromkeys(matched, word)
    return words, found


def names_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Names of modules that a pattern means; ``*`` stands for one step of a path."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts))
    ]


def split_by_plan(model: nn.Module, mesh: DeviceMesh, words: Mapping[str, str]) -> None:
    """Split a model over the one axis of ``mesh``, in place.

    Args:
        words: Name of a module -> word, as ``read_plan`` found them to fit.
    """
    group = mesh.get_group()
    split = Split(mesh)

    def add_up(x: Tensor) -> Tensor:
        return sum_over(x, group)

    for name, word in words.items():
        module = model.get_submodule(name)
        if word == "rows":
            sum_after(split(module, Shard(1)), add_up)
        elif isinstance(module, nn.Embedding):
            look_up_share(split(module, Shard(0)), add_up)
        elif word == "vocabulary":
            _gather_after(split(module, Shard(0)), mesh)
        else:
            split(module, Shard(0))
    for module in model.modules():
        split(module, Replicate())


def _gather_after(module: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(module, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        return gather(F.linear(x, module.weight, module.bias), x.dim() - 1, mesh.get_group())

    compute_on_shares(module, forward)


def _misfit(module: nn.Module, name: str, word: str, *, tp: int) -> str | None:
    """Why a module cannot be split so; None: it can."""
    kinds = (nn.Linear, nn.Embedding) if word == "vocabulary" else (nn.Linear,)
    own = next((kind for kind in kinds if is_plain(module, kind)), None)
    if own is None:
        wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        return (
            f"={word!r}: {name} is a {type(module).__name__}. What is split must be a plain "
            f"{wanted}, as its weight is used without it. Name the matrices inside it."
        )
    size_name = "num_embeddings" if own is nn.Embedding else _SPLIT_SIZE[word]
    size = int(getattr(module, size_name))
    if size % tp:
        legal = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
        return (
            f"={word!r}: tp={tp} does not divide {size_name}={size} of {name}. Every rank takes "
            f"an equal part. Use a tp of {', '.join(legal)}, or pad {size_name}."
        )
    return None


def _nearest(pattern: str, named: Mapping[str, nn.Module]) -> str:
    can_be_split = [
        name for name, module in named.items() if isinstance(module, nn.Linear | nn.Embedding)
    ]
    near = difflib.get_close_matches(pattern, can_be_split, n=3, cutoff=0.3) or can_be_split[:3]
    return f"Did you mean one of: {', '.join(near)}?" if near else "It has none to split."

"""Trainable parameters of a model: the one place that decides it, for both halves.

``model.frozen`` names modules or parameters from the top of the model. ``*`` matches one step
of a path, or a part of one, ``[0-7]`` one of these characters. All inside of a named module is
frozen with it.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from shardyard.errors import Problem
from shardyard.families.shape import ModelShape

SETTING = "model.frozen"


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter of that name, or a module around it, is named."""
    return any(_names(pattern, name) for pattern in patterns)


def frozen_pattern_errors(
    patterns: Sequence[str], parameters: Mapping[str, Sequence[str]]
) -> list[Problem]:
    """List patterns that match no parameter, or leave none to train.

    Args:
        parameters: Name of each parameter -> all names that it has: of a tied table two.
    """
    names = [name for all_names in parameters.values() for name in all_names]
    found = []
    for pattern in patterns:
        if any(_names(pattern, name) for name in names):
            continue
        near = difflib.get_close_matches(pattern, _modules(names, pattern), n=1, cutoff=0.0)
        text = f"={pattern!r} names no module or parameter of the model. A name begins at the top "
        text += "of the model, and * matches one step of it."
        found.append(Problem(SETTING, f"{text} Did you mean {near[0]}?" if near else text))
    if patterns and all(
        any(is_frozen(name, patterns) for name in all_names) for all_names in parameters.values()
    ):
        text = (
            f"={', '.join(patterns)} freezes all of the model, so no parameter would be trained. "
        )
        found.append(Problem(SETTING, f"{text}Leave out what shall learn."))
    return found


def parameters_of(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return a known family's parameters by name, as ``frozen_pattern_errors`` takes them.

    A tied head is a name of the table of tokens: freezing one freezes the other.
    """
    family = shape.family
    rows = [
        *(("", row) for row in (*family.before, *family.after)),
        *(
            (f"{family.blocks}.{block}.", row)
            for block in range(shape.num_hidden_layers)
            for row in family.block
        ),
    ]
    named: dict[str, tuple[str, ...]] = {
        f"{prefix}{name}": (f"{prefix}{name}",)
        for prefix, row in rows
        if row.is_built
        for name, *_ in row.parameters(shape)
    }
    if shape.tie_word_embeddings:
        table, head = f"{family.embedding.module}.weight", f"{family.head.module}.weight"
        named[table] += named.pop(head)
    return named


def _names(pattern: str, name: str) -> bool:
    parts, steps = pattern.split("."), name.split(".")
    return len(parts) <= len(steps) and all(
        fnmatchcase(step, part) for step, part in zip(steps, parts, strict=False)
    )


def _modules(names: Iterable[str], pattern: str) -> list[str]:
    """Names of modules and parameters of as many steps as a pattern has, or else of all."""
    steps = [name.split(".") for name in names]
    found = {".".join(each[:end]) for each in steps for end in range(1, len(each) + 1)}
    same = sorted(name for name in found if name.count(".") == pattern.count("."))
    return same or sorted(found)

"""Single names of the tables of `shardyard import`, by what they mean here.

For the hint on an unknown key of a recipe (``config/other_names.py``): the rule that converts a
file also says what one name means.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from shardyard.config.other_names import Meaning
from shardyard.importers.configs import accelerate, deepspeed, fsdp, torchtitan, trainer
from shardyard.importers.configs.rules import (
    ConfigEntry,
    OutcomeKind,
    Rows,
    Rule,
    RuleResult,
    SourceConfig,
)

_TABLES: tuple[Rows, ...] = (
    trainer.ROWS,
    accelerate.LINE,
    fsdp.ROWS,
    torchtitan.ROWS,
    deepspeed.ROWS,
)

_QUANTITIES: Mapping[str, tuple[str, Any]] = {
    "bf16": ("precision.compute", "bf16"),
    "fp16": ("precision.compute", "fp16"),
    "offload_params": ("memory.offload", "params"),
    "offload_optimizer": ("memory.offload", "optimizer"),
}
"""Switch that no single setting states -> setting and value where it is on."""


def meaning_in_tables(name: str, value: Any, by_pattern: bool) -> Meaning | None:
    """Return the meaning of a name and its value in the tables; None: none of them knows it.

    Args:
        by_pattern: Whether patterns such as ``hub_*`` count too.
    """
    for path, rule in _rules_of(name, by_pattern):
        entry = ConfigEntry(path=path, value=value)
        try:
            result = rule(entry, SourceConfig({path: entry}))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue
        meaning = _meaning_of(value, result)
        if meaning is not None:
            return meaning
    return None


def _rules_of(name: str, by_pattern: bool) -> Iterator[tuple[str, Rule]]:
    """Whole path and rule of each row for a name, or for a path that ends with it."""
    for rows in _TABLES:
        for path, rule in rows.items():
            is_pattern = "*" in path
            if not is_pattern and (path == name or path.endswith(f".{name}")):
                yield path, rule
            elif is_pattern and by_pattern and path[0] != "*" and fnmatchcase(name, path):
                yield name, rule


def _meaning_of(value: Any, result: RuleResult) -> Meaning | None:
    settings: dict[str, Any] = {}
    for setting, wanted in result.settings.items():
        if setting == "processes":
            settings["cluster.devices"] = wanted
        elif setting in _QUANTITIES and wanted:
            settings |= dict([_QUANTITIES[setting]])
        elif "." in setting:
            settings[setting] = "VALUE" if result.kind is OutcomeKind.REFUSED else wanted
    if settings:
        is_same = list(settings.values()) == [value]
        return Meaning(settings=settings, is_translated=not is_same)
    words = ". ".join(each for each in result.words.split(". ") if "--without" not in each)
    if not words or words[0] == "=":
        return None
    if result.kind is OutcomeKind.DEFAULT:
        return Meaning(words="Leave it out: it is so without a setting.")
    way = "It is not supported" if result.kind is OutcomeKind.REFUSED else "Leave it out"
    return Meaning(words=f"{way}: {words.rstrip('.')}.")

"""The named models of all families. A family is imported when one of its presets is looked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardyard.families.registry import FAMILIES, PLANNED, family_of
from shardyard.families.shape import ModelShape
from shardyard.plugins import installed


@dataclass(frozen=True, kw_only=True)
class NamedShape:
    """A preset with its family. ``vocab_size`` 0 means: that of the tokenizer."""

    shape: ModelShape
    source: str
    """Source of its sizes."""


class _Presets(Mapping[str, NamedShape]):
    """Name -> preset, family by family: those of ours, and on the way to a name packages'.

    Presets of a package begin with the name of their family, so that no other is imported.
    """

    def __getitem__(self, name: str) -> NamedShape:
        for model_type in _families(name):
            found = family_of(model_type).presets.get(name)
            if found is not None:
                return NamedShape(shape=ModelShape.of(found.shape), source=found.source)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        ours = (*FAMILIES, *PLANNED)
        return (name for model_type in ours for name in family_of(model_type).presets)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _families(preset: str) -> Iterator[str]:
    """Iterate over families that may have a preset: ours first, then those of packages."""
    yield from FAMILIES
    yield from PLANNED
    yield from (name for name in installed("families") if preset.startswith(f"{name}-"))


PRESETS: Mapping[str, NamedShape] = _Presets()


def preset_named(name: str | None) -> NamedShape | None:
    """The preset that a recipe names; None: it names none, or none that there is."""
    return None if name is None else PRESETS.get(name)

"""The named models of all families. A family is imported when one of its presets is looked for."""

from collections.abc import Iterator, Mapping

from shardyard.families.family import Preset
from shardyard.families.registry import FAMILIES, family_of
from shardyard.plugins import installed


class _Presets(Mapping[str, Preset]):
    """Name -> preset, family by family: those of ours, and on the way to a name packages'.

    Presets of a package begin with the name of their family, so that no other is imported.
    """

    def __getitem__(self, name: str) -> Preset:
        for model_type in _families(name):
            found = family_of(model_type).presets.get(name)
            if found is not None:
                return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for model_type in FAMILIES for name in family_of(model_type).presets)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _families(preset: str) -> Iterator[str]:
    """Iterate over families that may have a preset: ours first, then those of packages."""
    yield from FAMILIES
    yield from (name for name in installed("families") if preset.startswith(f"{name}-"))


PRESETS: Mapping[str, Preset] = _Presets()


def preset_named(name: str | None) -> Preset | None:
    """The preset that a recipe names; None: it names none, or none that there is."""
    return None if name is None else PRESETS.get(name)

"""The named models of all families. A family is imported when one of its presets is looked for."""

from collections.abc import Iterator, Mapping

from shardyard.families.family import Preset
from shardyard.families.registry import family_of, registered


class _Presets(Mapping[str, Preset]):
    """Name -> preset, family by family."""

    def __getitem__(self, name: str) -> Preset:
        for model_type in registered():
            found = family_of(model_type).presets.get(name)
            if found is not None:
                return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for model_type in registered() for name in family_of(model_type).presets)

    def __len__(self) -> int:
        return sum(1 for _ in self)


PRESETS: Mapping[str, Preset] = _Presets()


def preset_named(name: str | None) -> Preset | None:
    """The preset that a recipe names; None: it names none, or none that there is."""
    return None if name is None else PRESETS.get(name)

"""Packages that add to Shardyard, written into a folder as an installer leaves them."""

from collections.abc import Mapping
from pathlib import Path

from shardyard import plugins
from shardyard.config.schema import plugin_sections


class Packages:
    """A folder on the path, in which packages are installed by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        points: Mapping[str, Mapping[str, str]] | str,
        *,
        version: str = "1.0",
        **modules: str,
    ) -> None:
        """Install a package.

        Args:
            points: Group -> name -> module:object; or the text of entry_points.txt.
            modules: Name -> source.
        """
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        text = points if isinstance(points, str) else ""
        for group, names in {} if isinstance(points, str) else points.items():
            text += f"[shardyard.{group}]\n"
            text += "".join(f"{key} = {place}\n" for key, place in names.items())
        (info / "entry_points.txt").write_text(text)
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(source)
        forget()


def forget() -> None:
    """Have packages looked for again."""
    plugins._claims.cache_clear()
    plugin_sections.settings_class_at.cache_clear()
    plugin_sections.described_at.cache_clear()

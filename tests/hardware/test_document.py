"""The page of the catalogue is current."""

from pathlib import Path

from shardyard.hardware.catalogue import ACCELERATORS, instance_names
from shardyard.hardware.document import markdown

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_hardware_is_current() -> None:
    page = ROOT / "docs" / "hardware.md"
    assert page.read_text() == markdown(), (
        "run: python -m shardyard.hardware.document > docs/hardware.md"
    )


def test_every_row_is_on_the_page() -> None:
    for name in [row.name for row in ACCELERATORS] + list(instance_names()):
        assert f"\n| {name} |" in markdown()

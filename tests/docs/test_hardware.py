"""The page of the catalogue has every row of it."""

from docs.generate.hardware import page
from shardyard.hardware.catalogue import ACCELERATORS, instance_names


def test_every_row_is_on_the_page() -> None:
    for name in [row.name for row in ACCELERATORS] + list(instance_names()):
        assert f"\n| {name} |" in page()

"""The row of the source `letters`: read with every recipe that names it."""

from shardyard.config.sources import Scheme

SHELF = Scheme(code="letters.store:Shelf")

"""No search for garbage while modules are imported: they are none, and there are ever more of them.

The searches take a tenth of what a fork server needs for its imports (docs/benchmarks.md).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search() -> Iterator[None]:
    """Put it off until what is open is over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

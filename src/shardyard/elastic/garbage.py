"""No search for garbage while modules are imported: they are none, and there are ever more of them.

The searches take a sixth of the processor time of an import of torch.
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

"""Which of a node's NVIDIA devices a process may use, as its environment says."""

from collections.abc import Mapping

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def named_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Numbers or UUIDs, in the order in which the process sees them; None: it sees all."""
    named = environ.get(_VARIABLE)
    if named is None:
        return None
    return [name for part in named.split(",") if (name := part.strip())]

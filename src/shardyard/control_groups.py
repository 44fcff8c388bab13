"""The control groups of this process, whose limits hold for a container or a job step.

Version 1 and 2; elsewhere than on Linux there are none.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNTED = "sys/fs/cgroup"


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the control group of this process and those above it.

    In a container of its own name space its group is the topmost one. In others the path is the
    host's, of which only the end exists.

    Args:
        controller: ``cpu`` or ``memory``.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mounted = root / _MOUNTED / (controller if controllers else "")
            group = mounted / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mounted))

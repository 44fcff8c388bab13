"""The side job `probe`: what a node finds at the recipe's paths, sent and answered.

`shardyard doctor --probe` sends it; nothing of it stays, here or there.
"""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardyard.doctor.paths import check_paths
from shardyard.node.homes import with_homes
from shardyard.node.side_job import SideWork


def probe(work: SideWork) -> dict[str, Any]:
    """On the node: look at the paths; the folder that this job was given is left as it was."""
    shares_folder = bool(work.arguments["shares_folder"])
    recipe = with_homes(work.recipe, work.run, shares_folder=shares_folder)
    found = check_paths(
        recipe,
        work.run.path.parent,
        checkpoint_bytes=work.arguments["checkpoint_bytes"],
        mounts=work.arguments["mounts"],
    )
    if not shares_folder:
        with suppress(OSError):  # empty, where the scheduler's own files are not in it
            work.run.path.rmdir()
    return {"findings": [asdict(finding) for finding in found]}

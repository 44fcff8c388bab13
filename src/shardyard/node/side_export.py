"""The side job `export` on its node."""

from typing import Any

from shardyard.control.export import EXPORTS, export_from, export_options, run_export
from shardyard.node.side_job import SideWork


def export_there(work: SideWork) -> dict[str, Any]:
    """On the node: export to a folder that it sees, or to S3, or beside the run."""
    to = work.arguments["to"]
    if to is not None:
        return export_from(work.run, str(to), work.arguments)
    options = export_options(work.arguments)
    return run_export(work.run, "--into", str(work.run.path / EXPORTS), options)

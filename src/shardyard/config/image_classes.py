"""Names of the classes of a run's pictures, and the head of a folder's network that fits them."""

from pathlib import Path

from shardyard.config.resolved import Resolved
from shardyard.families.images.class_names import (
    HeadOrder,
    class_names_in,
    head_order,
    outputs_in,
)
from shardyard.io.files import read_json_object


def class_names(resolved: Resolved) -> list[str] | None:
    """Names of the prepared data's classes, in the order of their numbers; None: it is gone."""
    try:
        names: list[str] = read_json_object(Path(resolved.data.dir) / "manifest.json")["classes"]
    except (OSError, ValueError, KeyError):
        return None
    return names


def folder_head(resolved: Resolved) -> HeadOrder | None:
    """Return the order of the head of a run's starting folder; None: there is no such folder."""
    names = class_names(resolved) if resolved.network is not None else None
    if resolved.model_dir is None or names is None:
        return None
    content = read_json_object(Path(resolved.model_dir) / "config.json")
    return head_order(names, class_names_in(content), outputs=outputs_in(content))


def class_notes(resolved: Resolved) -> list[str]:
    """Warn where the head of the folder is reordered, left, or without names."""
    order = folder_head(resolved)
    return [] if order is None or not order.note else [f"{resolved.model_dir}: {order.note}."]

"""Check for matplotlib, which the extra ``plots`` installs; pages without it have no charts."""

from importlib import import_module


def charts_unavailable_reason() -> str:
    """Why a page can have no pictures, and what to install; empty where they can be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        return (
            f"matplotlib is not installed ({error}), so the page has no pictures. Install it: "
            "pip install 'shardyard[plots]'"
        )
    return ""

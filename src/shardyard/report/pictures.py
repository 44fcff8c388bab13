"""Whether pictures can be drawn: by matplotlib, which the extra ``plots`` brings."""

from importlib import import_module


def no_pictures() -> str:
    """Why a page can have no pictures, and what to install; empty where they can be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        return (
            f"matplotlib is not installed ({error}), so the page has no pictures. Install it: "
            "pip install 'shardyard[plots]'"
        )
    return ""

"""Settings in JSON, and their defaults as a recipe would have them, for `config --schema`."""

from typing import Any

from shardyard.config.schema.base import Section
from shardyard.config.schema.reference import Setting, settings


def settings_json() -> list[dict[str, Any]]:
    """Plain values of every setting, for `shardyard config --schema --json`."""
    return [setting_json(setting) for setting in settings().values()]


def setting_json(setting: Setting) -> dict[str, Any]:
    """Plain values of one setting."""
    return {
        "name": setting.name,
        "accepts": setting.accepts,
        "choices": list(setting.choices),
        "default": setting.default,
        "description": setting.sentence,
    }


def write_default(value: Any) -> str:
    """A default as it would be written in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, Section):
        return write_default(value.model_dump(exclude_unset=True))
    if isinstance(value, dict):
        inner = (f"{key}: {write_default(item)}" for key, item in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(write_default(item) for item in value)}]"
    return repr(value) if isinstance(value, str) and value != value.strip() else str(value)

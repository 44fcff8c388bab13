"""A path among the options of a program: held to what paths among the settings are held to."""

import os
from pathlib import Path
from typing import Any

import click


class LocalPath(click.Path):
    """A path of this machine, held to what paths among the settings are held to.

    Without it a URL is the name of a local folder, and what was written there is looked for in vain
    where it was asked to be.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        # `--help` waits for no schema
        from shardyard.config.paths import unreadable_reason
        from shardyard.config.rules.data import path_error
        from shardyard.config.secrets import show, without_secrets

        text = os.fspath(value)
        why = path_error(text) or unreadable_reason(text)
        if why is not None:
            self.fail(f"{show(without_secrets(text))} {why}", param, ctx)
        return super().convert(Path(text).expanduser() if text[:1] == "~" else text, param, ctx)

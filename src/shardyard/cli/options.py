"""Options that several verbs share, so that they are spelled and explained once."""

from pathlib import Path

import click

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds the runs (run.dir).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")

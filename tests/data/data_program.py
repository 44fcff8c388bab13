"""Runs the data program on a recipe, and measures what it takes."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.schema.recipe import Recipe

_BETWEEN = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, used = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as out:
    json.dump([os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024], out)
"""
"""A process starts with the peak of the one that began it, which after hundreds of tests is more
than what is allowed here. A small one stands between."""


@dataclass(frozen=True)
class DataProgram:
    """How it ended."""

    answer: dict[str, Any]
    said: str
    exit_code: int
    peak_bytes: int
    wall_s: float


def run_data_program(recipe: Recipe, folder: Path) -> DataProgram:
    """``python -m shardyard.data`` of the recipe, with its files in the folder."""
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    command = [sys.executable, "-m", "shardyard.data", str(folder / "recipe.json")]
    began_s = time.monotonic()
    with (folder / "told").open("wb") as told, (folder / "said").open("wb") as said:
        subprocess.run(
            [sys.executable, "-S", "-c", _BETWEEN, str(folder / "ended.json"), *command],
            stdout=told,
            stderr=said,
            check=True,
        )
    exit_code, peak_bytes = json.loads((folder / "ended.json").read_text())
    return DataProgram(
        answer=json.loads((folder / "told").read_text()),
        said=(folder / "said").read_text(),
        exit_code=exit_code,
        peak_bytes=peak_bytes,
        wall_s=time.monotonic() - began_s,
    )

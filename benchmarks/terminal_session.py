"""Records the terminal session that the README shows: plan, launch, top, a killed worker, report.

    python -m benchmarks.terminal_session

Runs the commands for real, in a folder of its own, and writes what they printed. `make docs` draws
docs/terminal.svg from the newest such file. It takes some four minutes on two idle cores.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import write_result

ROOT = Path(__file__).parents[1]
RECIPE = "quickstart.yaml"
PLAN = "shardyard plan llama2-7b-finetune.yaml --layouts 1"
LAUNCH = f"shardyard launch {RECIPE} checkpoint.every=100 --on local --yes"
KILL_AFTER_STEP = 230
"""A checkpoint of step 200 is complete by then."""
COLUMNS = 96


def main() -> int:
    """Record the session. Exit code 0, or 1 if the run did not end well."""
    parser = argparse.ArgumentParser(prog="terminal_session", description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardyard-session-"))
    try:
        for name in (RECIPE, PLAN.split()[2]):
            shutil.copy(ROOT / "examples" / name, folder / name)
        scenes = _session(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_result("terminal-session", {"columns": COLUMNS, "scenes": scenes}, args.out)
    return 0


def _session(folder: Path) -> list[dict[str, Any]]:
    """Commands with what they printed, in the order of the README's story."""
    scenes = [_scene(PLAN, folder)]
    _run(f"shardyard prepare {RECIPE}", folder)  # so that the launched run starts at once
    scenes.append(_scene(LAUNCH, folder))
    _wait(lambda: _step(folder) >= KILL_AFTER_STEP)
    scenes.append(_scene("shardyard top quickstart", folder))
    pid = json.loads(_run("shardyard top quickstart --json", folder))["nodes"][0]["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    logs = "shardyard logs quickstart"
    _wait(lambda: "restarted" in _run(logs, folder))
    at_kill = _step(folder)
    _wait(lambda: _step(folder) > at_kill + 20)
    after = [line for line in _run(logs, folder).splitlines() if line]
    lost = next(number for number, line in enumerate(after) if line.startswith("lost "))
    lines = [f"$ {logs} | tail", *after[lost - 2 : lost + 8]]
    scenes.append({"command": f"kill -9 {pid}    # one of its two workers", "lines": lines})
    _wait(lambda: "finished" in _run("shardyard runs", folder))
    scenes.append(_scene("shardyard report quickstart", folder))
    return scenes


def _scene(command: str, folder: Path) -> dict[str, Any]:
    return {"command": command, "lines": _run(command, folder).splitlines()}


def _run(command: str, folder: Path) -> str:
    """Both outputs of a command, without terminal codes, host and folder."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{folder}/", "")


def _step(folder: Path) -> int:
    runs = json.loads(_run("shardyard runs --json", folder))
    return (runs[0]["step"] or 0) if runs else 0


def _wait(is_so: Callable[[], bool], timeout_s: float = 900) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit("the recorded run did not go as expected")
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())

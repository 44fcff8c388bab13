"""What a person at a terminal sees, and what Ctrl-C does there."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.shardyard import PATIENCE_S, Answer, Place, wait_for_step

_IN_A_TERMINAL = """
import os, pty, sys
command = [sys.executable, "-m", "shardyard", *sys.argv[1:]]
sys.exit(os.waitstatus_to_exitcode(pty.spawn(command)))
"""
_CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
_CTRL_C = b"\x03"
FULL = Path("/dev/full")


@contextmanager
def at_a_terminal(
    place: Place, *words: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A verb whose terminal is typed at through stdin and shown on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_A_TERMINAL, *words],
        cwd=place.folder,
        env=place.environment({"TERM": "xterm", **environment}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def screen(process: subprocess.Popen[bytes], typed: bytes = b"") -> str:
    """Everything that was shown until the end."""
    shown, _ = process.communicate(typed, timeout=PATIENCE_S)
    return shown.decode()


def test_a_narrow_terminal_without_colour_folds_instead_of_cutting(place: Place) -> None:
    with at_a_terminal(place, "config", "tiny.yaml", COLUMNS="40", NO_COLOR="1") as process:
        shown = screen(process)
    assert process.returncode == 0
    assert not re.search(r"\x1b\[3[0-7]", shown), "no colour"
    lines = [_CONTROL.sub("", line).rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 40
    assert "collective_timeout_s" in shown and "…" not in shown


def test_a_place_that_takes_no_output_is_an_error_and_no_bug(place: Place) -> None:
    if not FULL.exists():
        pytest.skip(f"needs {FULL}")
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardyard", "config", "--schema"],
            env=place.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device.")
    assert "Check that the place exists, is yours and has room" in done.stderr


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_is_understood_while_the_step_stays_in_sight(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    words = "train", "tiny.yaml", "run.id=typed", "run.steps=1000000", "cluster.devices=1"
    with at_a_terminal(place, *words, COLUMNS="60") as process:
        wait_for_step(place.run_dir("typed"), 3)
        assert process.stdin is not None
        process.stdin.write(_CTRL_C)
        process.stdin.flush()
        shown = _CONTROL.sub("", screen(process))
    assert process.returncode == 130
    assert "finishing the step and saving" in shown
    assert re.search(r"training +\d+/1000000 loss \d", shown)
    assert "`shardyard resume typed` continues from there." in shown
    assert place.state("typed") == "drained"

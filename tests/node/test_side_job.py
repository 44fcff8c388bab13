"""The node's program of a side job: what it answers, and how it ends."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import AccessError
from shardyard.io.terminal import run as run_program
from shardyard.launchers.base import SIDE_KINDS, SideJob
from shardyard.launchers.log_markers import NONCE_VARIABLE, parse
from shardyard.node.side_job import (
    FUNCTIONS,
    LONGEST_ANSWER_BYTES,
    SideWork,
    command,
    function_of,
)

Captured = pytest.CaptureFixture[str]
PROBE = SideJob(kind="probe", arguments={"paths": ["/a"]})
NONCE = "0123456789abcdef"
RECIPE = "model: {preset: llama-tiny}\nrun: {seed: 5}\n"


def look(work: SideWork) -> dict[str, Any]:
    print("this is talk")
    return {"run": work.run.run_id, "seed": work.recipe.run.seed, **work.arguments}


def refuse(_: SideWork) -> dict[str, Any]:
    raise AccessError("the bucket is not yours. Ask its owner.")


def stumble(_: SideWork) -> dict[str, Any]:
    raise ValueError("x" * 100_000)


def be_ended(_: SideWork) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError


def say_too_much(_: SideWork) -> dict[str, Any]:
    return {"files": ["x" * LONGEST_ANSWER_BYTES]}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setenv(NONCE_VARIABLE, NONCE)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    function: str,
    *,
    text: str = RECIPE,
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one answer, and what was said on stderr."""
    monkeypatch.setitem(FUNCTIONS, "probe", f"{__name__}:{function}")
    (folder / "recipe.yaml").write_text(text)
    words = [str(folder / "recipe.yaml"), "--run-dir", str(folder / "r"), "--side", PROBE.to_text()]
    try:
        code = run_program(command, words)
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        code = leaving.code
    out, err = capsys.readouterr()
    marked = [found for line in out.splitlines() if (found := parse(line, nonce=NONCE))]
    (answer,) = [found.content for found in marked if found.kind == "answer"]
    assert answer["side"] == PROBE.label
    return code, answer, err


def test_the_answer_is_what_the_function_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    code, answer, _ = run(tmp_path, monkeypatch, capsys, "look")
    assert (code, answer["exit_code"]) == (0, 0)
    assert answer["result"] == {"run": "r", "seed": 5, "paths": ["/a"]}
    assert NONCE_VARIABLE not in os.environ, "no process that it starts can answer in its place"


@pytest.mark.parametrize(
    ("function", "exit_code", "words"),
    [
        ("refuse", 4, "the bucket is not yours. Ask its owner."),
        ("stumble", 1, "ValueError: xxx"),
        ("be_ended", 143, "it was asked to end before it was done"),
        ("say_too_much", 1, "only its answer is lost"),
    ],
)
def test_an_error_is_answered_with_its_message_and_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    function: str,
    exit_code: int,
    words: str,
) -> None:
    code, answer, err = run(tmp_path, monkeypatch, capsys, function)
    assert (code, answer["exit_code"]) == (exit_code, exit_code)
    assert words in answer["error"] and "result" not in answer
    assert len(json.dumps(answer)) < LONGEST_ANSWER_BYTES
    assert "Traceback" not in err


def test_a_wrong_recipe_is_an_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    code, answer, _ = run(tmp_path, monkeypatch, capsys, "look", text="run: {sede: 5}\n")
    assert code == answer["exit_code"] == 2
    assert "run.sede" in answer["error"]


def test_a_kind_that_this_version_does_not_have_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.delitem(FUNCTIONS, "probe", raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = [str(tmp_path / "recipe.yaml"), "--run-dir", "r", "--side", PROBE.to_text()]
    assert run_program(command, words) == 2
    out, err = capsys.readouterr()
    assert "has no side job 'probe'" in err and "of another version" in err
    assert parse(out, nonce=NONCE) is not None


def test_every_kind_has_its_function() -> None:
    assert set(FUNCTIONS) == set(SIDE_KINDS)
    for kind in SIDE_KINDS:
        assert callable(function_of(kind))

"""`shardyard chat` in a terminal and in a pipe: turns, Ctrl-C, and nothing left running."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.cli.chat import _greeting, _in_one_line
from shardyard.control.chat import ChatRequest, open_chat
from shardyard.errors import ShardyardError
from tests.elastic.agents import wait_until
from tests.evaluation.chat_models import write_llama
from tests.terminal import terminal

SHARDYARD = [sys.executable, "-m", "shardyard"]
ENVIRON = {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers end only after many thousand tokens."""
    return write_llama(tmp_path_factory.mktemp("endless") / "model", context=100_000)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.heavy
def test_a_dialogue_in_a_terminal(endless: Path, tmp_path: Path) -> None:
    words = [*SHARDYARD, "chat", str(endless), "--max-tokens", "90000"]
    with terminal(words, folder=tmp_path, environ=ENVIRON) as screen:
        screen.wait("loading .*model")
        greeting = screen.wait("> ")
        assert "float32 on cpu, reads 100,000 tokens" in greeting and "/quit ends" in greeting
        assert "no chat template" not in greeting
        for question in ("Who are you?", "Why?"):
            screen.type(f"{question}\n")
            screen.wait(r"\?\n[^\n]{4}")
            screen.type("\x03")
            screen.wait(r"\[stopped\]\n> ")
        screen.type("/help\n")
        screen.wait("unknown command /help. Commands: /reset, /quit\n> ")
        screen.type("/reset\n")
        screen.wait("new dialogue\n> ")
        screen.type("\U00100000\n")
        screen.wait("error: the prompt holds a character between .*\n> ")
        (program,) = children_of(screen.pid)
        screen.type("\x03")
        screen.wait("press Ctrl-C again or type /quit to end")
        screen.type("\x03")
        screen.wait("interrupted")
        wait_until(lambda: not is_running(program) and not is_running(screen.pid))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed terminal", "kill"])
def test_nothing_is_left_running(way: str, endless: Path, tmp_path: Path) -> None:
    words = [*SHARDYARD, "chat", str(endless), "--prompt=Why?", "--max-tokens=90000"]
    with terminal(words, folder=tmp_path, environ=ENVIRON) as screen:
        screen.wait(r"[^\n]{4}")
        (program,) = children_of(screen.pid)
        if way == "kill":
            os.kill(screen.pid, signal.SIGKILL)
        else:
            screen.close()
        wait_until(lambda: not is_running(program) and not is_running(screen.pid))


@pytest.mark.heavy
def test_lines_of_a_pipe_are_dialogues_of_their_own(endless: Path, tmp_path: Path) -> None:
    def run(lines: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SHARDYARD, "chat", str(endless), "--max-tokens=8", *options],
            input=lines, capture_output=True, text=True, cwd=tmp_path, check=False,
            env={**os.environ, **ENVIRON},
        )  # fmt: skip

    done = run("Why?\nWho are you?\nWhy?\n\n", "--json")
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert first == third and first["prompt"] == "Why?" and second["prompt"] == "Who are you?"
    assert (first["tokens"], first["finish"], first["has_template"]) == (8, "max_tokens", True)
    assert done.returncode == 2
    assert "the answer to line 1 is cut at --max-tokens 8" in done.stderr
    assert "error: line 4 of stdin is empty. Leave empty lines out: `grep . " in done.stderr


@pytest.mark.slow
def test_a_program_that_is_killed_is_an_error(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", template=None)
    with open_chat(folder, ChatRequest(max_tokens=4)) as session:
        assert not session.about["has_template"]
        assert session.ask("Who are", lambda _: None)["tokens"] == 4
        (program,) = children_of(os.getpid())
        os.kill(program, signal.SIGKILL)
        with pytest.raises(ShardyardError, match=r"signal SIGKILL.*use --dtype bfloat16 or fewer"):
            session.ask("Who are", lambda _: None)
        assert not session.is_running()


def test_the_greeting_names_the_model_and_a_template_that_lacks() -> None:
    about = {"model": "/m", "has_template": False, "context_tokens": 2048, "dtype": "float32",
             "device": "cpu"}  # fmt: skip
    greeting = _greeting({**about, "run": "my-run", "step": 1200})
    assert greeting.startswith("step 1,200 of my-run (float32 on cpu, reads 2,048 tokens)\n")
    assert "no chat template: it continues your text, each time from the beginning" in greeting


def test_an_answer_in_one_line_can_be_read_back() -> None:
    text = "one\ntwo\\n\r"
    line = _in_one_line(text)
    assert "\n" not in line and line.encode().decode("unicode_escape") == text


def test_json_of_a_dialogue_in_a_terminal_is_rejected(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard, screen = pty.openpty()
    with open(screen) as stdin:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["chat", "model", "--json"]) == 2
    os.close(keyboard)
    assert "stdin is a terminal. Add --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "stdin is no terminal and has no lines. Add --prompt"),
        (b"caf\xe9\n", "stdin is no UTF-8 text. Convert it: `iconv -f latin1 -t utf-8"),
        (b"\n", "line 1 of stdin is empty. Leave empty lines out: `grep . questions.txt"),
    ],
)
def test_a_pipe_without_a_question_starts_nothing(
    content: bytes, why: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    assert main(["chat", "model"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["gone"], "'gone' is neither a run folder nor the beginning of a run id"),
        (["gone@best", "--step", "3"], "gone@best and --step 3 name two checkpoints"),
        (["model", "--step", "best"], "is the folder of a model, which has no steps. Leave --step"),
        (["model", "--top-k", "5"], "--top-k 5 has no effect at --temperature 0"),
        (["model", "--seed", "5"], "--seed 5 has no effect at --temperature 0"),
        (["model", "--prompt", " "], "--prompt is empty. Write a question"),
    ],
)
def test_a_wrong_request_starts_nothing(
    words: list[str], why: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
    assert main(["chat", *words]) == 2
    assert why in capsys.readouterr().err

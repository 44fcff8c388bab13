"""Chat with a model: a program with the model answers one question after the other.

``evaluation/chat.py`` describes the lines of JSON that both sides write.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardyard.control.evaluate import model_place
from shardyard.control.submission import Launchers
from shardyard.control.subprocesses import ending_of, error_of
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.own_processes import python_program
from shardyard.rundir.layout import RUNS_DIR

_PROGRAM = "shardyard.evaluation.chat"
_END_S = 10.0
"""Time in which the program ends by itself, before it is killed."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """Model to chat with, and how it answers."""

    step: str = "latest"
    """Checkpoint of a run: a step, latest or best."""
    dtype: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    """0: the likeliest token; else tokens are drawn."""
    top_k: int | None = None
    seed: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return what the program reads first: through a pipe, as a command line is visible to
        all users.

        Raises:
            RequestError: A setting has no effect.
        """
        if not self.temperature:
            for option, value in (("--top-k", self.top_k), ("--seed", self.seed)):
                if value is not None:
                    raise RequestError(
                        f"{option} {value} has no effect at --temperature 0, where each token is "
                        f"the likeliest. Add --temperature 0.8, or leave {option} out."
                    )
        names = ("system", "max_tokens", "temperature", "top_k", "seed")
        return {name: getattr(self, name) for name in names}


@contextmanager
def open_chat(
    model: str | Path,
    request: ChatRequest,
    *,
    runs_dir: Path = Path(RUNS_DIR),
    launchers: Launchers | None = None,
) -> Iterator["ChatSession"]:
    """Load a model in a program of its own, which ends with the block.

    Raises:
        RequestError: It is neither a run nor a model folder, or no causal language model.
        ShardyardError: The model cannot be loaded.
    """
    settings = request.settings()
    place = model_place(model, request.step, runs_dir=runs_dir, launchers=launchers)
    options = [*place.options, *([f"--dtype={request.dtype}"] if request.dtype else [])]
    session = ChatSession(options)
    try:
        session.start(settings)
        yield session
    finally:
        session.end()


class ChatSession:
    """The program with the model."""

    def __init__(self, options: list[str]) -> None:
        # Ctrl-C reaches every process of the terminal. This one is asked through its pipe instead.
        ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process = subprocess.Popen(
                python_program(_PROGRAM, *options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, ours)
        self.about: dict[str, Any] = {}
        """Facts about the loaded model: ``model``, ``has_template``, ``context_tokens``, ``dtype``,
        ``device``; of a run also ``run`` and ``step``."""

    def start(self, settings: dict[str, Any]) -> None:
        """Send the settings, and wait until the model is loaded."""
        self._send(settings)
        self.about = self._receive()["ready"]

    def ask(self, text: str, on_text: Callable[[str], None]) -> dict[str, Any]:
        """Ask, and return the answer with the number of its tokens and why it ended.

        Ctrl-C ends the answer; the second one raises.

        Args:
            on_text: Called with each piece of the answer as it comes.

        Raises:
            ShardyardError: The question cannot be answered; the dialogue is as before.
            KeyboardInterrupt: Ctrl-C was pressed twice, or the terminal was closed.
        """
        self._send({"ask": text})
        with self._stopped_by_interrupt():
            while "answer" not in (line := self._receive()):
                on_text(line["text"])
        answer: dict[str, Any] = line["answer"]
        return answer

    def reset(self) -> None:
        """Begin a new dialogue."""
        self._send({"reset": True})

    def is_running(self) -> bool:
        """Whether the program still answers."""
        return self._process.poll() is None

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        pressed = False

        def stop(_number: int, _frame: FrameType | None) -> None:
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True
            self._send({"stop": True})

        previous = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and says why: what it wrote is read next
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            content: dict[str, Any] = parse_json(line)
        except ValueError as error:
            raise ShardyardError(
                f"the program with the model ended with {ending_of(self._process.wait())}. Its "
                "last lines are above. If memory was short, use --dtype bfloat16 or fewer "
                "--max-tokens."
            ) from error
        if "error" in content:
            raise error_of(
                content.get("exit_code"), content["error"], page=str(content.get("page", ""))
            )
        return content

    def end(self) -> None:
        """End the program, also while it starts; it is killed if it does not follow."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.terminate()
        try:
            process.wait(_END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        finally:
            process.stdout.close()

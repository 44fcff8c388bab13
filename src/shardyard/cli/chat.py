"""`shardyard chat`: talk to the model of a run or a folder, in the terminal or in a pipe."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardyard.cli.completion import by, runs
from shardyard.cli.options import json_option, launchers_in, runs_dir_option
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.path_option import LocalPath
from shardyard.io.sanitize import sanitize
from shardyard.io.terminal import echo, echo_err, echo_raw

if TYPE_CHECKING:
    from shardyard.control.chat import ChatRequest, ChatSession  # `--help` waits for no schema

_RESET, _QUIT = "/reset", "/quit"
_COMMAND = re.compile(r"/[a-z]+")
_ENDS = {
    "max_tokens": "cut at --max-tokens {max_tokens}",
    "context": "cut: the model reads {context_tokens:,} tokens, question and answer together",
    "interrupted": "stopped",
}
"""Reason for the end of an answer, other than the model's own, in words."""


@click.command("chat")
@click.argument("model", metavar="RUN|FOLDER", type=LocalPath(), shell_complete=by(runs))
@click.option(
    "--prompt", metavar="TEXT", help="Answer this and end. Default: ask in the terminal, or "
    "answer each line of stdin.",
)  # fmt: skip
@click.option("--system", metavar="TEXT", help="System message, if the chat template has one.")
@click.option(
    "--step",
    default="latest",
    show_default=True,
    help="Checkpoint of a run: a step, latest or best.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0: each token is the likeliest. Above 0: tokens are drawn.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    help="Draw from this many of the likeliest tokens; 0: all. Default: the model's, else all.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    help="Seed of each answer. Default: another one each time.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Format of the weights in memory. Default: as saved.",
)
@runs_dir_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    model: str,
    *,
    prompt: str | None,
    system: str | None,
    step: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    dtype: str | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Talk to the model of a run's checkpoint, a model folder or a PEFT adapter folder.

    The dialogue follows the model's chat template. A model without one continues your text.
    """
    from shardyard.control.chat import ChatRequest, open_chat  # `--help` waits for no schema

    request = ChatRequest(
        step=step, dtype=dtype, system=system, max_tokens=max_tokens, temperature=temperature,
        top_k=top_k, seed=seed,
    )  # fmt: skip
    is_asked_here = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if is_asked_here and as_json:
        raise RequestError(
            "--json prints an answer to --prompt or to lines of stdin, and stdin is a terminal. "
            'Add --prompt "TEXT", or leave --json out.'
        )
    prompts = iter(()) if is_asked_here else _prompts(prompt)
    if is_asked_here:
        echo_err(f"loading {model}")
    with open_chat(model, request, runs_dir=runs_dir, launchers=launchers_in(context)) as session:
        if is_asked_here:
            _Terminal(session, request).run()
        elif prompt is not None:
            _answer_prompt(session, request, prompt, as_json=as_json)
        else:
            _answer_lines(session, request, prompts, as_json=as_json)


# --- without a terminal ---------------------------------------------------------------------------


def _answer_prompt(
    session: "ChatSession", request: "ChatRequest", prompt: str, *, as_json: bool
) -> None:
    """Print the answer to one prompt as it comes.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it.
    """
    answer = session.ask(prompt, _nowhere if as_json else _show)
    if as_json:
        echo(json.dumps({**session.about, "prompt": prompt, **answer}, indent=1))
    else:
        echo()
    _log_end(session, request, answer, "the answer")


def _answer_lines(
    session: "ChatSession", request: "ChatRequest", prompts: Iterator[str], *, as_json: bool
) -> None:
    """Print an answer to each line of stdin, in one line; each line is a dialogue of its own.

    Raises:
        RequestError: A line is empty.
        KeyboardInterrupt: Ctrl-C ended an answer.
    """
    for number, prompt in enumerate(prompts, 1):
        session.reset()
        answer = session.ask(prompt, _nowhere)
        if as_json:
            echo(json.dumps({**session.about, "prompt": prompt, **answer}))
        else:
            echo(_in_one_line(answer["answer"]))
        _log_end(session, request, answer, f"the answer to line {number}")


def _prompts(prompt: str | None) -> Iterator[str]:
    """The prompt, or lines of stdin, of which the first is read now: before a model is loaded.

    Raises:
        RequestError: It is empty.
    """
    if prompt is not None:
        if not prompt.strip():
            raise RequestError("--prompt is empty. Write a question, or a text to continue.")
        return iter((prompt,))
    lines = _lines()
    first = next(lines, None)
    if first is None:
        raise RequestError(
            'stdin is no terminal and has no lines. Add --prompt "TEXT", or give one question a '
            "line: `shardyard chat RUN < questions.txt`."
        )
    return chain((first,), lines)


def _lines() -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin or (), 1):
            if not line.strip():
                raise RequestError(
                    f"line {number} of stdin is empty. Leave empty lines out: "
                    "`grep . questions.txt | shardyard chat RUN`."
                )
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            "stdin is no UTF-8 text. Convert it: `iconv -f latin1 -t utf-8 FILE`, or the encoding "
            "that it has in place of latin1."
        ) from error


def _in_one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _log_end(
    session: "ChatSession", request: "ChatRequest", answer: dict[str, Any], name: str
) -> None:
    """Log why an answer is cut short.

    Raises:
        KeyboardInterrupt: It was stopped.
    """
    if answer["finish"] == "interrupted":
        raise KeyboardInterrupt
    if answer["finish"] in _ENDS:
        echo_err(f"{name} is {_end_in_words(session, request, answer)}")


def _end_in_words(session: "ChatSession", request: "ChatRequest", answer: dict[str, Any]) -> str:
    return _ENDS[answer["finish"]].format(
        max_tokens=request.max_tokens, context_tokens=session.about["context_tokens"]
    )


def _show(text: str) -> None:
    echo_raw(sanitize(text))


def _nowhere(_text: str) -> None:
    """A piece of an answer that is printed as a whole."""


# --- in a terminal --------------------------------------------------------------------------------


class _Terminal:
    """A dialogue with the user of a terminal."""

    def __init__(self, session: "ChatSession", request: "ChatRequest") -> None:
        self._session, self._request = session, request
        self._was_interrupted = False

    def run(self) -> None:
        """Ask and answer until the user ends it.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C twice.
        """
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and remembers them

        echo_err(_greeting(self._session.about))
        while (text := self._read()) != _QUIT:
            if text == _RESET:
                self._session.reset()
                echo_err("new dialogue")
            elif _COMMAND.fullmatch(text):
                echo_err(f"unknown command {text}. Commands: {_RESET}, {_QUIT}")
            elif text:
                self._answer(text)

    def _read(self) -> str:
        """Return the next line, or the command to end where there is none."""
        while True:
            try:
                text = input("> ").strip()
            except (EOFError, OSError):  # Ctrl-D, or the terminal is gone
                echo_err("")
                return _QUIT
            except KeyboardInterrupt:
                if self._was_interrupted:
                    raise
                self._was_interrupted = True
                echo_err(f"\npress Ctrl-C again or type {_QUIT} to end")
                continue
            self._was_interrupted = False
            return text

    def _answer(self, text: str) -> None:
        try:
            answer = self._session.ask(text, _show)
        except ShardyardError as error:
            if not self._session.is_running():
                raise
            echo_err(f"error: {error.described}")
            return
        echo()
        self._was_interrupted = answer["finish"] == "interrupted"
        if answer["turns_left_out"]:
            echo_err(
                f"[the oldest {answer['turns_left_out']} turns are left out: the model reads "
                f"{self._session.about['context_tokens']:,} tokens]"
            )
        if answer["finish"] in _ENDS:
            echo_err(f"[{_end_in_words(self._session, self._request, answer)}]")
        elif not answer["answer"]:
            echo_err("[an empty answer: the model ended it at once]")


def _greeting(about: dict[str, Any]) -> str:
    """Say which model answers, and how to end."""
    name = f"step {about['step']:,} of {about['run']}" if "run" in about else about["model"]
    facts = f"{about['dtype']} on {about['device']}, reads {about['context_tokens']:,} tokens"
    way = "" if about["has_template"] else (
        "\nThe model has no chat template: it continues your text, each time from the beginning."
    )  # fmt: skip
    return (
        f"{name} ({facts}){way}\n{_RESET} begins a new dialogue, {_QUIT} ends. Ctrl-C stops an "
        "answer, twice it ends the program."
    )

"""Answer the questions of `shardyard chat`, one after the other.

Run as a program: ``python -m shardyard.evaluation.chat --run RUN_DIR|--folder FOLDER``. It reads
lines of JSON and writes lines of JSON, in this order:

    > {"system": ..., "max_tokens": ..., "temperature": ..., "top_k": ..., "seed": ...}
    < {"ready": {...}}
    > {"ask": TEXT}        < {"text": PIECE}..., then {"answer": {...}}
    > {"reset": true}      forgets all turns
    > {"stop": true}       ends the answer that is being written

An error is ``{"error": message, "exit_code": n}``; one before ``ready`` ends the program. It also
ends once its input does, so nothing is left running where its caller is gone.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shardyard.config.adapter_files import AdapterFolder, is_adapter_folder, read_adapter_folder
from shardyard.control_groups import usable_cores
from shardyard.data.eval_tasks.token_requests import model_length
from shardyard.errors import EXIT_INTERRUPTED, ShardyardError
from shardyard.evaluation.adapters import add_adapter, base_folder
from shardyard.evaluation.answers import AnsweringModel, Sampling
from shardyard.evaluation.checkpoint_folder import exported_checkpoint
from shardyard.evaluation.dialogue import ChatDialogue, encoder_of
from shardyard.evaluation.language_model import (
    DTYPES,
    check_folder,
    check_memory,
    load_config,
    load_model,
    load_tokenizer,
)
from shardyard.io.files import parse_json
from shardyard.own_processes import signals_as_exceptions
from shardyard.parallel.device import available_device, select_device
from shardyard.rundir.layout import RunDir

VERB = "chat"
Send = Callable[[dict[str, Any]], None]


class Chat:
    """A loaded model and a dialogue with it."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, dtype: str | None) -> None:
        """Load the model of a folder.

        Args:
            settings: ``system``, ``max_tokens`` and the fields of ``Sampling``.

        Raises:
            ShardyardError: It is no causal language model, or cannot be loaded.
        """
        adapter, weights = _adapter_and_weights(folder)
        check_folder(weights, verb=VERB)
        has_own = (folder / "tokenizer_config.json").is_file()
        tokenizer = load_tokenizer(folder if has_own else weights)
        self.context_tokens = model_length(load_config(weights), tokenizer)
        self._max_tokens: int = settings["max_tokens"]
        self.dialogue = ChatDialogue(
            encoder_of(tokenizer, str(folder)),
            has_template=bool(tokenizer.chat_template),
            context_tokens=self.context_tokens,
            max_tokens=self._max_tokens,
            system=settings["system"],
        )
        check_memory(weights, dtype, 1)
        torch.set_num_threads(usable_cores())
        model = load_model(weights, dtype)
        if adapter is not None:
            add_adapter(model, adapter)
        model = model.to(select_device(available_device(), 0)).eval()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(model.device)
        end_ids, end_text = self.dialogue.ends()
        self.model = AnsweringModel(
            model,
            tokenizer,
            end_ids=end_ids,
            end_text=end_text,
            sampling=Sampling(**{key: settings[key] for key in ("temperature", "top_k", "seed")}),
        )

    def answer(
        self, text: str, on_text: Callable[[str], None], stop: threading.Event
    ) -> dict[str, Any]:
        """Answer a question; returns what is printed of it.

        Raises:
            ShardyardError: The question cannot be answered; the dialogue is as before.
        """
        prompt = self.dialogue.ask(text)
        found = self.model.answer(
            prompt.ids,
            room=prompt.room,
            max_tokens=self._max_tokens,
            continues=not self.dialogue.has_template,
            on_text=on_text,
            stop=stop,
        )
        self.dialogue.answered(found.text)
        return {
            "answer": found.text,
            "tokens": len(found.ids),
            "prompt_tokens": len(prompt.ids),
            "turns_left_out": prompt.turns_left_out,
            "finish": found.finish,
        }


def _adapter_and_weights(folder: Path) -> tuple[AdapterFolder | None, Path]:
    """The adapter of a folder, if it is one, and the folder of the weights."""
    if not is_adapter_folder(folder):
        return None, folder
    adapter = read_adapter_folder(folder)
    return adapter, base_folder(adapter)


class _Requests:
    """Lines of the caller, read by a thread, so that one can stop an answer."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.stop = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            request = parse_json(line)
            if "stop" in request:
                self.stop.set()
            else:
                self.stop.clear()  # one that came after its answer had ended
                self._queue.put(request)
        # the caller is gone: end, also while a model is loaded or an answer is written
        os.kill(os.getpid(), signal.SIGTERM)

    def next(self) -> dict[str, Any]:
        """Wait for the next request that is no stop."""
        return self._queue.get()


def _lines_of(descriptor: int) -> Iterator[bytes]:
    """Lines of a pipe. A buffered file would hold a lock that Python's own exit waits for."""
    rest = b""
    while chunk := os.read(descriptor, 2**16):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _open(options: argparse.Namespace, settings: dict[str, Any]) -> tuple[Chat, dict[str, Any]]:
    """Load the model of a folder or a run; returns it with what it is."""
    if options.run is None:
        folder = options.folder.resolve()
        return Chat(folder, settings, dtype=options.dtype), {"model": str(folder)}
    run_dir = RunDir(options.run.resolve())
    with ExitStack() as stack:  # the exported weights are removed once they are in memory
        folder, step = stack.enter_context(
            exported_checkpoint(run_dir, options.step, options.dtype, verb=VERB)
        )
        chat = Chat(folder, settings, dtype=options.dtype)
    facts = {"model": str(run_dir.checkpoint(step)), "run": run_dir.run_id, "step": step}
    return chat, facts


def serve(options: argparse.Namespace, lines: Iterable[bytes], send: Send) -> None:
    """Load the model, then answer until the caller ends.

    Raises:
        ShardyardError: The model cannot be loaded.
    """
    requests = _Requests(lines)
    chat, facts = _open(options, requests.next())
    about = {
        "has_template": chat.dialogue.has_template, "context_tokens": chat.context_tokens,
        "dtype": chat.dtype, "device": chat.device,
    }  # fmt: skip
    send({"ready": {**facts, **about}})
    while True:
        request = requests.next()
        if "reset" in request:
            chat.dialogue.reset()
            continue
        try:
            answer = chat.answer(request["ask"], lambda text: send({"text": text}), requests.stop)
        except ShardyardError as error:
            send(error.to_json())
            continue
        send({"answer": answer})


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardyard.evaluation.chat")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path)
    where.add_argument("--run", type=Path)
    parser.add_argument("--step", default="latest", help="a number, latest or best")
    parser.add_argument("--dtype", choices=DTYPES)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Serve the caller of this process; returns the exit code."""
    options = _parse(argv)
    # what a library prints must not come between the lines of the protocol
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    try:
        with signals_as_exceptions():
            serve(options, _lines_of(sys.stdin.fileno()), send)
    except (KeyboardInterrupt, BrokenPipeError):  # the terminal, or the caller, is gone
        return EXIT_INTERRUPTED
    except ShardyardError as error:
        send(error.to_json())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

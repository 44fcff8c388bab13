"""Evaluate a model folder, or a checkpoint of a run, on tasks and text.

Run as a program: ``python -m shardyard.evaluation.run --run RUN_DIR [--task FILE]...``. It prints
one line of JSON. A checkpoint is first exported next to the run, as `shardyard export`
does, with adapters merged. Each process has the whole model and answers its share of the batches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from shardyard.data.eval_tasks.prepare import examples_of
from shardyard.data.eval_tasks.rows import read_documents
from shardyard.data.eval_tasks.scored_requests import Requests, result_of
from shardyard.data.eval_tasks.task_file import find_tasks
from shardyard.data.eval_tasks.token_requests import (
    Continuation,
    TextGeneration,
    TokenRequests,
    model_length,
)
from shardyard.errors import RequestError, ShardyardError
from shardyard.evaluation.checkpoint_folder import exported_checkpoint
from shardyard.evaluation.language_model import (
    BATCH_TOKENS,
    DTYPES,
    check_folder,
    check_memory,
    load_config,
    load_tokenizer,
    make_batches,
)
from shardyard.evaluation.worker import (
    Work,
    answer_share,
    read_answers,
    write_answers,
    write_work,
)
from shardyard.io.files import write_json
from shardyard.own_processes import python_program, signals_as_exceptions
from shardyard.parallel.device import available_device
from shardyard.rundir.layout import RunDir

RESULTS = "evaluations"
"""Folder in a run's folder: one file of results for each call."""
_POLL_S = 0.05


def evaluate_folder(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a model folder; returns what is printed.

    Raises:
        ShardyardError: A task, the model or a process failed.
    """
    check_folder(folder)
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    length = model_length(config, tokenizer)
    if options.context is not None and options.context > length:
        raise RequestError(f"--context {options.context}: the model reads up to {length} tokens.")
    context = options.context or length
    requests = Requests(TokenRequests(tokenizer, context))
    scored = [requests.add_task(task, examples_of(task, options.limit)) for task in options.tasks]
    scored += [
        requests.add_texts(source, _documents(source, options.text_key, options.limit))
        for source in options.text
    ]
    processes = _processes(options.processes)
    check_memory(folder, options.dtype, processes)
    text_config = getattr(config, "text_config", None) or config
    batches = make_batches(
        requests.all, batch_tokens=options.batch_tokens, vocab_size=int(text_config.vocab_size)
    )
    work = Work(
        model=str(folder),
        dtype=options.dtype,
        batch_tokens=options.batch_tokens,
        processes=min(processes, max(1, len(batches))),
        continuations={n: r for n, r in enumerate(requests.all) if isinstance(r, Continuation)},
        generations={n: r for n, r in enumerate(requests.all) if isinstance(r, TextGeneration)},
        batches=batches,
    )
    print(
        f"scoring {len(requests.all):,} requests in {len(batches):,} batches, "
        f"{work.processes} process(es) on {available_device()}",
        file=sys.stderr,
        flush=True,
    )
    started_s = time.monotonic()
    answers, dtype = _answers(work)
    return {
        "model": str(folder),
        "dtype": dtype,
        "context_tokens": context,
        "processes": work.processes,
        "wall_s": round(time.monotonic() - started_s, 3),
        "requests": len(requests.all),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "results": [result_of(each, requests.all, answers) for each in scored],
    }


def _documents(source: str, text_key: str, limit: int | None) -> list[str]:
    documents = []
    for number, text in enumerate(read_documents(source, text_key)):
        if limit is not None and number >= limit:
            break
        documents.append(text)
    return documents


def _processes(requested: int | None) -> int:
    """Number of processes: one for each accelerator; on a CPU, one."""
    device = available_device()
    devices = 1 if device == "cpu" else int(torch.get_device_module(device).device_count())
    if requested is not None and device != "cpu" and requested > devices:
        raise RequestError(f"--processes {requested}: this machine has {devices} accelerator(s).")
    return requested or devices


def _answers(work: Work) -> tuple[dict[int, Any], str]:
    """Answers to all requests by their indices, and the dtype of the weights."""
    with tempfile.TemporaryDirectory(prefix="shardyard-evaluate-") as name:
        folder = Path(name)
        if work.processes == 1:
            mine, dtype = answer_share(work, 0)
            write_answers(mine, dtype, folder, 0)
        else:
            write_work(work, folder)
            _run_workers(work.processes, folder)
        answers: dict[int, Any] = {}
        dtype = ""
        for rank in range(work.processes):
            content = read_answers(folder, rank)
            dtype = content["dtype"]
            answers |= {int(index): each for index, each in content["answers"].items()}
    return answers, dtype


def _run_workers(number: int, folder: Path) -> None:
    """Run the processes to their end.

    Raises:
        ShardyardError: One failed; the others are ended.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(number):
            work = (str(folder), str(rank), str(os.getpid()))
            command = python_program("shardyard.evaluation.worker", *work)
            running[rank] = subprocess.Popen(command)
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[rank]
                if code != 0:
                    raise _worker_error(folder, rank, code)
            time.sleep(_POLL_S)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _worker_error(folder: Path, rank: int, code: int) -> ShardyardError:
    try:
        content = read_answers(folder, rank)
    except (OSError, ValueError):
        return ShardyardError(
            f"process {rank} of the evaluation ended with exit code {code}; its output is above. "
            "If it was killed (-9), memory was short: use fewer --processes, or --dtype bfloat16."
        )
    kind = RequestError if content["exit_code"] == RequestError.exit_code else ShardyardError
    return kind(content["error"])


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    options.tasks = find_tasks(options.task)
    if options.run is None:
        return evaluate_folder(options.folder.resolve(), options)
    run_dir = RunDir(options.run.resolve())
    with exported_checkpoint(run_dir, options.step, options.dtype, verb="evaluate") as found:
        folder, step = found
        result = evaluate_folder(folder, options)
    result |= {"model": str(run_dir.checkpoint(step)), "run": run_dir.run_id, "step": step}
    result["t"] = round(time.time(), 3)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    file = run_dir.path / RESULTS / f"step-{step:08d}-{stamp}.json"
    try:
        write_json(file, result)
    except ShardyardError as error:
        print(f"warning: the result is not kept in the run folder: {error}", file=sys.stderr)
        return result
    return {**result, "file": str(file)}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardyard.evaluation.run")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path)
    where.add_argument("--run", type=Path)
    parser.add_argument("--step", default="latest", help="a number, latest or best")
    parser.add_argument("--task", action="append", default=[])
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--context", type=int)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Evaluate and print the result; returns the exit code."""
    try:
        with signals_as_exceptions():
            result = _evaluate(_parse(argv))
    except ShardyardError as error:
        print(json.dumps(error.to_json()))
        return error.exit_code
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

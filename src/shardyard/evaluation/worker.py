"""One process of an evaluation: answers its share of the batches with the model on its device.

Run as a program: ``python -m shardyard.evaluation.worker FOLDER RANK PARENT``. The folder has the
work as JSON; the answers, or the error, are written there. It ends with the process PARENT.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardyard.control_groups import usable_cores
from shardyard.data.eval_tasks.token_requests import Continuation, TextGeneration, TokenRequest
from shardyard.errors import ShardyardError
from shardyard.evaluation.language_model import (
    Answer,
    ScoredContinuation,
    ScoringModel,
    load_tokenizer,
)
from shardyard.io.files import read_json_object
from shardyard.own_processes import end_with

WORK, ANSWERS = "work.json", "answers-{}.json"
_MOST_BYTES = 2**33
_PROGRESS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """All that the processes of an evaluation share."""

    model: str
    dtype: str | None
    batch_tokens: int
    processes: int
    continuations: dict[int, Continuation]
    """Index among all requests -> request."""
    generations: dict[int, TextGeneration]
    batches: list[list[int]]
    """Indices of requests; process r answers each batch n for which n % processes = r."""

    def request(self, index: int) -> TokenRequest:
        found = self.continuations.get(index)
        return self.generations[index] if found is None else found


def write_work(work: Work, folder: Path) -> None:
    """Write the work for processes to read."""
    (folder / WORK).write_text(json.dumps(asdict(work)))


def read_work(folder: Path) -> Work:
    """Read the work of a folder."""
    content = read_json_object(folder / WORK, limit_bytes=_MOST_BYTES)
    scored, generated = content.pop("continuations"), content.pop("generations")
    return Work(
        **content,
        continuations={
            int(index): Continuation(tuple(each["inputs"]), tuple(each["targets"]))
            for index, each in scored.items()
        },
        generations={
            int(index): TextGeneration(
                tuple(each["prompt"]), tuple(each["until"]), each["max_tokens"]
            )
            for index, each in generated.items()
        },
    )  # fmt: skip


def answer_share(work: Work, rank: int) -> tuple[dict[int, Answer], str]:
    """Answer the batches of one process; returns the answers by index, and the model's dtype.

    Raises:
        ShardyardError: The model cannot be loaded, or a batch does not fit.
    """
    torch.set_num_threads(max(1, usable_cores() // work.processes))
    folder = Path(work.model)
    model = ScoringModel(
        folder, load_tokenizer(folder), dtype=work.dtype, rank=rank,
        batch_tokens=work.batch_tokens,
    )  # fmt: skip
    mine = work.batches[rank :: work.processes]
    answers: dict[int, Answer] = {}
    shown_s = time.monotonic()
    for number, batch in enumerate(mine):
        results = model.answer([work.request(index) for index in batch])
        answers.update(zip(batch, results, strict=True))
        if rank == 0 and time.monotonic() - shown_s > _PROGRESS_S:
            shown_s = time.monotonic()
            print(f"evaluated {number + 1:,} of {len(mine):,} batches", file=sys.stderr, flush=True)
    return answers, model.dtype


def write_answers(answers: dict[int, Answer], dtype: str, folder: Path, rank: int) -> None:
    """Write the answers of one process."""
    content = {"dtype": dtype, "answers": {index: _plain(each) for index, each in answers.items()}}
    (folder / ANSWERS.format(rank)).write_text(json.dumps(content))


def _plain(answer: Answer) -> str | tuple[float, bool]:
    if isinstance(answer, ScoredContinuation):
        return answer.log_likelihood, answer.is_greedy
    return answer


def read_answers(folder: Path, rank: int) -> dict[str, Any]:
    """Read what ``write_answers`` wrote, or ``error`` with its ``exit_code``."""
    return read_json_object(folder / ANSWERS.format(rank), limit_bytes=_MOST_BYTES)


def main(argv: list[str]) -> int:
    """Answer a share; returns the exit code."""
    folder, rank = Path(argv[0]), int(argv[1])
    end_with(int(argv[2]))
    try:
        answers, dtype = answer_share(read_work(folder), rank)
    except ShardyardError as error:
        (folder / ANSWERS.format(rank)).write_text(json.dumps(error.to_json()))
        return error.exit_code
    write_answers(answers, dtype, folder, rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

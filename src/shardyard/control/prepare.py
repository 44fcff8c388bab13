"""Text into token shards, pictures into theirs, in a process of its own."""

import tempfile
from pathlib import Path
from typing import Any

from shardyard.config.model.source import has_tokenizer, table_rows
from shardyard.config.resolve import keep_previous
from shardyard.config.resolved import DataFacts, Resolved
from shardyard.config.schema.data import Data
from shardyard.config.task_lookup import task_row
from shardyard.config.tokenizer_kinds import TOKENIZER_KINDS
from shardyard.control.request import Request
from shardyard.control.subprocesses import run_program


def prepare_data(
    request: Request,
    *,
    previous: Resolved | None = None,
    verify: bool = False,
    folder: Path | None = None,
) -> DataFacts:
    """Prepare a request's data, or find it prepared; sizes are checked always, content if asked.

    Args:
        previous: The last attempt, on a resume: what it read is prepared again as it was.
        folder: Where another node has it; None: named by what is asked for.

    Raises:
        ShardyardError: What the data program answered; its class follows the exit code.
    """
    return DataFacts(**_run(request, previous=previous, verify=verify, folder=folder))


def prepare_also_h5(request: Request, *, verify: bool = False) -> tuple[DataFacts, str]:
    """Prepare a request's data, and write what a training sees as BERT's h5 files.

    Returns:
        What was prepared, and the folder of the h5 files.

    Raises:
        ShardyardError: What the data program answered; its class follows the exit code.
    """
    answer = _run(request, verify=verify, also="h5")
    folder = str(answer.pop("h5"))
    return DataFacts(**answer), folder


def _run(
    request: Request,
    *,
    previous: Resolved | None = None,
    verify: bool = False,
    folder: Path | None = None,
    also: str | None = None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardyard-") as scratch:
        recipe = Path(scratch) / "recipe.json"
        recipe.write_text(keep_previous(request.recipe, previous)[0].model_dump_json())
        options = [] if request.model_dir is None else ["--model-dir", str(request.model_dir)]
        rows = table_rows(request.recipe.model, request.shape)
        options += [] if rows is None else ["--rows", str(rows)]
        options += ["--verify"] if verify else []
        options += [] if folder is None else ["--folder", str(folder)]
        options += [] if also is None else ["--also", also]
        return run_program("shardyard.data", [str(recipe), *options])


def would_prepare(request: Request) -> dict[str, str]:
    """What ``prepare_data`` would read and write, in words. Looks at nothing."""
    data = request.recipe.data
    write = f"a folder named by fingerprint in {Path(data.dir).expanduser().resolve()}"
    read = ", ".join(entry for _, entry in data.entries)
    if task_row(request.recipe.task.name).reads == "images":
        return {"read": read, "write": write, "validation": _validation(data, "pictures")}
    kind = TOKENIZER_KINDS[data.tokenizer_kind].words
    trained = f"train a {kind} of {data.vocab_size:,} tokens"
    own = str(request.model_dir) if has_tokenizer(request.model_dir) else trained
    tokenizer = {"auto": own, "train": trained}.get(data.tokenizer, data.tokenizer)
    validation = _validation(data, "documents")
    return {"read": read, "tokenizer": tokenizer, "write": write, "validation": validation}


def _validation(data: Data, unit: str) -> str:
    """What is validated on, in words."""
    if data.eval_source is not None:
        return "data.eval_source"
    if data.eval_fraction == 0 and unit == "documents":
        return "none, as data.eval_fraction=0; files named validation or test are left out"
    held_out = "val, else test" if unit == "pictures" else "validation"
    return f"what is named {held_out}; without it {data.eval_fraction:.0%} of the {unit}"

"""`python -m shardyard.data RECIPE_JSON`: prepares a data set for the command line.

Progress goes to stderr. stdout gets one line of JSON: the DatasetMetadata, or
``{"error": message, "exit_code": n, "page": page}`` with that exit code.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.config.resolved import DatasetMetadata
    from shardyard.config.schema.recipe import Recipe
    from shardyard.data.loader import Samples
    from shardyard.data.prepare import Progress

_LINE_EVERY_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.data", description=__doc__)
    parser.add_argument("recipe", type=Path, help="JSON file that holds the recipe")
    parser.add_argument("--model-dir", type=Path, help="folder of the model's own files")
    parser.add_argument("--rows", type=int, help="of the model's table of tokens, if it has one")
    parser.add_argument("--folder", type=Path, help="to write, as another node has named it")
    parser.add_argument(
        "--set-folder", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"),
        help="the same of a set of data.eval_sets",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="check the SHA-256 of every file")
    parser.add_argument("--also", choices=["h5"], help="write what training sees, in this form too")
    parser.add_argument("--show", type=int, default=0, help="samples of training to show")
    options = parser.parse_args(arguments)
    return _answer(
        lambda: _prepare(
            options.recipe,
            options.model_dir,
            rows=options.rows,
            verify=options.verify,
            folder=options.folder,
            set_folders={name: Path(folder) for name, folder in options.set_folder},
            also=options.also,
            show=options.show,
        )
    )


def _answer(work: Callable[[], dict[str, object]]) -> int:
    from shardyard.errors import EXIT_INTERRUPTED, ShardyardError
    from shardyard.own_processes import signals_as_exceptions

    answer: ShardyardError
    try:
        with signals_as_exceptions():
            print(json.dumps(work()))
        return 0
    except ShardyardError as error:
        answer = error
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost line
        from shardyard.data.workers import unexpected_error

        answer = unexpected_error("preparing data", error)
    print(json.dumps(answer.to_json()))
    return answer.exit_code


def _prepare(
    recipe_path: Path,
    model_dir: Path | None,
    *,
    rows: int | None,
    verify: bool,
    folder: Path | None,
    set_folders: dict[str, Path],
    also: str | None,
    show: int,
) -> dict[str, object]:
    # Imported here and not above: a Ctrl-C during the import is then handled like any other.
    from dataclasses import asdict, replace

    from shardyard.config.tasks import task_prepare
    from shardyard.data import shards

    recipe = _read_recipe(recipe_path)
    prepare = task_prepare(recipe.task.name)
    output: Callable[[], AbstractContextManager[None]] = nullcontext
    if recipe.data.module is not None:
        from shardyard.data.own.prepare import prepare_own

        prepare = prepare_own
    if recipe.data.module is not None or any(share.module for share in recipe.data.mixture):
        output = _output_to_stderr  # what the user's code prints is no answer
    with _progress_display() as progress, output():
        metadata = prepare(recipe, model_dir=model_dir, progress=progress, rows=rows, folder=folder)
        if recipe.data.eval_sets:
            from shardyard.data.eval_sets import prepare_eval_sets

            sets = prepare_eval_sets(recipe, metadata, progress=progress, folders=set_folders)
            metadata = replace(metadata, eval_sets=sets)
        if recipe.data.eval_tasks:
            from shardyard.data.eval_tasks.prepare import prepare_eval_tasks

            metadata = replace(metadata, eval_tasks=prepare_eval_tasks(recipe, metadata))
    if verify:
        parts = [part.data for part in metadata.parts] or [metadata]
        for each in (*parts, *(each.data for each in metadata.eval_sets)):
            shards.verify(Path(each.dir))
    answer = asdict(metadata)
    if also is not None:
        with _progress_display() as progress:
            answer[also] = _write_h5(recipe, metadata, model_dir, progress)
    if show:
        answer["samples"] = _show(recipe, metadata, model_dir, count=show)
    return answer


def _show(
    recipe: "Recipe", metadata: "DatasetMetadata", model_dir: Path | None, *, count: int
) -> list[dict[str, Any]]:
    from shardyard.config.tasks import task_row
    from shardyard.data.shown import show_samples
    from shardyard.errors import RequestError

    sets = (metadata, *metadata.by_name.values())
    is_items = any(each.item_kind is not None for each in sets)
    if not task_row(recipe.task.name).continues_text or is_items:
        raise RequestError("--show is for text of task.name=causal_lm. Leave it out.")
    train, _, _ = _open_data(recipe, metadata, model_dir)
    folder = Path((metadata.parts[0].data if metadata.parts else metadata).dir)
    return show_samples(train, folder, count=count)


def _write_h5(
    recipe: "Recipe", metadata: "DatasetMetadata", model_dir: Path | None, progress: "Progress"
) -> str:
    """Write both splits as BERT's h5 files, next to the prepared data; return their folder."""
    from shardyard.data.bert_h5 import write_splits

    train, validation, seq_len = _open_data(recipe, metadata, model_dir)
    folder = Path(f"{metadata.dir}-h5-{seq_len}")
    epochs = math.ceil(recipe.run.epochs or 1)
    write_splits(train, validation, folder, epochs=epochs, progress=progress)
    return str(folder)


def _open_data(
    recipe: "Recipe", metadata: "DatasetMetadata", model_dir: Path | None
) -> "tuple[Samples, Samples | None, int]":
    """Both splits as training reads them, and the length of a sample."""
    from shardyard.config.formulas import seq_len_of
    from shardyard.config.model.growth import grow
    from shardyard.config.model.source import shape_or_none
    from shardyard.config.model.vocabulary import vocabulary_in
    from shardyard.config.resolved import Resolved
    from shardyard.config.tasks import imported, task_row
    from shardyard.errors import RequestError

    shape = grow(
        recipe,
        shape_or_none(recipe, model_dir, metadata.vocab_size),
        given=vocabulary_in(Path(metadata.dir)),
        size=metadata.vocab_size,
        model_dir=model_dir,
    ).shape
    seq_len = recipe.data.seq_len
    if seq_len == "auto":
        if shape is None:
            raise RequestError(
                "data.seq_len=auto: the context of your own model is unknown. Give data.seq_len a "
                "number."
            )
        seq_len, _ = seq_len_of(shape)
    data = recipe.data.model_copy(update={"seq_len": seq_len})
    recipe = recipe.model_copy(update={"data": data})
    resolved = Resolved(recipe=recipe, reasons={}, shape=shape, data=metadata, steps=0)
    opened = imported(task_row(recipe.task.name).code).open_data(resolved)
    return opened.train, opened.eval, seq_len


def _read_recipe(path: Path) -> "Recipe":
    from pydantic import ValidationError

    from shardyard.config.schema.recipe import Recipe
    from shardyard.errors import RequestError
    from shardyard.io.files import read_json_object

    try:
        return Recipe.model_validate(read_json_object(path))
    except (OSError, ValueError, ValidationError) as error:
        raise RequestError(
            f"{path} is not a recipe in JSON ({error}). Let `shardyard prepare` write it."
        ) from error


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what the user's code prints to stderr: stdout is this program's answer."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # the descriptor, because its child processes print too
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def _progress_display() -> "Iterator[Progress]":
    """A bar on a terminal, a line every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _line_printer()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        bars: dict[str, TaskID] = {}

        def show(activity: str, done_bytes: int, total_bytes: int) -> None:
            if activity not in bars:
                bars[activity] = bar.add_task(activity, total=total_bytes)
            bar.update(bars[activity], completed=done_bytes)

        yield show


def _line_printer() -> "Progress":
    next_line_s: dict[str, float] = {}

    def show(activity: str, done_bytes: int, total_bytes: int) -> None:
        now_s, due_s = time.monotonic(), next_line_s.get(activity, 0.0)
        is_done = done_bytes == total_bytes
        if now_s >= due_s or (is_done and due_s < math.inf):
            next_line_s[activity] = math.inf if is_done else now_s + _LINE_EVERY_S
            sizes = f": {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB" if done_bytes else ""
            print(f"{activity}{sizes}", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())

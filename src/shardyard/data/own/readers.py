"""Processes that read the user's dataset for one rank, and end when the rank does.

The user's code runs outside of the process that trains: its random draws are seeded for each item
without touching the generators of the training, and a slow item does not hold the training's
interpreter. A reader ignores SIGTERM, because a draining rank still needs its data.
"""

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.order import SampleKey, permute
from shardyard.data.own.dataset import SETTING, DatasetCode, OwnDataset
from shardyard.data.own.items import Fields, ItemForm
from shardyard.data.own.stored import StoredItems
from shardyard.errors import DataError, ShardyardError

_HOLD_OUT_KEY = 0x5A11D
"""Key of the order whose last items are held out, where the user's dataset has no eval split."""


@dataclass(frozen=True, kw_only=True)
class SplitReader:
    """Reads samples of both splits by their numbers; it can be sent to another process."""

    code: DatasetCode
    form: ItemForm
    samples: dict[str, int]
    """Samples of ``train`` and ``eval``."""
    is_divided: bool
    """Whether the eval split is taken from the train dataset."""
    stored: tuple[Path, dict[str, Any]] | None = None
    """Folder and manifest entries of items that were written; None: the dataset is indexed."""

    def read(self, split: str, index: int, epoch: int) -> Fields:
        """Return the arrays of a sample.

        Raises:
            RequestError: The dataset raised, or the item has another form than the first.
            DataError: The dataset has another length than when it was prepared.
        """
        source, at = self._source_index(split, index)
        if self.stored is not None:
            return self._stored[source][at]
        dataset = self.open(source)
        item = dataset.item(at, epoch)
        try:
            return self.form.fields(item)
        except ValueError as error:
            raise dataset.rejected(item, at, str(error)) from error

    def _source_index(self, split: str, index: int) -> tuple[str, int]:
        if not self.is_divided:
            return split, index
        total = self.samples["train"] + self.samples["eval"]
        first = self.samples["train"] if split == "eval" else 0
        return "train", permute(first + index, total, key=_HOLD_OUT_KEY)

    @cached_property
    def _datasets(self) -> dict[str, OwnDataset]:
        return {}

    def open(self, split: str) -> OwnDataset:
        """The user's dataset of a split, made once in a process."""
        if split in self._datasets:
            return self._datasets[split]
        dataset = self.code.open(split)
        wanted = sum(self.samples.values()) if self.is_divided else self.samples[split]
        found = len(dataset) if dataset is not None and dataset.is_indexed else 0
        if dataset is None or found != wanted:
            raise DataError(
                f"{SETTING}={self.code.import_path}: the {split} split has {found:,} items here, "
                f"and had {wanted:,} when it was prepared. Give all nodes the same dataset; to "
                "train on another one, begin a run from this one's weights: run.from=RUN."
            )
        self._datasets[split] = dataset
        return dataset

    @cached_property
    def _stored(self) -> dict[str, StoredItems]:
        assert self.stored is not None
        folder, entries = self.stored
        return {split: StoredItems(folder, split, entry) for split, entry in entries.items()}


class Readers:
    """Reads samples side by side in processes of their own. Safe in several threads."""

    def __init__(self, source: SplitReader, processes: int) -> None:
        self._source = source
        self._requests, self._turns = threading.Lock(), count()
        self._answers, self._turn = threading.Condition(), 0
        # At once: imports of the user's code take as long as the model takes to be built.
        self._processes = _started(source, processes)
        # A run of several phases, or one whose ranks change, opens its data again and again.
        weakref.finalize(self, _end, tuple(self._processes))

    def read(self, split: str, keys: Sequence[SampleKey]) -> list[Fields]:
        """Return the arrays of these samples, in their order.

        Raises:
            ShardyardError: As ``SplitReader.read``, or a reader was killed.
        """
        pipes = list(self._processes)
        size = -(-len(keys) // len(pipes))
        with self._requests:
            turn = next(self._turns)
            for place, pipe in enumerate(pipes):
                self._send(pipe, (split, keys[place * size : (place + 1) * size]))
        # The next request is with the readers already while the answers to this one are taken.
        with self._answers:
            self._answers.wait_for(lambda: self._turn == turn)
            try:
                # All answers are taken before an error is raised: pipes stay in step.
                answers = [self._receive(pipe) for pipe in pipes]
            finally:
                self._turn += 1
                self._answers.notify_all()
        found: list[Fields] = []
        for answer in answers:
            if isinstance(answer, ShardyardError):
                raise answer
            found += answer
        return found

    def _send(self, pipe: Connection, request: tuple[str, Sequence[SampleKey]]) -> None:
        try:
            pipe.send(request)
        except ConnectionError:
            raise self._death(pipe) from None

    def _receive(self, pipe: Connection) -> list[Fields] | ShardyardError:
        try:
            answer: list[Fields] | _Stacked | ShardyardError = pipe.recv()
            if not isinstance(answer, _Stacked):
                return answer
            arrays = {name: np.empty(shape, dtype) for name, dtype, shape in answer.arrays}
            for array in arrays.values():
                _read_into(pipe.fileno(), array.data.cast("B"))
            return [
                {name: array[row] for name, array in arrays.items()} for row in range(answer.rows)
            ]
        except (EOFError, ConnectionError):
            raise self._death(pipe) from None

    def _death(self, pipe: Connection) -> DataError:
        process = self._processes[pipe]
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return DataError(
            f"a process that reads {SETTING}={self._source.code.import_path} {how}. SIGKILL mostly "
            "means that memory ran out: set a smaller data.module_workers."
        )


def _started(source: SplitReader, number: int) -> dict[Connection, SpawnProcess]:
    context = get_context("spawn")  # a rank has threads and perhaps a device: not to be forked
    processes: dict[Connection, SpawnProcess] = {}
    # As in data/workers.py: the tracker's start would unblock the signal that readers inherit.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        for place in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_answer, args=(theirs, source), name=f"dataset-{place}", daemon=True
            )
            process.start()
            theirs.close()
            processes[ours] = process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return processes


@dataclass(frozen=True)
class _Stacked:
    """Header of arrays of one shape, which follow it as bytes, without a pickle."""

    rows: int
    arrays: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape (rows, ...) of each."""


def _send_fields(pipe: Connection, items: list[Fields]) -> None:
    """Send arrays of one shape side by side; they are the pixels of a batch, and many."""
    arrays = {name: np.stack([item[name] for item in items]) for name in items[0]}
    about = [(name, each.dtype.str, each.shape) for name, each in arrays.items()]
    pipe.send(_Stacked(len(items), about))
    for array in arrays.values():
        _write_all(pipe.fileno(), array.data.cast("B"))


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _read_into(descriptor: int, content: memoryview) -> None:
    """Fill a buffer in place: ``Connection.recv_bytes`` takes new memory for each 200 KB."""
    while content:
        size = os.readv(descriptor, [content])
        if not size:
            raise EOFError
        content = content[size:]


def _end(pipes: Sequence[Connection]) -> None:
    """Let readers end: each returns when its pipe closes."""
    for pipe in pipes:
        pipe.close()


def _answer(pipe: Connection, source: SplitReader) -> None:
    """Body of a reader: answer requests until the pipe closes."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # for what is imported now: the readers are parallel
    if source.stored is None:
        with suppress(Exception):  # the first read raises it again
            source.open("train")
    while True:
        try:
            split, keys = pipe.recv()
        except (EOFError, ConnectionError):
            return
        answer: list[Fields] | ShardyardError
        try:
            answer = [source.read(split, index, epoch) for index, epoch in keys]
        except ShardyardError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a process boundary
            answer = DataError(f"{SETTING}={source.code.import_path}: {error!r}")
        try:
            if isinstance(answer, list) and answer and source.form.shapes is not None:
                _send_fields(pipe, answer)
            else:
                pipe.send(answer)
        except ConnectionError:
            return  # the rank is gone


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

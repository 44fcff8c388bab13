"""Processes that read the user's dataset for one rank, and end when the rank does.

The user's code runs outside of the process that trains: its random draws are seeded for each item
without touching the generators of the training, and a slow item does not hold the training's
interpreter. A reader ignores SIGTERM, because a draining rank still needs its data.
"""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NamedTuple

from shardyard.data.order import SampleKey, permute
from shardyard.data.own.batch_memory import Arrays, BatchMemories, map_batch
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
        shapes = source.form.shapes
        self._memories = None if shapes is None else BatchMemories(shapes)
        self._requests, self._turns = threading.Lock(), count()
        self._answers, self._turn = threading.Condition(), 0
        # At once: imports of the user's code take as long as the model takes to be built.
        self._processes = _started(source, processes)
        # A run of several phases, or one whose ranks change, opens its data again and again.
        weakref.finalize(self, _end, tuple(self._processes))

    @property
    def has_one_form(self) -> bool:
        """Whether all items have arrays of the same types and shapes."""
        return self._memories is not None

    def read(self, split: str, keys: Sequence[SampleKey]) -> list[Fields]:
        """Return the arrays of these samples, in their order.

        Raises:
            ShardyardError: As ``SplitReader.read``, or a reader was killed.
        """
        answers = self._answers_to(keys, partial(_Request, split))
        return [fields for answer in answers for fields in answer or ()]

    def read_stacked(self, split: str, keys: Sequence[SampleKey], rows: int) -> Fields:
        """Return arrays (rows, ...) of these samples in their order, and of zeros after them.

        The items must have one form (``ItemForm.shapes``). Readers write them to where the batch
        lies, in memory that they share with this process: they are pixels, and many.

        Raises:
            ShardyardError: As ``read``.
        """
        assert self._memories is not None
        memory, descriptor = self._memories.take(rows)
        arrays = self._memories.arrays(memory)
        requests = partial(_Request, split, memory=memory.number, rows=rows)
        try:
            self._answers_to(keys, requests, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        for array in arrays.values():
            array[len(keys) :] = 0
        return arrays

    def _answers_to(
        self,
        keys: Sequence[SampleKey],
        request: "Callable[[Sequence[SampleKey], int], _Request]",
        descriptor: int | None = None,
    ) -> list[list[Fields] | None]:
        """Return what each reader answers to its part of the samples.

        Args:
            request: Makes a request of samples and the number of the first.
            descriptor: That of the request's memory, if it is new.
        """
        pipes = list(self._processes)
        size = -(-len(keys) // len(pipes))
        with self._requests:
            turn = next(self._turns)
            for first, pipe in zip(count(0, size), pipes, strict=False):
                self._send(pipe, request(keys[first : first + size], first), descriptor)
        # The next request is with the readers already while the answers to this one are taken.
        with self._answers:
            self._answers.wait_for(lambda: self._turn == turn)
            try:
                # All answers are taken before an error is raised: pipes stay in step.
                answers = [self._receive(pipe) for pipe in pipes]
            finally:
                self._turn += 1
                self._answers.notify_all()
        found = []
        for answer in answers:
            if isinstance(answer, ShardyardError):
                raise answer
            found.append(answer)
        return found

    def _send(self, pipe: Connection, request: "_Request", descriptor: int | None) -> None:
        try:
            pipe.send((request, descriptor is not None))
            if descriptor is not None:
                send_handle(pipe, descriptor, None)
        except ConnectionError:
            raise self._death(pipe) from None

    def _receive(self, pipe: Connection) -> list[Fields] | ShardyardError | None:
        try:
            answer: list[Fields] | ShardyardError | None = pipe.recv()
        except (EOFError, ConnectionError):
            raise self._death(pipe) from None
        return answer

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


class _Request(NamedTuple):
    """Samples to read."""

    split: str
    keys: Sequence[SampleKey]
    first_row: int
    """The first sample's row of the batch."""
    memory: int | None = None
    """Number of the memory to which they are written; None: they are sent back."""
    rows: int = 0
    """Number of rows of that memory."""


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
    torch = sys.modules.get("torch")
    if torch is not None:  # it may be imported before: by the program that a spawned process runs
        torch.set_num_threads(1)
    batches: dict[int, Arrays] = {}
    while True:
        try:
            request, is_new = pipe.recv()
            if is_new:
                _map_new(batches, pipe, request, source)
        except (EOFError, ConnectionError):
            return
        answer: list[Fields] | ShardyardError | None
        try:
            answer = _answer_to(request, batches, source)
        except ShardyardError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a process boundary
            answer = DataError(f"{SETTING}={source.code.import_path}: {error!r}")
        try:
            pipe.send(answer)
        except ConnectionError:
            return  # the rank is gone


def _map_new(
    batches: dict[int, Arrays], pipe: Connection, request: _Request, source: SplitReader
) -> None:
    """Map the memory whose descriptor follows the request."""
    assert request.memory is not None and source.form.shapes is not None
    descriptor = recv_handle(pipe)
    try:
        batches[request.memory] = map_batch(descriptor, source.form.shapes, request.rows)
    finally:
        os.close(descriptor)


def _answer_to(
    request: _Request, batches: dict[int, Arrays], source: SplitReader
) -> list[Fields] | None:
    """Read samples: return them, or write them to the memory of their batch."""
    if request.memory is None:
        return [source.read(request.split, index, epoch) for index, epoch in request.keys]
    arrays = batches[request.memory]
    for row, (index, epoch) in enumerate(request.keys, start=request.first_row):
        for name, values in source.read(request.split, index, epoch).items():
            arrays[name][row] = values
    return None


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

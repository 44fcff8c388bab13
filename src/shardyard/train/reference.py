"""Log-probabilities of pairs of answers under the reference model, computed before the first step.

The reference is the model as the run begins, so one pass over the pairs with these weights gives
all that the losses need: no copy of the model is held, in any layout, and later epochs cost
nothing. The values lie in the run's folder; a process that comes later reads them. Shape suffix:
N = pairs of a split.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardyard.config.fingerprint import digest
from shardyard.config.resolved import Resolved
from shardyard.config.tasks import task_row
from shardyard.data.loader import MicroBatch, step_batches
from shardyard.data.mixture import ConcatenatedSets, MixedStream
from shardyard.data.preference.samples import AnswerPairs
from shardyard.data.samples import Prepare, Sample, SampleSet, Stream
from shardyard.errors import DataError, StorageError
from shardyard.io.files import FILE_MODE, make_folder, publish_file
from shardyard.parallel.mesh import Mesh
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.preference_losses import PreferenceLosses
from shardyard.train.hooks import Hooks, WorkerPhase
from shardyard.train.resume import Saved, from_earlier_step

_AT_ONCE = 16
"""Micro-batches of a rank between two exchanges of what was found."""
_SAVED_EVERY_S = 60.0

Values = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class _Split:
    """One split of a source: its pairs, and what is known of them."""

    name: str
    pairs: AnswerPairs
    prepare: Prepare
    samples: npt.NDArray[np.int64]
    """Samples that the run reads, ascending."""
    values_N2: Values
    """NaN where it is not known."""

    def missing(self) -> npt.NDArray[np.int64]:
        """Return the samples with a pair that is not known."""
        is_unknown_N: npt.NDArray[np.bool_] = np.any(np.isnan(self.values_N2), axis=1)
        numbers = self.pairs.numbers
        unknown = [
            index
            for index in self.samples.tolist()
            if is_unknown_N[numbers[self.pairs.units_of(index)]].any()
        ]
        return np.array(unknown, dtype=np.int64)


class ReferenceValues:
    """The reference values of a run's pairs. All ranks make one and call it together."""

    def __init__(
        self,
        run_dir: RunDir,
        resolved: Resolved,
        data: TaskData,
        *,
        samples: int,
        mesh: Mesh,
        hooks: Hooks,
        group: dist.ProcessGroup,
    ) -> None:
        """Read what an earlier process found.

        Args:
            samples: Samples of the training stream that the run reads, from its beginning.
            group: All ranks, on the host.

        Raises:
            DataError: A file of values is damaged.
        """
        self._folder = run_dir.reference
        self._name = digest(_depends_on(resolved))
        self._mesh, self._hooks, self._group = mesh, hooks, group
        self._micro_batch = int(resolved.recipe.optim.micro_batch)
        self._splits = list(self._open(data, samples))

    def _open(self, data: TaskData, samples: int) -> Iterator[_Split]:
        for name, stream in (("train", data.train), ("eval", data.eval)):
            if stream is None:
                continue
            assert isinstance(stream, Stream | MixedStream)
            read = np.arange(samples if name == "train" else stream.num_samples)
            is_mixed = len(_sets_of(stream)) > 1
            for number, (pairs, indices) in enumerate(_read_of_sets(stream, read)):
                of_source = f"{name}-{number}" if is_mixed else name
                yield _Split(
                    name=of_source,
                    pairs=pairs,
                    prepare=stream.prepare,
                    samples=indices,
                    values_N2=self._read(of_source, pairs.num_units),
                )

    @property
    def is_complete(self) -> bool:
        """Whether every pair that the run reads is known."""
        return not any(len(split.missing()) for split in self._splits)

    def hand_over(self, task: Task) -> None:
        """Give the samples of both splits the values.

        What is missing is computed by the task's model, whose weights are those of the beginning.
        """
        self._complete_all(task)
        for split in self._splits:
            split.pairs.reference = split.values_N2

    def _complete_all(self, task: Task) -> None:
        assert isinstance(task.computation, PreferenceLosses)
        missing = {split.name: len(split.missing()) for split in self._splits}
        if not any(missing.values()):
            return
        started = time.monotonic()
        self._report("reference_started", samples=sum(missing.values()))
        task.model.eval()
        for split in self._splits:
            self._complete(split, task.computation)
        task.model.train()
        self._report("reference_ready", seconds=time.monotonic() - started)

    def _report(self, kind: str, **fields: float) -> None:
        if self._hooks.events is not None:
            self._hooks.events.write(kind, **fields)

    def _complete(self, split: _Split, computation: PreferenceLosses) -> None:
        mesh, missing = self._mesh, split.missing()
        selected = Stream(_Selected(split.pairs, missing), seed=None, prepare=split.prepare)
        at_once = _AT_ONCE * self._micro_batch * mesh.layout.data_ranks
        saved_t = time.monotonic()
        for start in range(0, len(missing), at_once):
            positions = range(start, min(start + at_once, len(missing)))
            batches = step_batches(
                selected, positions=positions, micro_batch=self._micro_batch,
                rank=mesh.data_rank, world_size=mesh.layout.data_ranks,
            )  # fmt: skip
            units = [split.pairs.units_of(index) for index in missing[positions].tolist()]
            numbers = np.sort(split.pairs.numbers[np.concatenate(units)])
            with self._hooks.heartbeat.during(WorkerPhase.EVALUATE):
                found_n2 = _log_probabilities(computation, batches, numbers)
                dist.all_reduce(found_n2, group=self._group)
            split.values_N2[numbers] = found_n2.numpy()
            is_last = positions.stop == len(missing)
            if is_last or time.monotonic() - saved_t > _SAVED_EVERY_S:
                self._together(lambda: self._write(split.name, split.values_N2))
                saved_t = time.monotonic()

    def _path(self, split: str) -> Path:
        return self._folder / f"{split}-{self._name}.npy"

    def _read(self, split: str, pairs: int) -> Values:
        """The values of a split as rank 0 finds them; NaN where there are none."""
        values_N2 = np.full((pairs, 2), np.nan)

        def read() -> None:
            with suppress(FileNotFoundError):
                values_N2[:] = _values_in(self._path(split), pairs)

        self._together(read)
        shared = torch.from_numpy(values_N2)
        dist.broadcast(shared, group=self._group, group_src=0)
        return values_N2

    def _write(self, split: str, values_N2: Values) -> None:
        path = self._path(split)
        scratch = path.with_suffix(".scratch")
        buffer = io.BytesIO()
        np.save(buffer, values_N2, allow_pickle=False)
        try:
            make_folder(path.parent)
            scratch.write_bytes(buffer.getvalue())
            scratch.chmod(FILE_MODE)
            publish_file(scratch, path)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}. Check that the folder is yours and "
                "has room (`df -h`)."
            ) from error

    def _together(self, action: Callable[[], None]) -> None:
        """Do what rank 0 does alone; its error is every rank's."""
        problem: list[DataError | StorageError | None] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except (DataError, StorageError) as error:
                problem[0] = error
        dist.broadcast_object_list(problem, group=self._group, group_src=0)
        if problem[0] is not None:
            raise problem[0]


def open_reference(
    run_dir: RunDir,
    resolved: Resolved,
    data: TaskData,
    saved: Saved | None,
    mesh: Mesh,
    hooks: Hooks,
    *,
    group: dist.ProcessGroup,
) -> ReferenceValues | None:
    """Return the reference of pairs of answers; None: the task has none. All ranks call it.

    Raises:
        DataError: A file of values is damaged.
    """
    task = resolved.recipe.task
    row = task_row(task.name)
    if not row.compares_answers or row.gives_reward or task.loss_type == "orpo":
        return None
    samples = resolved.samples
    if saved is not None:
        samples += from_earlier_step(saved, resolved, devices=mesh.layout.world_size).passed_over
    return ReferenceValues(
        run_dir, resolved, data, samples=samples, mesh=mesh, hooks=hooks, group=group
    )


def _sets_of(stream: Stream | MixedStream) -> Sequence[SampleSet]:
    """The sets of samples that a stream reads: one, or those of a mixture's sources."""
    if isinstance(stream, MixedStream):
        return stream.sets
    if isinstance(stream.samples, ConcatenatedSets):
        return stream.samples.sets
    return [stream.samples]


def _read_of_sets(
    stream: Stream | MixedStream, positions: npt.NDArray[np.int64]
) -> Iterator[tuple[AnswerPairs, npt.NDArray[np.int64]]]:
    """Each set of a stream, with the samples of it at some positions, ascending."""
    indices, first = np.unique(stream.sample_indices(positions)), 0
    for pairs in _sets_of(stream):
        assert isinstance(pairs, AnswerPairs)
        behind = first + pairs.num_samples
        yield pairs, indices[(indices >= first) & (indices < behind)] - first
        first = behind


class _Selected:
    """The ``SampleSet`` of some samples of another."""

    def __init__(self, pairs: AnswerPairs, indices: npt.NDArray[np.int64]) -> None:
        self.num_samples = len(indices)
        self._pairs, self._indices = pairs, indices.tolist()

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample ``index`` of these."""
        return self._pairs.sample(self._indices[index], epoch)

    def padding(self) -> Sample:
        """Return a row without pairs."""
        return self._pairs.padding()


@torch.no_grad()
def _log_probabilities(
    computation: PreferenceLosses, batches: list[MicroBatch], numbers: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Log-probabilities of both answers, in the order of the pairs' numbers, fp64.

    0 where another rank has computed them.
    """
    found_n2 = torch.zeros(len(numbers), 2, dtype=torch.float64)
    for batch in batches:
        logp_BP2 = computation.log_probabilities(batch)
        if logp_BP2 is None:
            continue
        is_pair_BP = batch["pairs"] >= 0
        rows = np.searchsorted(numbers, batch["pairs"][is_pair_BP].numpy())
        found_n2[torch.from_numpy(rows)] = logp_BP2.cpu()[is_pair_BP]
    computation.end_forward()
    return found_n2


def _depends_on(resolved: Resolved) -> dict[str, object]:
    """Return all that the values depend on: the pairs, and the weights at the beginning."""
    recipe, data = resolved.recipe, resolved.recipe.data
    model = recipe.model.model_dump(
        mode="json",
        include={"path", "hub", "revision", "preset", "weights", "new_embeddings", "lora"},
    )
    return {
        "data": resolved.data.fingerprint,
        "seq_len": data.seq_len,
        "too_long": data.too_long,
        "model": model,
        "digests": [resolved.model_commit, resolved.model_digest, resolved.base_digest],
        "from": recipe.run.from_,
        "seed": recipe.run.seed,
        "compute": recipe.precision.compute,
    }


def _values_in(path: Path, pairs: int) -> Values:
    """The values in a file.

    Raises:
        FileNotFoundError: There is none.
        DataError: It is damaged.
    """
    try:
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}). Delete it: it is computed again.") from error
    if found.shape != (pairs, 2) or found.dtype != np.float64:
        raise DataError(
            f"{path} is damaged: it holds {found.dtype} {found.shape} and not float64 "
            f"{(pairs, 2)}. Delete it: it is computed again."
        )
    values: Values = found
    return values

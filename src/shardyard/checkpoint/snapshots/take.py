"""Snapshots of this rank's state in memory that outlives its process, every few steps.

All that training waits for is the copy of the shards into a slot, the copy that a save makes
anyway: a save writes its files from the slot too. A thread then looks whether all of it is finite,
takes a checksum and seals the slot. Where a neighbour keeps copies, the thread waits until it has
this one: from then on the snapshot counts, and no earlier the next one is begun.
"""

import json
import mmap
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from shardyard.checkpoint.buffers import not_finite
from shardyard.checkpoint.io_priority import yield_to_training
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.protocol import ReplicationState
from shardyard.checkpoint.snapshots.slot import SnapshotId, empty, read_slot
from shardyard.checkpoint.snapshots.slot_writer import Slot, SlotLayout
from shardyard.checkpoint.staging import copy_shards
from shardyard.checkpoint.staging_protocol import MemoryProvider, PersistentStaging
from shardyard.config.formulas import SENT, SLOTS, peer_labels, slot_labels
from shardyard.errors import RequestError, StorageError
from shardyard.io.polling import wait_for
from shardyard.parallel.device import pin, synchronize_stream, unpin
from shardyard.units import format_bytes

_SENT_POLL_S = 0.005
_SENT_WITHIN_S = 60.0
"""An agent that has not said by then whether the neighbour has a snapshot is stopped, or hangs."""


class Snapshots(PersistentStaging):
    """Takes snapshots of one set of tensors. All ranks make the same calls.

    Args:
        memory: Memory of the node's agent.
        names: Tensors of the whole state, those of other pipeline stages included.
        restored: The snapshot that this process continues from; None: there is none.
        interval: Decides when one is due.

    Raises:
        RequestError: No agent owns memory for it.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        memory: MemoryProvider,
        *,
        local_rank: int,
        rank: int,
        world_size: int,
        generation: int,
        names: int,
        restored: SnapshotId | None,
        interval: Interval,
    ) -> None:
        self._interval = interval
        self._generation = generation
        self._local_rank = local_rank
        self._is_over = False
        noted = memory(SENT)
        self._sent = None if noted is None else ReplicationState(noted)
        self._metadata = {"rank": rank, "world_size": world_size, "names": names}
        self._devices = {tensor.device for tensor in tensors.values()}
        self._latest: Slot | None = None
        self._of_save: Slot | None = None
        self._slots: list[Slot] = []
        labels = slot_labels(local_rank)
        # One page shows whether an agent answers. The thread asks for the rest.
        if memory(labels[0], mmap.PAGESIZE) is None:
            raise RequestError(
                "elastic.snapshot_every is set, and no agent owns memory that outlives this "
                "process: that needs Linux, and a run that `shardyard train` or `shardyard launch` "
                "starts. Set elastic.snapshot_every=null; checkpoints are written in any case."
            )
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="snapshot", initializer=yield_to_training
        )
        # the pages are taken while the first steps run: once, and never given back
        self._busy: Future[None] = self._thread.submit(
            self._open, memory, SlotLayout(tensors), labels, restored
        )

    def is_due(self, step: int) -> bool:
        """Whether to take one after this step; call it once a step."""
        return self._interval.is_due(step)

    def take(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> float:
        """Copy this rank's shards; on return the tensors may change.

        Waits for the thread, which is quicker than the steps between two snapshots.

        Args:
            values: Everything that is no tensor, as JSON has it.

        Returns:
            Seconds that training stood still; work that was queued on the device is not counted.

        Raises:
            StorageError: There is not as much memory.
        """
        values_json = json.dumps(values, allow_nan=False)
        for device in self._devices:
            synchronize_stream(device)
        started = time.monotonic()
        # This also raises what the thread met, such as memory that the system did not give.
        self._busy.result()
        waited_s = time.monotonic() - started
        self._fill(self._next_slot(), step, tensors, values_json)
        blocked = self._interval.blocked_s
        # The wait is no cost of the copy. It is in the time to seal, which bounds the interval.
        blocked.append(time.monotonic() - started - waited_s)
        self._interval.taken(step)
        if len(blocked) > 1:  # the one before is sealed, on every rank
            self._interval.learn(step)
        return time.monotonic() - started

    def take_for_save(
        self, step: int, tensors: dict[str, Tensor], values_json: str
    ) -> dict[str, Tensor]:
        """The same for a save, which writes its files from the slot.

        Returns:
            Contiguous CPU tensors in the slot, valid until the next such call.
        """
        self._busy.result()
        self._of_save = None  # that save is over
        self._of_save = self._next_slot()
        self._fill(self._of_save, step, tensors, values_json)
        self._interval.taken(step)
        return self._of_save.shards

    def _next_slot(self) -> Slot:
        """The oldest one that is neither the newest snapshot nor in use by a save."""
        free = [each for each in self._slots if each not in (self._of_save, self._latest)]
        return min(free, key=lambda each: each.snapshot_id)

    def _fill(self, slot: Slot, step: int, tensors: dict[str, Tensor], values_json: str) -> None:
        slot.clear()
        copy_shards(tensors, slot.shards)
        begun_s = time.monotonic()
        self._busy = self._thread.submit(self._seal, slot, step, values_json, begun_s)

    def close(self) -> None:
        """End the thread, after what it does; no neighbour is waited for any more."""
        self._is_over = True
        self._thread.shutdown(wait=True)
        for slot in self._slots:
            unpin(slot.content, self._devices)

    def _open(
        self,
        memory: MemoryProvider,
        layout: SlotLayout,
        labels: list[str],
        restored: SnapshotId | None,
    ) -> None:
        for label in labels:
            try:
                memory(label, layout.slot_bytes)
            except OSError as error:
                raise StorageError(
                    f"elastic.snapshot_every needs {SLOTS} x {format_bytes(layout.slot_bytes)} of "
                    f"host memory for each rank, and the system refuses it ({error.strerror}). "
                    "Give the node or its container more memory, split the state over more ranks "
                    "(parallel.zero), or set elastic.snapshot_every=null."
                ) from error
            whole = memory(label)  # it may be larger, of a layout before
            assert whole is not None
            slot = Slot(whole, layout)
            pin(slot.content, self._devices)
            if restored is None or slot.snapshot_id.step > restored.step:
                slot.clear()  # the run does not continue from these steps
            elif slot.snapshot_id == restored:
                self._latest = slot
            self._slots.append(slot)
        for label in peer_labels(self._local_rank):
            self._forget_lost_steps(memory(label), restored)

    def _forget_lost_steps(self, memory: mmap.mmap | None, restored: SnapshotId | None) -> None:
        """Empty a slot of the node before, unless the run resumes at its step or a later one."""
        found = None if memory is None else read_slot(memory)
        if memory is None or found is None or found.snapshot_id.generation == self._generation:
            return
        if restored is None or found.snapshot_id.step > restored.step:
            empty(memory)

    def _seal(self, slot: Slot, step: int, values_json: str, started_s: float) -> None:
        found = not_finite(slot.shards)
        if found:  # the next save says so to everybody, and ends the run
            print(f"no snapshot of step {step}: {'; '.join(found[:3])}", file=sys.stderr)
        else:
            slot.seal(SnapshotId(step, self._generation), values_json, **self._metadata)
            self._latest = slot
            self._wait_for_peer(step)
        self._interval.counts_s.append(time.monotonic() - started_s)

    def _wait_for_peer(self, step: int) -> None:
        """Until it holds the snapshot too, or none is there."""
        sent, local_rank = self._sent, self._local_rank
        if sent is not None:
            wait_for(
                lambda: self._is_over or not sent.is_awaited(local_rank, step),
                every_s=_SENT_POLL_S,
                within_s=_SENT_WITHIN_S,
            )

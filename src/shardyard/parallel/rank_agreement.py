"""Comparison of ranks in a host group: the order of gathers, unused parameters, and buffers.

A module whose forward pass depends on its samples (experts in a Python loop, LayerDrop,
branches) may call other modules on each rank. Collectives are matched only by their order.
Two ranks that gather different blocks would exchange them silently if their sizes are
equal, and abort or hang otherwise. A rank that is about to gather something else than in
the steps before therefore first compares that with all others. Each step ends with one
small exchange.

The gloo group of a model ends with it: a script that wraps one model after another would collect
their threads.
"""

import threading
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardyard.errors import TrainingError
from shardyard.log import warn
from shardyard.torch_private import change_count, group_timeout, non_persistent_buffers

WAIT_S = 120.0
"""Time that a rank that leaves the usual order waits for the others to do the same."""
_SOON_S = 10.0
"""Time that a rank that evaluates waits for the others before it reports that."""
_ALIKE = 2
"""Equal rounds after which a rank does not ask before it does the same again."""
_END = "ends its backward pass"
_EVALUATE = "begins a forward pass without gradients"
_CHECKSUM_BYTES = 4


class _Round:
    """Actions between two points at which all ranks meet, and the actions of the round before."""

    def __init__(self) -> None:
        self.previous: list[str] = []
        """Actions of the last round, the same on all ranks."""
        self.alike = 0
        """Rounds in a row that were equal to the one before."""
        self.done: list[str] = []
        self.has_diverged = False
        """Whether this round has left the usual order; all ranks compare each action then."""

    def begin(self, action: str) -> bool:
        """Note an action; returns whether it is the usual one at this place."""
        place = len(self.done)
        self.done.append(action)
        is_usual = not self.has_diverged and self.previous[place : place + 1] == [action]
        return is_usual and self.alike >= _ALIKE

    def end(self) -> None:
        """The next round begins."""
        self.alike = self.alike + 1 if self.done == self.previous else 0
        self.previous, self.done, self.has_diverged = self.done, [], False


class RankAgreement:
    """Compares what ranks do and hold. All ranks make one together."""

    def __init__(self, model: nn.Module, *, remedy: str) -> None:
        """Take a model, of which ranks may hold other parameters.

        Args:
            remedy: What to set so that ranks may call different blocks.
        """
        self._buffers = _Buffers(model)
        self._remedy = remedy
        self._wait = timedelta(seconds=WAIT_S)
        self._rounds = {True: _Round(), False: _Round()}
        """Rounds of training, and of a forward pass without gradients."""
        self._evaluates = False
        # a rank may be in one of them while another is in the other, with another size
        self._actions = host_group(model)
        self._ends = host_group(model)
        by_rank: list[Any] = [None] * dist.get_world_size()
        mine = [name for name, _ in model.named_parameters()]
        dist.all_gather_object(by_rank, mine, group=self._ends)
        self._names = list(dict.fromkeys(name for names in by_rank for name in names))

    def before(self, action: str) -> None:
        """Call before something that all ranks must do together.

        Raises:
            TrainingError: Another rank is about to do something else.
        """
        now = self._rounds[not self._evaluates]
        if now.begin(action):
            return
        waits = now.alike >= _ALIKE and not now.has_diverged
        usual = [*now.previous[len(now.done) - 1 :], _END][0]
        now.has_diverged = True
        self._compare(action, expected=usual if waits else None)

    def begin_forward(self, *, has_gradients: bool) -> None:
        """Call before a forward pass of the model."""
        self._evaluates = not has_gradients
        if self._evaluates:
            self._compare(_EVALUATE, expected=None)

    def end_forward(self) -> None:
        """Call after it."""
        if self._evaluates:
            self._rounds[False].end()
        self._evaluates = False

    def end_step(self, used: Collection[str], order: Sequence[int] = ()) -> tuple[set[str], bool]:
        """Compare a backward pass, or all of a step's. All ranks call it together.

        Args:
            used: Parameters that got a gradient on this rank.
            order: In which this rank came to the groups of parameters.

        Returns:
            Parameters that got one on any rank; whether the order was the same on all.

        Raises:
            TrainingError: Ranks hold other values in a buffer.
        """
        self.before(_END)
        self._rounds[True].end()
        checksums = [zlib.crc32(str(list(order)).encode()), self._buffers.checksum()]
        data = b"".join(number.to_bytes(_CHECKSUM_BYTES) for number in checksums)
        # equal on all ranks if the largest byte is the smallest
        both = [*data, *(255 - byte for byte in data)]
        found = torch.tensor([*both, *(name in used for name in self._names)], dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._ends)
        numbers = found.tolist()
        size = len(data)
        largest, smallest = numbers[:size], [255 - byte for byte in numbers[size : 2 * size]]
        if largest[_CHECKSUM_BYTES:] != smallest[_CHECKSUM_BYTES:]:
            self._buffers.fail(self._ends)
        pairs = zip(self._names, numbers[2 * size :], strict=True)
        is_same = largest[:_CHECKSUM_BYTES] == smallest[:_CHECKSUM_BYTES]
        return {name for name, is_used in pairs if is_used}, is_same

    def _compare(self, action: str, *, expected: str | None) -> None:
        """Args:
        expected: What is usual at this place, where other ranks may be at that; None: all compare.
        """
        number = zlib.crc32(action.encode())
        pair = torch.tensor([number, -number])
        work = dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self._actions, async_op=True)
        assert work is not None
        if action == _EVALUATE:
            self._wait_to_evaluate(work)
        elif expected is None:
            work.wait()
        else:
            try:
                work.wait(self._wait)
            except RuntimeError as error:
                self._fail({f"rank {dist.get_rank()}": action, "another rank": expected}, error)
        if pair[0] != -pair[1]:
            actions: list[Any] = [None] * dist.get_world_size(self._actions)
            dist.all_gather_object(actions, action, group=self._actions)
            self._fail({f"rank {rank}": action for rank, action in enumerate(actions)})

    def _wait_to_evaluate(self, work: dist.Work) -> None:
        """Wait for all ranks, less long than they do at a barrier of the script."""
        alone = (
            f"rank {dist.get_rank()} calls the model without gradients, and other ranks do not. "
            "They share its parameters, so all ranks must call it, also to evaluate or to "
            "generate: take the call out of `if rank == 0:`, or let each rank hold the whole "
            f"model: SHARDYARD_PARALLEL=dp_replicate={dist.get_world_size()},dp_shard=1"
        )
        limit = 0.75 * group_timeout(dist.group.WORLD)
        late = threading.Timer(_SOON_S, warn, [alone])
        late.start()
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            raise TrainingError(f"For {limit:.0f} s, {alone}") from error
        finally:
            late.cancel()

    def _fail(self, by_rank: Mapping[str, str], cause: BaseException | None = None) -> NoReturn:
        first = next(iter(by_rank.values()))
        other = next(rank for rank, action in by_rank.items() if action != first)
        told = f"{next(iter(by_rank))} {first}, {other} {by_rank[other]}"
        names = [self._parameters_of(action) for action in (first, by_rank[other])]
        of = "; ".join(dict.fromkeys(name for name in names if name))
        raise TrainingError(
            f"Ranks call different modules: {told}. A call of a block gathers its parameters from "
            f"all ranks, so all ranks must call the same blocks in the same order. "
            f"Parameters: {of or 'of the model'}. {self._remedy}"
        ) from cause

    def _parameters_of(self, action: str) -> str:
        place = action.partition(" ")[2]
        found = [name for name in self._names if name.startswith(f"{place}.")]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return ", ".join(found[:4]) + more


class _Buffers:
    """Buffers that must be equal on all ranks: those of the state dict, and counts.

    Batch normalisations are left out: their running statistics are those of all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = [
            (f"{place}.{name}" if place else name, module, name)
            for place, module in model.named_modules()
            if not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in non_persistent_buffers(module) or _counts(buffer)
        ]
        self._seen: dict[str, tuple[int, int]] = {}
        self._checksums: dict[str, int] = {}

    def checksum(self) -> int:
        """Equal on two ranks if all buffers are; what has not changed is not read again."""
        for name, module, key in self._entries:
            buffer = getattr(module, key)
            if not isinstance(buffer, Tensor):
                continue
            state = (id(buffer), change_count(buffer))
            if self._seen.get(name) != state:
                self._seen[name] = state
                self._checksums[name] = checksum_of(buffer)
        return zlib.crc32(str(list(self._checksums.items())).encode())

    def fail(self, group: dist.ProcessGroup) -> NoReturn:
        """Name the buffers that differ. All ranks call it."""
        by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(by_rank, self._checksums, group=group)
        apart = [n for n in by_rank[0] if any(each.get(n) != by_rank[0][n] for each in by_rank)]
        other = next(
            r for r, each in enumerate(by_rank) if each.get(apart[0]) != by_rank[0][apart[0]]
        )
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        raise TrainingError(
            f"The buffer {apart[0]}{more} of rank 0 is not that of rank {other}: each rank changes "
            "it by its own samples. A model has one value of each buffer. Sum what a step adds "
            "over ranks before you add it (torch.distributed.all_reduce), or keep it in a plain "
            "attribute."
        )


def _counts(buffer: Tensor) -> bool:
    """Whether a buffer may hold counts. What is not saved else is made by the module itself."""
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)


def checksum_of(tensor: Tensor) -> int:
    """Return the checksum of a tensor's bytes; waits for the device."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return zlib.crc32(content, zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def host_group(model: nn.Module) -> dist.ProcessGroup:
    """Make a gloo group of all ranks that ends with the model. All ranks call it together."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    weakref.finalize(model, _end, group).atexit = False
    return group


def _end(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # it has ended with all others
        dist.destroy_process_group(group)

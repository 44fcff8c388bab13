"""Optimizer state in host memory: some parameters' at a time is on the device, for its update.

Weights and gradients may lie there too: then they come with the state, and the weights go back.

The update itself stays on the device, with the numbers that it has without offload, bit for bit.
While a part is updated the next one's state comes and that of the one before goes back, each over
its own queue: a link carries both ways at once. So three parts are on the device at most.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardyard.config.optimizers import NUMBERS
from shardyard.parallel.device import CopyQueue
from shardyard.train.optimizers import State

MOVED_ELEMENTS = 2**25
"""Parameters whose state moves together: 256 MiB of AdamW's, which keep a link busy."""


WEIGHT, GRADIENT = "weight", "gradient"
"""Names of states next to the averages."""

_STAY = (*NUMBERS, GRADIENT)
"""States that stay: steps are counted on the device, and a gradient is used up."""


class _Coming(NamedTuple):
    states: dict[str, State]
    """On the device, once the mark is reached."""
    arrived: torch.Event | None


class StatesOnHost:
    """Moves the state of this rank's shards; what counts steps stays on the device."""

    def __init__(self, device: torch.device, *, with_weights: bool = False) -> None:
        """Args:
        with_weights: Shards and gradients lie in host memory too.
        """
        self.device = device
        self.with_weights = with_weights
        self._out, self._back = CopyQueue(device), CopyQueue(device)
        self._copied_out: torch.Event | None = None
        self.moved_bytes = 0
        """Bytes that have come to the device so far."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an average in host memory; pinned, so that copies do not block."""
        pinned = self.device.type != "cpu"
        return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

    def in_turn(
        self, parts: Sequence[Sequence[str]], host_state: Mapping[str, State]
    ) -> Iterator[tuple[Sequence[str], dict[str, State]]]:
        """Yield each part with its state on the device; changes there are copied back.

        It never waits on the host.

        Args:
            host_state: State by name, with ``WEIGHT`` and ``GRADIENT`` where they are held
                there too.
        """
        self._out.wait(
            self._copied_out
        )  # on the device: the step before has written what is read now
        leaving: tuple[dict[str, State], torch.Event | None] | None = None
        coming = self._fetch(parts[0], host_state)
        for index, names in enumerate(parts):
            states, arrived = coming
            if index + 1 < len(parts):  # before the update is given, so that it waits for less
                coming = self._fetch(parts[index + 1], host_state)
            self._back.wait(arrived)
            yield names, states
            # Given back one part late: the copy has had the time of a whole update to end.
            if leaving is not None:
                self._release(*leaving)
            leaving = (states, self._return(states, host_state))
        if leaving is not None:
            self._copied_out = leaving[1]
            self._release(*leaving)

    def synchronize(self) -> None:
        """Wait until host memory holds what the last step wrote: before anybody else reads it."""
        if self._copied_out is not None:
            self._copied_out.synchronize()

    def _fetch(self, names: Sequence[str], host_state: Mapping[str, State]) -> _Coming:
        states = {
            name: {k: self._on_device(k, v) for k, v in host_state[name].items()} for name in names
        }
        return _Coming(states, self._back.mark())

    def _on_device(self, key: str, value: Tensor) -> Tensor:
        if key in NUMBERS:
            return value
        self.moved_bytes += value.numel() * value.element_size()
        return self._back.to_device(value)

    def _return(
        self, states: Mapping[str, State], host_state: Mapping[str, State]
    ) -> torch.Event | None:
        for name, state in states.items():
            for key, value in state.items():
                if key not in _STAY:
                    self._out.into_host(host_state[name][key], value)
        return self._out.mark()

    def _release(self, states: dict[str, State], copied_out: torch.Event | None) -> None:
        """Free a part's memory on the device; what takes it next waits for the copy there."""
        self._out.wait(copied_out)
        states.clear()

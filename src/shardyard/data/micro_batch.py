"""What one forward and backward pass reads. Shape suffix: B = samples in a micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100
"""Target where nothing is to be predicted; the default ``ignore_index`` of torch's losses."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads: named fields, which a task knows by their names."""

    fields: Mapping[str, Tensor]
    """Name -> (B, ...), on the CPU. Of text: tokens, targets and positions, int64."""
    samples_B: Tensor
    """Position of each sample in the stream of samples, int64; -1 for a row of padding."""
    work: int
    """What went through the model, padding left out: of text, tokens."""
    lengths_B: Tensor | None = None
    """Tokens of each row, int64; padding follows them. None: rows are full."""

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def with_fields(self, **fields: Tensor) -> "MicroBatch":
        """The same samples with other values of some fields."""
        return replace(self, fields={**self.fields, **fields})

    @property
    def is_padding(self) -> bool:
        """Whether no sample is in it: it is there so that all ranks have equally many."""
        return bool((self.samples_B < 0).all())

    def cut(self) -> "MicroBatch":
        """Its samples without rows of padding; a row stays of what is padding alone."""
        rows = max(1, int((self.samples_B >= 0).sum()))
        if rows == len(self.samples_B):
            return self
        fields = {name: field[:rows] for name, field in self.fields.items()}
        lengths_B = None if self.lengths_B is None else self.lengths_B[:rows]
        return replace(self, fields=fields, samples_B=self.samples_B[:rows], lengths_B=lengths_B)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on a device."""
        if device.type == "cpu":
            return self
        fields = {name: _moved(field, device) for name, field in self.fields.items()}
        lengths_B = None if self.lengths_B is None else _moved(self.lengths_B, device)
        samples_B = _moved(self.samples_B, device)
        return replace(self, fields=fields, samples_B=samples_B, lengths_B=lengths_B)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory does a copy not wait for the device's earlier work
    pinned = tensor if tensor.device == device else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)

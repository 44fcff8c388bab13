"""Mix images (mixup, cutmix): each becomes a mixture of two, with two labels and a weight.

mixup (Zhang et al. 2017, arXiv:1710.09412) weighs whole images. cutmix (Yun et al. 2019,
arXiv:1905.04899) puts a box of the other into one, and weighs labels by area. Each image of
a micro-batch is mixed with the next one, the last with the first. That is at random because
the order of samples is; a single image is mixed with itself and does not change. What is
drawn belongs to the position of a sample in the stream. So a step depends on
``optim.micro_batch``, and on no layout.

What is mixed is decided where samples are read, and done on the device. Shape suffixes in
this file: B = images of a micro-batch, C = channels, H, W = rows and columns of pixels
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardyard.data.loader import MicroBatch
from shardyard.data.order import KeyedRng, RngPurpose

BY_MICRO_BATCH = "images are mixed with others of their micro-batch"
"""Why a resume keeps ``optim.micro_batch``."""

_Box = tuple[int, int, int, int]
_NOWHERE = (0, 0, 0, 0)


class _Mixture(NamedTuple):
    """Mixture that an image becomes."""

    pixel_share: float
    """Share of its own pixels outside of the box."""
    box: _Box
    """Left, top, right and bottom of the part that is only the other's."""
    label_share: float
    """Share of its own label."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Says what each image of a micro-batch is mixed with. With both ways, each has half."""

    seed: int
    size: int
    """Rows and columns of an image."""
    mixup: float
    """Images are weighed by Beta(mixup, mixup); 0: none is."""
    cutmix: float
    """The share outside of the box is Beta(cutmix, cutmix), where it does not cross the border; 0:
    there is no box."""

    def __call__(self, batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG002
        """The micro-batch with ``other``, ``pixel_share``, ``box`` and ``label_share`` a row."""
        rows = int((batch.samples_B >= 0).sum())
        others_B = torch.arange(len(batch.samples_B))
        others_B[:rows] = (others_B[:rows] + 1) % max(rows, 1)
        mixtures = [self._sample_mixture(position) for position in batch.samples_B.tolist()]
        return batch.with_fields(
            other=others_B,
            pixel_share=torch.tensor([each.pixel_share for each in mixtures]),
            box=torch.tensor([each.box for each in mixtures]),
            label_share=torch.tensor([each.label_share for each in mixtures]),
        )

    def _sample_mixture(self, position: int) -> _Mixture:
        """Draw the mixture of the sample at a stream position; padding (-1) is not mixed."""
        if position < 0:
            return _Mixture(1.0, _NOWHERE, 1.0)
        # positions stand for (epoch, sample), and nothing else is drawn at this place
        rng = KeyedRng(self.seed, 0, position)
        is_cutmix = bool(self.cutmix) and not (self.mixup and rng.randint(RngPurpose.MIX, 0, 2))
        share = rng.symmetric_beta(RngPurpose.MIX, 1, self.cutmix if is_cutmix else self.mixup)
        if not is_cutmix:
            return _Mixture(share, _NOWHERE, share)
        half = int(0.5 * math.sqrt(1.0 - share) * self.size)
        column, row = (rng.randint(RngPurpose.MIX, number, self.size) for number in (3, 4))
        box = (
            max(0, column - half),
            max(0, row - half),
            min(self.size, column + half),
            min(self.size, row + half),
        )
        covered = (box[2] - box[0]) * (box[3] - box[1])
        return _Mixture(1.0, box, 1.0 - covered / self.size**2)


def apply_mixing(x_BCHW: Tensor, batch: MicroBatch) -> Tensor:
    """Images as ``Mixing`` said; both on the device.

    Args:
        x_BCHW: Numbers in which mixing is linear: normalised, or not yet.
    """
    columns_W = torch.arange(x_BCHW.shape[3], device=x_BCHW.device)
    rows_H = torch.arange(x_BCHW.shape[2], device=x_BCHW.device)
    left_B1, top_B1, right_B1, bottom_B1 = batch["box"][:, :, None].unbind(1)
    in_columns_BW = (left_B1 <= columns_W) & (columns_W < right_B1)
    in_rows_BH = (top_B1 <= rows_H) & (rows_H < bottom_B1)
    is_other_BHW = in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
    own_BHW = torch.where(is_other_BHW, 0.0, batch["pixel_share"][:, None, None])
    own_B1HW = own_BHW[:, None].to(x_BCHW.dtype)
    # a weight of 1 or 0 leaves pixels as they are, bit for bit
    return own_B1HW * x_BCHW + (1.0 - own_B1HW) * x_BCHW[batch["other"]]

"""Images, each of one class.

Shape suffixes in this file:
    B = images in a micro-batch
    C = classes
    H, W = rows and columns of pixels
"""

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.config.resolved import Resolved
from shardyard.config.rules.images import class_names
from shardyard.config.schema.data import Images
from shardyard.config.schema.recipe import Recipe
from shardyard.data.images.decode import decode_threads, small_jpeg
from shardyard.data.images.index import ImageIndex
from shardyard.data.images.mixup import BY_MICRO_BATCH as BY_MIXING
from shardyard.data.images.mixup import apply_mixing
from shardyard.data.images.samples import ImageSet, ImageStream
from shardyard.data.images.transforms import eval_view, train_mixing, train_view
from shardyard.data.loader import MicroBatch
from shardyard.data.own.samples import open_items
from shardyard.data.samples import identity_prepare
from shardyard.models.batch_norm import BY_MICRO_BATCH, BatchNorms
from shardyard.models.grad_scale import LossScale
from shardyard.models.random import SampleKeys
from shardyard.parallel.fsdp import GradientSync, backward_all, reshard, summable
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.parallel.step_counters import Watcher
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.confusion import count_confusion, no_confusion
from shardyard.tasks.loss_computation import Computation, LossSums

if TYPE_CHECKING:
    from shardyard.data.images.transforms import ImageTransform

TOP = (1, 5)
"""Guesses among which the right class is counted."""


class ImageClassification(Task):
    """Says which class an image is of; judged by its first guess, and by its first five."""

    @staticmethod
    def open_data(resolved: Resolved) -> TaskData:
        """Both splits: the training images without end, the held-out ones each once."""
        recipe = resolved.recipe
        if resolved.data.item_kind is not None:
            mixing = {"train": train_mixing(recipe), "eval": identity_prepare}
            return TaskData(*open_items(resolved, vocab_size=None, prepare=mixing.__getitem__))
        threads = decode_threads(recipe.data.images.threads)
        train = ImageStream(
            _images(resolved, "train", train_view(recipe)),
            threads,
            seed=recipe.run.seed,
            prepare=train_mixing(recipe),
        )
        if not resolved.data.eval_samples:
            return TaskData(train, None)
        held_out = _images(resolved, "eval", eval_view(recipe))
        return TaskData(train, ImageStream(held_out, threads, seed=None))

    @staticmethod
    def compute(
        model: ParallelModel, mesh: Mesh, *, recipe: Recipe, device: torch.device
    ) -> Computation[MicroBatch]:
        """Not asked: a network is sharded as a whole (``train/images.py``)."""
        raise NotImplementedError

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Black images of the first class, mixed as real ones."""
        samples, size = int(recipe.optim.micro_batch), int(recipe.data.images.size)
        batch = MicroBatch(
            fields={
                "image": torch.zeros(samples, size, size, 3, dtype=torch.uint8),
                "label": torch.zeros(samples, dtype=torch.int64),
            },
            samples_B=torch.zeros(samples, dtype=torch.int64),
            work=samples,
        )
        return train_mixing(recipe)(batch, torch.ones(samples, dtype=torch.int64))

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Loss in nats an image, and the share that was guessed."""
        return {"loss": loss, **means}

    @staticmethod
    def class_names(resolved: Resolved) -> Sequence[str]:
        """Return the names in the prepared data."""
        return class_names(resolved) or ()

    def predictions(self, resolved: Resolved) -> list[dict[str, Any]]:
        """Return validation images over the whole split, each as a small JPEG in base64."""
        total = resolved.data.eval_samples
        if not total or not isinstance(self.computation, ImageComputation):
            return []
        load, classes = _validation_images(resolved)
        shown = sorted({number * total // _SHOWN for number in range(_SHOWN)})
        # Every rank computes the same images, in micro-batches: a forward pass gathers weights.
        at_once, found = int(resolved.recipe.optim.micro_batch), []
        for start in range(0, len(shown), at_once):
            loaded = [load(sample) for sample in shown[start : start + at_once]]
            if loaded[0][0].dtype != np.uint8:
                return []  # normalized by the user's dataset: their colours are not known
            pixels_BHWC = torch.from_numpy(np.stack([pixels for pixels, _ in loaded]))
            shares_B, guesses_B = self.computation.guess(pixels_BHWC).max(dim=1)
            guesses = zip(loaded, guesses_B.tolist(), shares_B.tolist(), strict=True)
            found += [
                {
                    "jpeg": base64.b64encode(small_jpeg(pixels, side=_THUMBNAIL)).decode(),
                    "label": _class_name(classes, int(label)),
                    "predicted": _class_name(classes, guess),
                    "probability": round(share, 4),
                }
                for (pixels, label), guess, share in guesses
                if math.isfinite(share)
            ]
        return found


_SHOWN = 8
"""Images that a report shows."""

_THUMBNAIL = 96
"""Pixels of the longer side of one."""


def _class_name(classes: Sequence[str], label: int) -> str:
    return classes[label] if 0 <= label < len(classes) else str(label)


def _validation_images(
    resolved: Resolved,
) -> tuple[Callable[[int], tuple[npt.NDArray[Any], int]], Sequence[str]]:
    """Return a reader of a validation image and its label by number, and the classes' names."""
    if resolved.data.item_kind is None:
        images = _images(resolved, "eval", eval_view(resolved.recipe))
        return lambda index: images.load_sample(index, 0), images.index.classes
    _, held_out = open_items(resolved, vocab_size=None, prepare=lambda _: identity_prepare)
    assert held_out is not None  # it has samples

    def load(index: int) -> tuple[npt.NDArray[Any], int]:
        batch = held_out.micro_batch(range(index, index + 1), 1)
        return batch["image"][0].numpy(), int(batch["label"][0])

    return load, class_names(resolved) or []


def _images(resolved: Resolved, split: str, view: "ImageTransform") -> ImageSet:
    images = resolved.recipe.data.images
    index = ImageIndex(Path(resolved.data.dir), split)
    return ImageSet(index, view, size=int(images.size), cache_bytes=images.cache_mib * 2**20)


class ImageComputation(Computation[MicroBatch]):
    """Computes micro-batches by a network that returns logits."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        norms: BatchNorms | None,
        images: Images,
        label_smoothing: float,
        device: torch.device,
        keys: SampleKeys,
    ) -> None:
        """Take a network that is sharded.

        Args:
            norms: Its batch normalisations; None: it has none.
            images: How pixels become what it reads.
            label_smoothing: Share of a label that is spread over all classes, in backward passes.
            keys: What its dropout asks.
        """
        self.model = model
        self.roots = [model]
        self.statistics = () if norms is None else (norms,)
        why = [BY_MICRO_BATCH] if norms is not None and not norms.over_step else []
        why += [BY_MIXING] if images.mixes else []
        self.fixed_settings = {"optim.micro_batch": ", and ".join(why)} if why else {}
        self.loss_scale = LossScale()
        self._norms = norms
        self._keys = keys
        self._label_smoothing = label_smoothing
        self._mean_C11 = torch.tensor(images.mean, device=device).view(-1, 1, 1)
        self._std_C11 = torch.tensor(images.std, device=device).view(-1, 1, 1)
        self._device = device
        self._sync = GradientSync(model, mesh)

    def means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an evaluation's share of images whose class is among the first guesses."""
        return {name: sums[name] / sums["images"] for name in _names()} if sums else {}

    def backward(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward passes of all micro-batches."""
        counts: list[Tensor] = []

        def losses() -> Iterator[Tensor]:
            for batch in batches:
                found = self._loss(batch, smoothing=self._label_smoothing)
                counts.append(found.count)
                yield found.loss

        total = backward_all(losses(), self._sync, number=len(batches))
        return LossSums(total, torch.stack(counts).sum())

    def forward(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run only forward passes, and count right guesses."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total, divisor, sums = zero, zero, dict.fromkeys((*_names(), "images"), zero)
        sums |= self.objective.zeros(self._device)
        confusion: dict[str, Tensor] = {}
        for batch in batches:
            found = self._loss(batch)
            total, divisor = total + summable(found.loss), divisor + found.count
            confusion = confusion or no_confusion(found.logits_BC.shape[1], self._device)
            if batch.is_padding:
                continue
            labels_B = found.fields["label"]
            counted = _right(found.logits_BC, labels_B)
            counted |= self.objective.metric_sums(found.logits_BC, found.fields)
            for name, each in counted.items():
                sums[name] = sums[name] + each
            for each in confusion.values():
                count_confusion(each, found.logits_BC.argmax(dim=1), labels_B)
            sums["images"] = sums["images"] + len(labels_B)
        reshard(self.roots)
        return LossSums(total, divisor, sums | confusion)

    @torch.no_grad()
    def guess(self, bytes_BHWC: Tensor) -> Tensor:
        """Return the probability of each class (B, C) for images uint8 (B, H, W, 3)."""
        self.model.eval()
        pixels_BCHW = self._pixels(bytes_BHWC.to(self._device))
        shares_BC: Tensor = self.model(pixel_values=pixels_BCHW).logits.float().softmax(dim=1)
        reshard(self.roots)
        self.model.train()
        return shares_BC.cpu()

    def watch(self, watcher: Watcher) -> None:
        """Follow its backward passes."""
        self._sync.watcher = watcher

    def _loss(self, batch: MicroBatch, *, smoothing: float = 0.0) -> "_ImageLoss":
        """Return a micro-batch's sum of losses, 0 for pure padding, and what it is of."""
        has_weight = not batch.is_padding
        if self._norms is not None:
            self._norms.is_weightless, self._norms.counts = not has_weight, int(has_weight)
        read = batch.cut().to(self._device)
        self._keys.samples_B = read.samples_B
        pixels_BCHW = self._pixels(read["image"])
        if "other" in read.fields:
            pixels_BCHW = apply_mixing(pixels_BCHW, read)
        logits_BC = self.model(pixel_values=pixels_BCHW).logits.float()
        fields = dict(read.fields)
        if self.objective.loss is None:
            loss = _losses(logits_BC, read, smoothing).sum()
            count = torch.tensor(len(logits_BC), dtype=torch.float64, device=self._device)
        else:
            loss, count = self.objective.loss_sum(logits_BC, fields)
        loss = self.loss_scale.on(loss if has_weight else 0.0 * loss)
        return _ImageLoss(loss, count if has_weight else 0.0 * count, logits_BC, fields)

    def _pixels(self, bytes_BHWC: Tensor) -> Tensor:
        """Return what the network reads (B, 3, H, W), by mean and deviation of each colour.

        Floats (B, 3, H, W) of the user's own dataset are normalized already.
        """
        if bytes_BHWC.is_floating_point():
            return bytes_BHWC
        bytes_BCHW = bytes_BHWC.permute(0, 3, 1, 2)
        if self._device.type == "cpu":  # convolutions are quicker there on planes; tensor cores are
            bytes_BCHW = bytes_BCHW.contiguous()  # on channels side by side, as pictures are read
        return (bytes_BCHW.float() / 255.0 - self._mean_C11) / self._std_C11


@dataclass(frozen=True)
class _ImageLoss:
    """Losses of one micro-batch."""

    loss: Tensor
    """Their sum, scaled."""
    count: Tensor
    """Their number, fp64; 0 for pure padding."""
    logits_BC: Tensor
    fields: dict[str, Tensor]
    """Fields of the micro-batch on the device, without padding."""


def _losses(logits_BC: Tensor, batch: MicroBatch, smoothing: float) -> Tensor:
    """Return the loss of each image; for mixed ones, of both labels by their shares."""
    losses_B = F.cross_entropy(
        logits_BC, batch["label"], reduction="none", label_smoothing=smoothing
    )
    if "other" not in batch.fields:
        return losses_B
    others_B = F.cross_entropy(
        logits_BC, batch["label"][batch["other"]], reduction="none", label_smoothing=smoothing
    )
    share_B = batch["label_share"]
    return share_B * losses_B + (1.0 - share_B) * others_B


def _names() -> list[str]:
    return [f"top{k}" for k in TOP]


def _right(logits_BC: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
    """Count the images that have their class among the first guesses, fp64."""
    guesses = min(max(TOP), logits_BC.shape[1])
    hits_Bk = logits_BC.topk(guesses, dim=1).indices == labels_B[:, None]
    return {f"top{k}": hits_Bk[:, :k].any(dim=1).sum().double() for k in TOP}

"""Round the length of a run up to whole steps, and reject a length that rounding changes much.

A published set of images says its number before any of them is read.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import is_remote
from shardyard.config.tasks import task_row
from shardyard.errors import Problem

MOST_ROUNDED = Fraction("1.05")
"""Longest that a run may become by rounding, as a share of the length that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """A length in samples, and what whole steps make of it."""

    requested: Fraction
    """Samples that were asked for."""
    batch: int
    """Samples of a step."""

    @property
    def steps(self) -> int:
        """Whole steps, at least one."""
        return max(1, math.ceil(self.requested / self.batch))

    @property
    def samples(self) -> int:
        """Samples of these steps."""
        return self.steps * self.batch

    @property
    def factor(self) -> Fraction:
        """Samples that are trained on, as a share of those that were asked for."""
        return self.samples / self.requested if self.requested else Fraction(1)

    def words(self, unit: str) -> str:
        """Both numbers, unless they are equal."""
        if self.factor == 1:
            return unit
        made = f"{self.steps:,} steps of {self.batch:,} train {self.samples:,}"
        return f"{unit}: {float(self.requested):,.10g} samples, and {made}"


def samples_of_epochs(epochs: float | None, train_samples: int) -> Fraction:
    """Samples of so many epochs, by exact arithmetic: 0.7 epochs of 10 are 7, and 0.7 as a float
    is a bit less."""
    return Fraction(str(epochs or 1)) * train_samples


def requested_samples(recipe: Recipe, train_samples: int | None) -> Fraction | None:
    """Samples that a recipe asks for in a unit other than steps; None: not known yet, or in steps.

    Args:
        train_samples: Samples of an epoch; None: the data is not prepared yet.
    """
    run, seq_len = recipe.run, recipe.data.seq_len
    if run.steps is not None:
        return None
    if run.samples is not None:
        return Fraction(run.samples)
    if run.tokens is not None:
        return None if seq_len == "auto" else Fraction(run.tokens, seq_len)
    return None if not train_samples else samples_of_epochs(run.epochs, train_samples)


def fitting_batch(requested: Fraction, batch: int, *, ranks: int) -> int | None:
    """The largest smaller batch that hardly rounds, and that the ranks can share; None: none."""
    most = min(batch - 1, math.floor(requested))
    sizes = range(most - most % ranks, 0, -ranks)
    return next(
        (b for b in sizes if Length(requested=requested, batch=b).factor <= MOST_ROUNDED), None
    )


def batch_of_whole_steps(
    recipe: Recipe, batch: int, *, ranks: int, train_samples: int | None
) -> int:
    """A batch, or one of at least half the size that the length of the run hardly rounds for."""
    asked = requested_samples(recipe, train_samples)
    if asked is None or Length(requested=asked, batch=batch).factor <= MOST_ROUNDED:
        return batch
    smaller = fitting_batch(asked, batch, ranks=ranks)
    return batch if smaller is None or 2 * smaller < batch else smaller


def check_run_length(
    recipe: Recipe, *, train_samples: int | None = None, description: str = ""
) -> list[Problem]:
    """A length that whole steps make more than 5 % longer.

    Args:
        recipe: As far as it is resolved.
        train_samples: Samples of an epoch; None: the data is not prepared yet.
        description: What these samples are made of, in words.
    """
    run, batch = recipe.run, recipe.optim.global_batch
    asked = requested_samples(recipe, train_samples)
    if asked is None or batch == "auto":
        return []
    length = Length(requested=asked, batch=batch)
    if length.factor <= MOST_ROUNDED:
        return []
    if run.samples is not None:
        setting, given, trained = "run.samples", f"={run.samples}", Fraction(length.samples)
    elif run.tokens is not None:
        setting, given = "run.tokens", f"={run.tokens}"
        trained = run.tokens * length.factor
    else:
        given = f"={run.epochs:g}" if run.epochs else "=1, as no length is given"
        setting, trained = "run.epochs", Fraction(str(run.epochs or 1)) * length.factor
        given += f": {description}" if description else ""
    steps = f"{length.steps:,} step{'s' * (length.steps > 1)} of {batch:,} samples"
    smaller = None
    if recipe.optim.batch_per_device is None:
        smaller = fitting_batch(asked, batch, ranks=_data_ranks(recipe))
    remedy = "" if smaller is None else f" For the length as given: {_batch(recipe, smaller)}."
    text = (
        f"{given}; {steps} would train {float(trained):,.10g} {setting.removeprefix('run.')}, "
        f"{float(length.factor):.3g} times as much. To train that, set run.steps={length.steps} "
        f"instead.{remedy}"
    )
    return [Problem(setting, text)]


def _batch(recipe: Recipe, batch: int) -> str:
    """The settings for a smaller batch."""
    micro = recipe.optim.micro_batch
    each = batch // _data_ranks(recipe)
    too_large = isinstance(micro, int) and micro > each
    return f"optim.global_batch={batch}{f' optim.micro_batch={each}' if too_large else ''}"


def _data_ranks(recipe: Recipe) -> int:
    parallel = recipe.parallel
    degrees = (parallel.dp_replicate, parallel.dp_shard)
    return math.prod(degree for degree in degrees if isinstance(degree, int))


IMAGENET = {"train": 1_281_167, "val": 50_000}
"""Pictures of each split. Source: https://image-net.org/challenges/LSVRC/2012/"""
_NAMES = ("ilsvrc", "ilsvrc2012", "imagenet-1k", "imagenet1k")
_LIST = "ImageSets/CLS-LOC/train_cls.txt"


def train_image_count(recipe: Recipe) -> int | None:
    """Training pictures of a recipe that names ImageNet; None: its number is not known.

    A tree on this machine is counted by its own list, since it may be a part of ImageNet.
    """
    entries = recipe.data.entries
    if task_row(recipe.task.name).reads != "images" or len(entries) != 1:
        return None
    ((_, entry),) = entries
    name = PurePosixPath(str(entry).rstrip("/")).name.lower().removesuffix(".tar")
    if name not in _NAMES:
        return None
    folder = Path(str(entry)).expanduser()
    if is_remote(str(entry)) or not folder.exists():
        return IMAGENET["train"]
    try:
        with (folder / _LIST).open("rb") as lines:
            return sum(1 for line in lines if line.strip()) or None
    except OSError:
        return None

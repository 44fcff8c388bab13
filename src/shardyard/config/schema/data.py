"""The section ``data`` of a recipe: text or images, and how they become samples."""

from typing import Annotated, Literal

from pydantic import Field

from shardyard.config.data_choices import CHAT_TEMPLATES, DATA_FORMATS
from shardyard.config.schema.base import NAME, NAME_WORDS, Auto, Fraction, PositiveNumber, Section

TokenizerKindName = Literal["bpe", "wordpiece", "wordpiece-cased"]

_FORMAT_WORDS = " or ".join(DATA_FORMATS)
_TEMPLATE_WORDS = " or ".join(CHAT_TEMPLATES)

Sources = str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Share(Section):
    """One source of data.mixture."""

    source: Sources
    """Text of this source, as in data.source."""
    weight: PositiveNumber
    """Its share of the samples is this, divided by the sum of all weights."""
    name: Annotated[str, Field(pattern=NAME, description=NAME_WORDS)]
    """Name by which the source is validated and reported separately."""
    format: Annotated[str, Field(description=_FORMAT_WORDS)] | None = None
    """Instead of data.format."""
    text_key: str | None = None
    """Instead of data.text_key."""
    eval_source: Sources | None = None
    """Validation data of this source, as in data.eval_source."""


class Images(Section):
    """Conversion of picture files into the network's input."""

    size: Annotated[int, Field(ge=8, le=4096)] | Auto = "auto"
    """Pixels on a side of what the network is given; auto: as it was published with."""
    pack: bool | Auto = "auto"
    """Write pictures into tar shards of about 256 MB; auto: unless they are plain tar shards."""
    check: bool = True
    """Read each picture to its end during preparation, so that a broken one is reported then."""
    broken: Literal["refuse", "leave_out"] = "refuse"
    """Action on broken pictures; those left out are listed in left-out.txt."""
    image_key: str = "image"
    """The column of Parquet files that holds pictures."""
    label_key: str = "label"
    """The column of Parquet files, or key of JSON in tar shards, that holds labels."""
    threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Threads of each process that decode; auto: as a measured rate asks, at most its cores."""
    cache_mib: Annotated[int, Field(ge=1)] = 640
    """Memory of each process for pictures that are read ahead, in MiB, undecoded."""
    complete: bool = True
    """Require all pictures of ImageNet's tree ILSVRC; false: train on those that are there."""
    crop_area: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.08, 1.0)
    """Least and largest share of a picture's area that is cut out to learn from."""
    crop_ratio: Annotated[tuple[PositiveNumber, PositiveNumber], Field(strict=False)] = (
        0.75,
        1.3333333333333333,
    )
    """Least and largest ratio of width to height of what is cut out."""
    flip: Fraction = 0.5
    """Probability that a picture is mirrored; 0 where left and right have a meaning."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Weighting of pixels where a picture is resized, rotated or shifted, as in Pillow."""
    rand_augment: Annotated[int, Field(ge=0, le=14)] = 0
    """Operations of RandAugment in a row, drawn from 14; 0: none."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of each of them, up to 30; 9 is what ResNet-50 was published with."""
    erase: Fraction = 0.0
    """Probability that a random part of a picture is filled with data.images.mean."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Images of a micro-batch are weighed with each other by Beta(mixup, mixup); 0: none is."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """A box of one image is put into another, the rest Beta(cutmix, cutmix) of it; 0: none is. With
    mixup, half of the images each."""
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Share of a held-out picture's shorter side that is seen, in its middle."""
    mean: Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)] = (
        0.485,
        0.456,
        0.406,
    )
    """Taken off red, green and blue, which are from 0 to 1; those of ImageNet."""
    std: Annotated[tuple[PositiveNumber, PositiveNumber, PositiveNumber], Field(strict=False)] = (
        0.229,
        0.224,
        0.225,
    )
    """Divisors of red, green and blue after the mean is subtracted; the defaults are ImageNet's."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others of their micro-batch."""
        return bool(self.mixup or self.cutmix)


class Data(Section):
    """Text or images, and how they become samples."""

    source: Sources = "python-stdlib"
    """python-stdlib, digits, or files, folders, globs (or s3:// and others) of text or pictures."""
    mixture: Annotated[tuple[Share, ...], Field(strict=False)] = ()
    """Instead of source: several, each {name, source, weight}, dealt by weight in every 1,000
    samples; format and text_key may differ."""
    format: Annotated[str, Field(description=_FORMAT_WORDS)] = "by_suffix"
    """Format of the files. by_suffix: by each file's suffix, others are rejected; text: others
    are plain text; chat: rows of dialogues, whose answers are trained on (docs/chat.md).
    """
    text_key: str = "text"
    """The key of JSON objects, or column of Parquet files, that holds the text."""
    chat_template: Annotated[str, Field(description=_TEMPLATE_WORDS)] | None = None
    """Template that turns dialogues into text; null: the template next to the tokenizer."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens of dialogues to train on: the answers with the token that ends each, or all tokens."""
    loss_share: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.01, 0.99)
    """Least and largest share of the dialogues' tokens to train on; other data is rejected."""
    max_rejected: Fraction = 0.0
    """Largest share of the dialogues that may be left out as the chat template rejects them."""
    min_true_pairs: Fraction = 0.3
    """Smallest share of pairs whose second text follows the first, where a task judges pairs."""
    tokenizer: str = "auto"
    """A folder, a hub name (owner/name or owner/name@revision), or train; auto: the model's own."""
    tokenizer_kind: TokenizerKindName = "bpe"
    """Kind of tokenizer to train: byte-level BPE, or BERT's WordPiece without or with capitals."""
    bos: bool | Auto = "auto"
    """A token that begins each document; auto: where the tokenizer itself puts one before texts."""
    vocab_size: Annotated[int, Field(ge=257, le=2**24)] = 4096
    """Vocabulary of a tokenizer that is trained on the corpus."""
    # The largest in use is XLM-V's of 1 M (arXiv:2301.10472). From 2^31 the tokenizers library
    # asks for so much memory at once that it ends the process.
    seq_len: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Tokens in one sample, at least 2; auto: the model's context length, at most 4,096. An image
    counts as one."""
    eval_source: Sources | None = None
    """Validation data: files, folders, patterns or addresses, read as data.source is; null: files
    named validation in data.source, else data.eval_fraction of its documents."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the documents used for validation, chosen by a hash of their content; 0: no
    validation."""
    attend_across_documents: bool = True
    """Tokens attend to earlier documents of their sample; if not, nor are they predicted across."""
    pack: Literal["stream", "whole"] = "stream"
    """Samples are windows of running text, or as many whole documents as fit, each for itself."""
    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """Action on a document longer than a sample, if data.pack is whole."""
    dir: str = "prepared"
    """Folder that holds prepared data sets, one folder each, named by fingerprint."""
    workers: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Processes that prepare data; auto: the cores of this machine, within the limit
    of its container."""
    prefetch_steps: Annotated[int, Field(ge=1)] = 2
    """Steps read ahead while the device computes."""
    images: Images = Images()

    @property
    def attends_across(self) -> bool:
        """Whether tokens attend to earlier documents: whole ones are each for itself."""
        return self.attend_across_documents and self.pack == "stream"

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """Every place that text comes from, each behind the name of its setting."""
        holders: list[tuple[str, Section]] = [
            (f"data.mixture[{place}]", share) for place, share in enumerate(self.mixture)
        ]
        return tuple(
            (f"{prefix}.{key}", entry)
            for prefix, holder in holders or [("data", self)]
            for key in ("source", "eval_source")
            for entry in _each(getattr(holder, key))
        )


def _each(source: Sources | None) -> tuple[str, ...]:
    if source is None:
        return ()
    return (source,) if isinstance(source, str) else source

"""The section ``data`` of a recipe: text or images, and how they become samples."""

from typing import Annotated, Any, Literal

from pydantic import Field

from shardyard.config.data_choices import CHAT_TEMPLATES, DATA_FORMATS, TEMPLATE_SUFFIX
from shardyard.config.schema.base import NAME, NAME_WORDS, Auto, Fraction, PositiveNumber, Section

TokenizerKindName = Literal["bpe", "wordpiece", "wordpiece-cased"]

_FORMAT_WORDS = " or ".join(DATA_FORMATS)
_TEMPLATE_WORDS = f"{' or '.join(CHAT_TEMPLATES)} or FILE{TEMPLATE_SUFFIX}"

Tokens = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]

Sources = str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Share(Section):
    """One source of data.mixture."""

    source: Sources | None = None
    """Text of this source, as in data.source."""
    weight: PositiveNumber
    """Share of the samples, relative to the sum of all weights."""
    name: Annotated[str, Field(pattern=NAME, description=NAME_WORDS)]
    """Name under which this source is validated and reported separately."""
    module: str | None = None
    """Your own dataset in place of source, as in data.module."""
    module_settings: Annotated[dict[str, Any], Field(description="its arguments")] = Field(
        default_factory=dict
    )
    """Arguments of module."""
    format: Annotated[str, Field(description=_FORMAT_WORDS)] | None = None
    """Format of this source. null: data.format."""
    text_key: str | None = None
    """Key or column of the text in this source. null: data.text_key."""
    eval_source: Sources | None = None
    """Validation data of this source, as in data.eval_source."""


class Images(Section):
    """Conversion of picture files into the network's input, and augmentation."""

    size: Annotated[int, Field(ge=8, le=4096)] | Auto = "auto"
    """Width and height of the network's input in pixels. auto: the published size."""
    pack: bool | Auto = "auto"
    """Pack pictures into tar shards of about 256 MB. auto: unless they are plain tar shards
    already."""
    check: bool = True
    """Decode every picture during preparation, to report broken ones early."""
    broken: Literal["refuse", "leave_out"] = "refuse"
    """Broken pictures are an error, or (leave_out) skipped and listed in left-out.txt."""
    image_key: str = "image"
    """Column of the pictures in Parquet, or of their names in a CSV of labels."""
    label_key: str = "label"
    """Column in Parquet or CSV, or JSON key in tar shards, of the labels."""
    threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Decoding threads per process. auto: by the measured decoding rate, at most its cores."""
    cache_mib: Annotated[int, Field(ge=1)] = 640
    """Read-ahead memory per process for encoded pictures, in MiB."""
    complete: bool = True
    """Require all pictures of ImageNet's ILSVRC tree. false: train on those that exist."""
    crop_area: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.08, 1.0)
    """Random crop: smallest and largest share of a picture's area, in training."""
    crop_ratio: Annotated[tuple[PositiveNumber, PositiveNumber], Field(strict=False)] = (
        0.75,
        1.3333333333333333,
    )
    """Random crop: smallest and largest ratio of width to height."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip. Use 0 if left and right matter."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation for resizing, rotating and shifting, as in Pillow."""
    rand_augment: Annotated[int, Field(ge=0, le=14)] = 0
    """Number of RandAugment operations per picture, drawn from 14. 0: none."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """RandAugment magnitude, up to 30. 9: as published for ResNet-50."""
    erase: Fraction = 0.0
    """Probability of random erasing, filled with data.images.mean."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Mixup: blend images of a micro-batch by Beta(mixup, mixup). 0: off."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """CutMix by Beta(cutmix, cutmix). 0: off. With mixup: half of the images each."""
    eval_crop: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Share of a validation picture's shorter side that the center crop keeps."""
    mean: Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)] = (
        0.485,
        0.456,
        0.406,
    )
    """Mean subtracted from red, green and blue (0 to 1). Default: ImageNet's."""
    std: Annotated[tuple[PositiveNumber, PositiveNumber, PositiveNumber], Field(strict=False)] = (
        0.229,
        0.224,
        0.225,
    )
    """Standard deviation that divides red, green and blue. Default: ImageNet's."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others of their micro-batch."""
        return bool(self.mixup or self.cutmix)


class Data(Section):
    """Training and validation data: text or images, tokenizer, packing."""

    source: Sources = "python-stdlib"
    """Dataset: python-stdlib, digits, or files, folders, globs or addresses (s3:// and others) of
    text or pictures."""
    mixture: Annotated[tuple[Share, ...], Field(strict=False)] = ()
    """Several sources instead of data.source, each {name, source, weight}, mixed by weight in every
    1,000 samples."""
    module: str | None = None
    """Your own dataset instead of data.source, as package.module:function of the split
    (docs/tutorials/own-code.md)."""
    module_settings: Annotated[dict[str, Any], Field(description="its arguments")] = Field(
        default_factory=dict
    )
    """Arguments of data.module, such as {folder: /data/notes}."""
    module_workers: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Processes of each rank that read data.module. auto: its share of the cores, at most 4."""
    format: Annotated[str, Field(description=_FORMAT_WORDS)] = "by_suffix"
    """File format. by_suffix rejects unknown suffixes, text reads them as plain text; chat:
    dialogues (docs/chat.md)."""
    text_key: str = "text"
    """JSON key or Parquet column of the text."""
    id_type: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of ids in .bin files without header or index, as nanoGPT's."""
    id_rows: Literal["documents", "blocks"] | None = None
    """What rows of ids are. null: documents; rows that look like blocks of a stream are an error.
    """
    keys: Annotated[dict[str, str], Field(min_length=1)] | None = None
    """Your names of the keys of chat rows, {prompt: frage, completion: antwort}, or of columns with
    labels. null: as docs/chat.md and docs/classification.md have them."""
    labels: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the labels by number. []: those of the rows or the model."""
    chat_template: Annotated[str, Field(description=_TEMPLATE_WORDS)] | None = None
    """Chat template that turns dialogues into text. null: the template next to the tokenizer."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens of dialogues to train on: answers with their end tokens, or all."""
    loss_share: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.01, 0.99)
    """Smallest and largest share of the dialogues' tokens to train on; other data is rejected."""
    max_rejected: Fraction = 0.0
    """Largest share of dialogues that may be skipped because the chat template rejects them."""
    min_true_pairs: Fraction = 0.3
    """Smallest share of sentence pairs whose second text follows the first, for BERT pretraining.
    """
    tokenizer: str = "auto"
    """Tokenizer: a folder, a hub name (owner/name[@revision]), or train. auto: the model's own."""
    add_tokens: Tokens = ()
    """Tokens to add to the tokenizer and the model; text that spells one becomes it."""
    add_special_tokens: Tokens = ()
    """Special tokens to add, such as "<|im_start|>": only chat templates write them."""
    tokenizer_kind: TokenizerKindName = "bpe"
    """Tokenizer to train: byte-level BPE, or BERT's WordPiece, lower-case or cased."""
    bos: bool | Auto = "auto"
    """Start each document with a BOS token. auto: if the tokenizer does."""
    vocab_size: Annotated[int, Field(ge=257, le=2**24)] = 4096
    """Vocabulary size of a tokenizer to train."""
    # The largest in use is XLM-V's of 1 M (arXiv:2301.10472). From 2^31 the tokenizers library
    # asks for so much memory at once that it ends the process.
    seq_len: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Sequence length in tokens, at least 2. auto: the model's context length, at most 4,096. An
    image counts as one."""
    eval_source: Sources | None = None
    """Validation data, as in data.source. null: files named validation in data.source, else
    data.eval_fraction of its documents."""
    eval_sets: Annotated[dict[str, Sources], Field(description="name: source")] = Field(
        default_factory=dict
    )
    """More validation data, {code: code/*.py, hard: hard.jsonl}: each set is scored by itself, next
    to data.eval_source or data.eval_fraction."""
    eval_tasks: Annotated[dict[str, str], Field(description="name: task")] = Field(
        default_factory=dict
    )
    """Tasks of `shardyard evaluate` to score at each validation, {arc: tasks/arc.yaml}: files, or
    names of tasks."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of documents used for validation, chosen by a hash of their content. 0: no validation.
    """
    attend_across_documents: bool = True
    """Let tokens attend to earlier documents in their sample. false: documents are separate, also
    for the loss."""
    pack: Literal["stream", "whole"] = "stream"
    """Packing: stream cuts samples from running text; whole packs whole documents that do not
    attend to each other."""
    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """With data.pack=whole or labels: a longer document than a sample is an error, cut or dropped.
    """
    dir: str = "prepared"
    """Parent folder of prepared datasets, named by fingerprint."""
    workers: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Processes that prepare data. auto: the available cores, within a container's limit."""
    prefetch_steps: Annotated[int, Field(ge=1)] = 2
    """Steps of data to read ahead."""
    images: Images = Images()

    @property
    def attends_across(self) -> bool:
        """Whether tokens attend to earlier documents: whole ones and pairs are each for itself."""
        row = DATA_FORMATS.get(self.format)
        is_whole = self.pack == "whole" or (row is not None and row.holds_pairs)
        return self.attend_across_documents and not is_whole

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """Every place that text comes from, each behind the name of its setting.

        Empty: data.module makes it. Those of a mixture's modules are left out.
        """
        if self.module is not None:
            return ()
        holders: list[tuple[str, Section]] = [
            (f"data.mixture[{place}]", share) for place, share in enumerate(self.mixture)
        ]
        named = [
            (f"{prefix}.{key}", getattr(holder, key))
            for prefix, holder in holders or [("data", self)]
            for key in ("source", "eval_source")
        ]
        named += [(f"data.eval_sets.{name}", source) for name, source in self.eval_sets.items()]
        return tuple((setting, entry) for setting, source in named for entry in _each(source))


def _each(source: Sources | None) -> tuple[str, ...]:
    if source is None:
        return ()
    return (source,) if isinstance(source, str) else source

"""Every setting of a recipe: its name, type, bounds, default and one sentence on what it does.

The sections are frozen pydantic models; torch is not needed to read a recipe. ``auto`` is replaced
by ``config/resolve.py``, which also says why. What no type can say is checked in
``config/check.py``; what a layout may be is checked in ``config/legality.py``.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from shardyard.config.chat_templates import CHAT_TEMPLATES
from shardyard.config.data_formats import DATA_FORMATS
from shardyard.config.optimizers import OptimizerName
from shardyard.config.tasks import TASKS

Auto = Literal["auto"]
Degree = Annotated[int, Field(ge=1)]
TokenizerKindName = Literal["bpe", "wordpiece", "wordpiece-cased"]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
Averaging = Annotated[float, Field(ge=0, lt=1)]

_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
_NAME_WORDS = "a name of lower-case letters, digits and inner hyphens, at most 40 characters"
_DEVICE_WORDS = "cpu, cuda (also ROCm), xpu, hpu, xla, or what torch calls another accelerator"
_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_FORMAT_WORDS = " or ".join(DATA_FORMATS)
_TEMPLATE_WORDS = " or ".join(CHAT_TEMPLATES)
_TASK_WORDS = f"{', '.join(TASKS)}, or the name of a task that a package adds"
_PHASE_WORDS = "a list, each a few settings of run, data and optim"
_ID_WORDS = "an id of letters, digits, dots, hyphens and underscores, at most 63 characters"


def section_key(name: str) -> str:
    """The key under which a plug-in has its settings: dotted names have no hyphens."""
    return name.replace("-", "_")


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Own = TypeVar("Own", bound=Section)


class OpenSection(Section):
    """A section in which packages have sections of their own, under the names that they add.

    Their values are kept as plain ones: ``config/validate.py`` holds them against the package's
    section, and processes that have no use for the package need not have it.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)

    def own(self, name: str, kind: type[Own]) -> Own:
        """The settings of a plug-in, where none is given by default.

        Args:
            name: Of the plug-in.
            kind: Its section, which the recipe's check has held them against.
        """
        return kind.model_validate(self.__pydantic_extra__.get(section_key(name), {}))


class Run(Section):
    """Name, place and length of the run."""

    name: Annotated[str, Field(pattern=_NAME, description=_NAME_WORDS)] | Auto = "auto"
    """First part of the run id; auto: the recipe's file name."""
    id: Annotated[str, Field(pattern=_ID, description=_ID_WORDS)] | None = None
    """The run id itself, instead of <name>-<date>-<time>-<4 hex>."""
    dir: str = "runs"
    """Folder that holds the folders of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, data order and dropout."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Length in optimizer steps."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Length in tokens read; rounded up to whole steps."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Length in samples read; rounded up to whole steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in passes over the data; rounded up to whole steps. Without any length: one epoch."""
    target: Annotated[dict[str, PositiveNumber], Field(min_length=1)] | None = None
    """Stop early once an evaluation reaches this: {metric: value}, all of them where several stand
    there; the metrics of a task are in docs/verbs/train.md."""


class Lora(Section):
    """Adapters beside matrices that are not trained (LoRA)."""

    rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of the adapters, which alone are trained; null: there are none."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's input that is dropped."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Matrices that have one, named as in model.frozen or as `q_proj`; []: of blocks all dense."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)."""


class Model(Section):
    """What is trained: a preset, a path, a hub repository or a module."""

    preset: str | None = None
    """A named shape (`shardyard config --presets`); beside path or hub: the shape that is there."""
    path: str | None = None
    """A Hugging Face folder that the run sees: config.json, and weights if they are loaded."""
    hub: str | None = None
    """A repository on the Hugging Face hub, owner/name."""
    revision: str | None = None
    """Branch, tag or commit of model.hub; null: the default branch. A resume keeps the commit."""
    dir: str | None = None
    """Folder for what is fetched from the hub, one folder a commit; null: `models` beside the runs
    on launched nodes, the Hugging Face cache elsewhere."""
    config: str | Annotated[dict[str, Any], Field(description="its content")] | None = None
    """A config.json on this machine, which says the shape of a path or hub repository instead."""
    module: str | None = None
    """A model of your own as package.module:function (docs/own-module.md); data axes alone."""
    blocks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Of module: lists of modules, or modules, that are sharded and recomputed one by one."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules or parameters that are not trained, by name; `*` stands for one step of it."""
    lora: Lora = Lora()
    """Adapters that are trained instead of the model."""
    weights: Literal["auto", "random", "load"] = "auto"
    """Where weights come from; auto: random for a preset, loaded for path and hub."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Dropout after the embedding and each block's attention and MLP, of images before the head;
    auto: config.json's, or 0."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Of images: the l-th of L blocks, from 0, drops its branch for a share of drop_path x l / L of
    the samples (stochastic depth, arXiv:1603.09382); auto: config.json's, or 0."""
    batch_norm: Literal["micro_batch", "step"] = "micro_batch"
    """Of images: what batch normalisation is over; step: over all samples of a step, on whatever
    ranks (synchronised), each of which computes its own in one micro-batch."""
    batch_norm_momentum: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Of images: share of a step in running statistics; auto: 0.1, and 1 - 0.99 for EfficientNet,
    whose config.json has TensorFlow's meaning (transformers gives torch 0.99 itself)."""
    zero_last_norm: bool = False
    """Of images: the last norm of each residual branch begins at zero (arXiv:1706.02677)."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.01
    """Weight of a mixture's load-balance loss, for each block and sample (arXiv:2101.03961)."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.001
    """Weight of a mixture's squared router log-sum-exp, for each block (arXiv:2202.08906)."""
    compile: bool = False
    """Compile each block with torch.compile (slower first step, faster ones on an accelerator)."""


class Task(OpenSection):
    """What is learnt and how it is judged."""

    name: Annotated[str, Field(description=_TASK_WORDS)] = "causal_lm"
    """What is learnt: the next token, hidden ones, both that and pairs of texts (BERT), or what a
    package has put there."""
    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Evaluate on the held-out split every so many steps; always evaluated at the end."""
    eval_every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Evaluate every so many passes over the data, instead of every so many steps."""
    prompt: str = "def "
    """Start of the text generated at the end of the run; on dialogues, what a user asks then."""
    generate_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens generated from the prompt at the end of the run; 0: none."""
    label_smoothing: Averaging = 0.0
    """Share of each image's label that is spread over all classes, to learn from and not to judge
    by."""


Sources = str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Share(Section):
    """One source of data.mixture."""

    source: Sources
    """As data.source."""
    weight: PositiveNumber
    """Its share of the samples is this, divided by the sum of all weights."""
    name: Annotated[str, Field(pattern=_NAME, description=_NAME_WORDS)]
    """What it is called where it is judged and told of by itself."""
    format: Annotated[str, Field(description=_FORMAT_WORDS)] | None = None
    """Instead of data.format."""
    text_key: str | None = None
    """Instead of data.text_key."""


class Images(Section):
    """How files of pictures become what a network reads."""

    size: Annotated[int, Field(ge=8, le=4096)] | Auto = "auto"
    """Pixels on a side of what the network is given; auto: as it was published with."""
    pack: bool | Auto = "auto"
    """Write pictures into tar shards of about 256 MB; auto: unless they are plain tar shards."""
    check: bool = True
    """Read each picture to its end when it is prepared, so that a broken one is told then."""
    broken: Literal["refuse", "leave_out"] = "refuse"
    """What becomes of broken pictures; those left out are listed in left-out.txt."""
    image_key: str = "image"
    """The column of Parquet files that holds pictures."""
    label_key: str = "label"
    """The column of Parquet files, or key of JSON in tar shards, that holds labels."""
    threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Threads of each process that decode; auto: as a measured rate asks, at most its cores."""
    cache_mib: Annotated[int, Field(ge=1)] = 640
    """Memory of each process for pictures that are read ahead, in MiB, undecoded."""
    complete: bool = True
    """Of ImageNet's tree ILSVRC: all its pictures must be there; false: train on those that are."""
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
    """How pixels are weighed where a picture is resized, turned or shifted, as Pillow does it."""
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
    """What they are then divided by; those of ImageNet."""

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
    """What files hold: as their suffix says, others are refused; text: others are plain text;
    chat: rows of dialogues, of which the answers are learnt (docs/chat.md)."""
    text_key: str = "text"
    """The key of JSON objects, or column of Parquet files, that holds the text."""
    chat_template: Annotated[str, Field(description=_TEMPLATE_WORDS)] | None = None
    """How dialogues become text; null: by the template beside the tokenizer."""
    loss_on: Literal["answers", "all"] = "answers"
    """What of dialogues is learnt: the answers with the token that ends each, or every token."""
    loss_share: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.01, 0.99)
    """Dialogues are refused where a smaller or larger share of their tokens is learnt."""
    tokenizer: str = "auto"
    """A folder, a hub name (owner/name or owner/name@revision), or train; auto: the model's own."""
    tokenizer_kind: TokenizerKindName = "bpe"
    """What is trained: byte-level BPE, or BERT's WordPiece without or with capitals."""
    bos: bool | Auto = "auto"
    """A token that begins each document; auto: where the tokenizer itself puts one before texts."""
    vocab_size: Annotated[int, Field(ge=257, le=2**24)] = 4096
    """Vocabulary of a tokenizer that is trained on the corpus."""
    # The largest in use is XLM-V's of 1 M (arXiv:2301.10472). From 2^31 the tokenizers library
    # asks for so much memory at once that it ends the process.
    seq_len: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Tokens in one sample, at least 2; auto: the model's context length, at most 4,096. An image
    counts as one."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the documents held out for evaluation, chosen by a hash of their content."""
    attend_across_documents: bool = True
    """Tokens attend to earlier documents of their sample; if not, nor are they predicted across."""
    pack: Literal["stream", "whole"] = "stream"
    """Samples are windows of running text, or as many whole documents as fit, each for itself."""
    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """What becomes of a document longer than a sample, where data.pack is whole."""
    dir: str = "prepared"
    """Folder that holds prepared data sets, one folder each, named by fingerprint."""
    workers: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Processes that prepare data; auto: the cores of this machine."""
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
        if self.mixture:
            return tuple(
                (f"data.mixture[{place}].source", entry)
                for place, share in enumerate(self.mixture)
                for entry in _each(share.source)
            )
        return tuple(("data.source", entry) for entry in _each(self.source))


def _each(source: Sources) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source


class Optim(Section):
    """Optimizer, schedule and batch."""

    name: OptimizerName = "adamw"
    """The optimizer. A setting that it does not read is refused."""
    lr: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Peak learning rate; auto: by model size and whether weights are loaded."""
    betas: Annotated[tuple[Averaging, Averaging], Field(strict=False)] = (0.9, 0.95)
    """Averaging factors of gradient and squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] | Auto = "auto"
    """Weight decay, on matrices only (not on norms and biases): decoupled, but of lars coupled."""
    momentum: Averaging = 0.0
    """Averaging factor of the gradient."""
    nesterov: bool = False
    """Step along the gradient as the momentum will have moved it (Nesterov)."""
    trust_coefficient: PositiveNumber = 0.001
    """Of lars: a matrix moves by lr times this share of its norm (arXiv:1708.03888)."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Average the weights over steps, each keeping this share at the most; evaluations and exports
    take the averages (EMA). null: they take the weights."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down. null: no clipping."""
    schedule: Literal["cosine", "linear", "constant", "poly", "step"] = "cosine"
    """How the learning rate falls after the warm-up; poly: as a power of what is left; step: at
    once, at each of optim.milestones."""
    milestones: Annotated[tuple[PositiveNumber, ...], Field(strict=False)] = ()
    """Of schedule step: epochs at which the learning rate falls."""
    milestone_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Of schedule step: by what the learning rate is multiplied at each milestone."""
    poly_power: PositiveNumber = 0.5
    """Power of schedule poly; a half is what LAMB's BERT is trained with, 1 is linear."""
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Steps of linear warm-up; auto: 2,000 or a tenth of the run, whichever is less."""
    warmup_share: Fraction | None = None
    """Warm-up as a share of the run, instead of optim.warmup_steps; LAMB's BERT takes 0.2843."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Warm-up in passes over the data, instead of optim.warmup_steps."""
    decay_steps: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Step at which the decay ends; auto: the length of the run at its first attempt."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    global_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples in one optimizer step, over all ranks; auto: by model size."""
    batch_per_device: Annotated[int, Field(ge=1)] | None = None
    """Samples of each device in one optimizer step, instead of optim.global_batch: the batch then
    follows the number of devices."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the batch of batch_per_device: by its ratio, or the root."""
    lr_batch: Annotated[int, Field(ge=1)] | None = None
    """With lr_scaling: samples a step that optim.lr is for; null: those the run began with."""
    micro_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples in one forward and backward pass of one rank; auto: 1, or more for small models."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 5
    """Steps in a row that may be skipped because loss or gradient is not finite."""


class Parallel(Section):
    """How model and batch are split: the degrees of the mesh axes."""

    strategy: (
        Literal[
            "FULL_SHARD",
            "SHARD_GRAD_OP",
            "HYBRID_SHARD",
            "NO_SHARD",
            "ZERO_1",
            "ZERO_2",
            "ZERO_3",
        ]
        | None
    ) = None
    """A preset for zero, dp_shard and dp_replicate by its usual name; null: the three settings."""
    zero: Literal[1, 2, 3] | Auto = "auto"
    """What dp_shard splits: 1 optimizer state; 2 also gradients; 3 also parameters. auto: 3."""
    dp_replicate: Degree | Auto = "auto"
    """Groups that each hold a full copy; auto: what the other axes leave."""
    dp_shard: Degree | Auto = "auto"
    """Ranks that split one copy; auto: all ranks, or the devices of a node for HYBRID_SHARD."""
    cp: Degree = 1
    """Ranks that split each sample by its tokens (context parallelism)."""
    cp_exchange: Literal["keys_values", "heads"] = "keys_values"
    """What cp ranks exchange for attention: all keys and values, or tokens against heads."""
    tp: Degree = 1
    """Ranks that split each matrix, and between them the tokens (tensor parallelism)."""
    pp: Degree = 1
    """Ranks that each hold some of the blocks and hand micro-batches on (pipeline parallelism)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"] = "1f1b"
    """Order in which a pipeline takes forward and backward passes of its micro-batches."""
    virtual_stages: Degree = 1
    """Stages of one pipeline rank: 2 or more for interleaved, 2 for zb-v, any for zero-bubble."""
    ep: Degree = 1
    """Ranks over which experts are dealt, taken from dp_shard x cp; above 1 needs torch 2.12."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose parameters are gathered ahead of the one that computes."""


class Precision(Section):
    """Number formats; master weights are always fp32, and each update is computed in fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8", "auto"] = "auto"
    """Format of matrix products; auto: bf16, fp16 where there is none (V100, T4), fp32 on a CPU."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] = "dynamic"
    """With compute=fp16: a fixed factor of gradients, or as torch's GradScaler moves one."""
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """With compute=fp8: one scale for a whole tensor (fastest), or one for each row (closer)."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over ranks."""
    output: Literal["fp32", "bf16"] | Auto = "auto"
    """Format of what the model returns; auto: the compute format."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """Format in which the optimizer's averages are held between steps; bf16 halves them."""


class Memory(Section):
    """Memory against time."""

    recompute: (
        Literal["none", "full", "selective"]
        | Annotated[int, Field(ge=1)]
        | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    ) = "none"
    """Activations to recompute: none, full, selective, every n-th block (n), or named modules."""
    loss_chunk: Literal["none"] | Annotated[int, Field(ge=1)] | Auto = "auto"
    """Tokens whose logits exist at once: the head and its loss are computed in chunks of so many,
    exactly; none: all at once; auto: 2048 where that saves 1 GiB or more."""
    offload: Literal["none", "params", "optimizer", "activations"] = "none"
    """What waits in host memory: activations for the backward pass, the optimizer's averages for
    the update, or params: these, the weights until they are gathered and the gradients."""
    offload_depth: Annotated[int, Field(ge=0)] = 1
    """Blocks whose activations come back from the host ahead of the block that needs them."""


class Checkpoint(Section):
    """When state is saved and what is kept."""

    every: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints; one is always written at the end and on a drain."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation too, by the first metric of run.target, or by
    loss where there is no target."""


class Elastic(Section):
    """What happens when processes die or nodes come and go."""

    min_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Fewest nodes the run goes on with; auto: cluster.nodes."""
    max_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most nodes the run uses; auto: cluster.nodes."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times an attempt may restart its processes after losing one."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a drain (SIGTERM, Ctrl-C) may take before the processes are killed."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a rank waits for the others before it gives up."""
    start_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds the first node waits for all of cluster.nodes; then min_nodes of them are enough."""
    keep_alive_s: Annotated[int, Field(ge=3)] = 15
    """Age of a node's last sign of life at which it is gone; nodes' clocks must differ by less."""


class Cluster(Section):
    """The machines."""

    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines."""
    instance: str | None = None
    """An EC2 instance type; it says which accelerators and how many. null: this machine."""
    file: str | None = None
    """A YAML file that describes a node of your own cluster, instead of instance."""
    devices: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Accelerators, or CPU processes, per node; auto: all that the machine or cluster has."""
    device: Annotated[str, Field(pattern=r"^[a-z_]+$", description=_DEVICE_WORDS)] | Auto = "auto"
    """Kind of device; auto: the cluster's, or this machine's accelerator. xla: not trained yet."""


class Slurm(Section):
    """`launch --on slurm`."""

    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account that pays; null: your default."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, in sbatch's syntax."""
    requeue: bool = True
    """Start again after a lost node and at the time limit, from the newest checkpoint."""
    signal_before_s: Annotated[int, Field(ge=10)] = 120
    """Seconds before the time limit at which the run drains."""
    container_image: str | None = None
    """Image for Pyxis/Enroot (srun --container-image); null: the nodes' own Python."""
    container_mounts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Paths mounted into the container, source:target."""
    python: str = "auto"
    """Python on the nodes; auto: the one that runs this command."""
    side_partition: str | None = None
    """Partition of side jobs; null: partition, with its constraint."""


class Volume(Section):
    """A volume of a pod or a Batch job, mounted at a path."""

    path: str
    """Where it is mounted: an absolute path."""
    claim: str | None = None
    """Kubernetes: a persistent volume claim."""
    efs: str | None = None
    """AWS Batch: an EFS file system id."""
    host: str | None = None
    """A folder of the node. Refused on Kubernetes unless allow_host_paths is true."""


class Kubernetes(Section):
    """`launch --on kubernetes`."""

    target: Literal["jobset", "trainjob", "pytorchjob"] = "jobset"
    """JobSet, Kubeflow Trainer's TrainJob, or the training operator's PyTorchJob."""
    context: str | None = None
    """Context of the kubeconfig; must be given, the current one is never assumed."""
    namespace: str = "default"
    """Namespace of all objects."""
    queue: str | None = None
    """Kueue's local queue: all pods are admitted together."""
    priority_class: str | None = None
    """Priority class of the pods."""
    service_account: str | None = None
    """Service account of the pods; null: the namespace's default, without its token."""
    node_selector: dict[str, str] = {}
    """Labels that nodes must have, beside the instance type."""
    side_node_selector: dict[str, str] = {}
    """Labels that nodes of side jobs must have, in place of node_selector and the instance type."""
    tolerations: Annotated[tuple[str, ...], Field(strict=False)] = ("nvidia.com/gpu",)
    """Taints that pods tolerate: key, key=value or key:Effect."""
    topology: Literal["none", "preferred", "required"] = "none"
    """Kueue's topology hint: pods of one run near each other."""
    efa: Annotated[int, Field(ge=0)] | Auto = "auto"
    """EFA interfaces of a pod; auto: all of the instance type."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm."""
    ttl_s: Annotated[int, Field(ge=0)] = 86400
    """Seconds that a finished job is kept by the cluster."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times that the whole job is started again after a lost pod."""
    runtime: str = "shardyard"
    """TrainJob: the ClusterTrainingRuntime, rendered too."""
    etcd: str | None = None
    """PyTorchJob: host:port of an etcd for its rendezvous; null: c10d, which needs none."""
    allow_host_paths: bool = False
    """Whether volumes may be folders of the node."""


class AwsBatch(Section):
    """`launch --on aws-batch`."""

    region: str | None = None
    """AWS region; null: that of your AWS configuration."""
    queue: str | None = None
    """Job queue; must exist, or be made with the rendered prerequisites."""
    side_queue: str | None = None
    """Job queue of side jobs, on EC2; null: queue."""
    job_role: str | None = None
    """ARN of the role that the container acts as."""
    execution_role: str | None = None
    """ARN of the role that pulls the image and reads secrets."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Times that Batch starts the job."""
    vcpus: Annotated[int, Field(ge=1)] | None = None
    """VCPUs of a container; null: all of cluster.instance."""
    memory_gib: Annotated[int, Field(ge=1)] | None = None
    """Memory of a container; null: what cluster.instance can give."""
    shared_memory_gib: Annotated[int, Field(ge=1)] = 64
    """Size of /dev/shm."""
    subnets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Subnets for the compute environment that the prerequisites make, all in one zone."""
    security_groups: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Security groups of its instances; they must let each other in, for EFA on all ports."""
    instance_role: str | None = None
    """Instance profile of its instances: a name or an ARN."""
    ami: str | None = None
    """Image of its instances; null: Amazon Linux 2023 for ECS, which lacks drivers for Gaudi."""


class Side(Section):
    """One node without accelerators that prepares, exports, fetches or probes for a run."""

    cpus: Annotated[int, Field(ge=1)] = 4
    """Cores of a side job; on local it has the whole machine."""
    memory_gib: Annotated[int, Field(ge=1)] = 16
    """Memory of a side job; on local it has the whole machine."""


class Launch(OpenSection):
    """How the run reaches a scheduler; `train` reads none of it."""

    image: str | None = None
    """Container image; by digest (name@sha256:...) where it must not change under a run."""
    run_dir: str | None = None
    """The run's parent folder as the nodes see it; null: run.dir."""
    time_limit: (
        Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$", description="a time with its unit")]
        | None
    ) = None
    """Longest time, such as 90min, 24h or 2d; null: the scheduler's own limit."""
    env: dict[str, str] = {}
    """Environment of every process; no secrets, they have a section of their own."""
    code: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders, files or globs of your own code, importable on nodes; not on AWS Batch."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """What is mounted into containers."""
    image_paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders that nodes hold by themselves, in the image or on a disk: not looked for here."""
    max_usd: Annotated[float, Field(gt=0)] | None = None
    """Most that the run may cost: a plan above it is refused, and a run that reaches it drains."""
    stop_idle_after: Annotated[str, Field(pattern=r"^\d+(\.\d+)?(min|h|d)$")] | None = None
    """Drain a run that makes no step for so long, such as 30min; its start counts. null: never."""
    require_efa: bool = False
    """Fail where the network turns out to be sockets although the instance has EFA."""
    side: Side = Side()
    """What side jobs ask."""
    slurm: Slurm = Slurm()
    """What only Slurm asks."""
    kubernetes: Kubernetes = Kubernetes()
    """What only Kubernetes asks."""
    aws_batch: AwsBatch = AwsBatch()
    """What only AWS Batch asks."""


class Observe(Section):
    """What is shown and written while training."""

    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between lines in a log that is no terminal."""
    sample_ids: bool = False
    """Write into each rank's log which samples it reads at each step, to audit data and order."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run folder; needs shardyard[tensorboard]."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak TFLOP/s of one device for MFU, where the catalogue does not know the device."""


class Recipe(Section):
    """One whole request: everything that training, planning and launching read."""

    run: Run = Run()
    model: Model = Model()
    task: Task = Task()
    data: Data = Data()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    elastic: Elastic = Elastic()
    cluster: Cluster = Cluster()
    launch: Launch = Launch()
    observe: Observe = Observe()
    phases: Annotated[
        tuple[dict[str, Any], ...], Field(strict=False, description=_PHASE_WORDS)
    ] = ()
    """Parts of the run, one after the other: weights go on, the optimizer begins anew; see
    docs/phases.md."""
    secrets: dict[str, str] = {}
    """Environment variable -> where its value is kept: env, file:/path and others, never itself."""

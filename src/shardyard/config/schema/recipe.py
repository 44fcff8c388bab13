"""Every setting of a recipe: its name, type, bounds, default and one sentence on what it does.

The sections are frozen pydantic models; torch is not needed to read a recipe. ``auto`` is replaced
by ``config/resolve.py``, which also says why. What no type can say is checked in
``config/rules/check.py``; what a layout may be is checked in ``config/rules/layout.py``.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shardyard.config.optimizers import OPTIMIZERS, OptimizerName
from shardyard.config.schema.base import (
    NAME,
    NAME_WORDS,
    Auto,
    Count,
    Fraction,
    OpenSection,
    PositiveNumber,
    Section,
    WhenElastic,
)
from shardyard.config.schema.data import Data
from shardyard.config.schema.launch import Launch, as_text
from shardyard.config.schema.observe import Observe
from shardyard.config.tasks import TASKS

Degree = Annotated[int, Field(ge=1)]
Averaging = Annotated[float, Field(ge=0, lt=1)]

_CAPACITY = r"^(on-demand|spot|(reservation|block):cr-[0-9a-f]{8,17})$"
_CAPACITY_WORDS = "on-demand, spot, reservation:cr-... or block:cr-..."
_DEVICE_WORDS = "cpu, cuda (also ROCm), xpu, hpu, xla, or what torch calls another accelerator"
_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_TASK_WORDS = f"{', '.join(TASKS)}, or the name of a task that a package adds"
_PHASE_WORDS = "a list, each a few settings of run, data and optim"
_ID_WORDS = "an id of letters, digits, dots, hyphens and underscores, at most 63 characters"


class RunSettings(Section):
    """Name, place and length of the run."""

    name: Annotated[str, Field(pattern=NAME, description=NAME_WORDS)] | Auto = "auto"
    """First part of the run id. auto: the recipe's file name."""
    id: Annotated[str, Field(pattern=_ID, description=_ID_WORDS)] | None = None
    """Run id. null: <name>-<date>-<time>-<4 hex>."""
    dir: str = "runs"
    """Parent folder of all run folders."""
    from_: str | None = Field(default=None, alias="from")
    """Run whose weights this run starts from: RUN, RUN@STEP or RUN@best; see
    docs/verbs/resume.md."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed for weights, data order and dropout."""
    steps: Annotated[Count, Field(ge=1)] | None = None
    """Length in optimizer steps, such as 5000 or 300k."""
    tokens: Annotated[Count, Field(ge=1)] | None = None
    """Length in tokens, such as 10B, rounded up to whole steps."""
    samples: Annotated[Count, Field(ge=1)] | None = None
    """Length in samples, such as 1.2M, rounded up to whole steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in epochs, rounded up to whole steps; 1 if you set no length at all."""
    tags: dict[str, Annotated[str, BeforeValidator(as_text)]] = Field(default={})
    """Tags such as {team: nlp, project: search}, carried to the scheduler, events, trackers and
    costs; see docs/teams.md."""
    origins: dict[str, str] = Field(default={})
    """Settings that a site file gave, with file and line. Shardyard writes it into the recipe of a
    run."""
    target: Annotated[dict[str, PositiveNumber], Field(min_length=1)] | None = None
    """Stop early once validation reaches {metric: value}; several must all be reached. Metrics:
    docs/verbs/train.md."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop early after this many validations in a row without a new best one."""


class Lora(Section):
    """LoRA: train small adapters next to frozen matrices."""

    rank: Annotated[int, Field(ge=1)] | None = None
    """LoRA rank; only the adapters are trained. null: no LoRA."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """LoRA scaling: the adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Matrices that get an adapter, as in model.frozen or such as `q_proj`. []: all linear layers
    of the blocks."""
    modules_to_save: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules outside of the blocks to train whole: `[embed_tokens, lm_head]` for added tokens."""
    path: str | None = None
    """Folder of an adapter in PEFT's format to start from. null: A is drawn, and B is zero."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""


class Model(Section):
    """Model to train: a preset, a local folder, a hub repository or your own module."""

    preset: str | None = None
    """Named model shape (`shardyard config --presets`). With path or hub: the shape of that model.
    """
    path: str | None = None
    """Hugging Face model folder: config.json, and weights if they are loaded."""
    hub: str | None = None
    """Hugging Face hub repository, owner/name."""
    revision: str | None = None
    """Branch, tag or commit of model.hub. null: the default branch. A resumed run keeps its commit.
    """
    dir: str | None = None
    """Download folder for hub models. null: `models` next to the runs on launched nodes, else the
    Hugging Face cache."""
    config: str | Annotated[dict[str, Any], Field(description="its content")] | None = None
    """A config.json on this machine that replaces the one of model.path or model.hub."""
    module: str | None = None
    """Your own model as package.module:function (docs/own-module.md); data parallelism only."""
    blocks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules of model.module, or lists of them, to shard and checkpoint activations of one by one.
    """
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules or parameters to freeze, by name; `*` matches one part of a dotted name."""
    lora: Lora = Lora()
    """Adapters that are trained instead of the model."""
    new_embeddings: Literal["mean", "random"] = "mean"
    """Initial rows of added tokens in embedding and head: the mean of the others, or random."""
    weights: Literal["auto", "random", "load"] = "auto"
    """Initial weights. auto: random for a preset, loaded for path and hub."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Dropout after the embedding, attention and MLP; for images before the head. auto:
    config.json's, or 0."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Stochastic depth for images (arXiv:1603.09382): block l of L is skipped for drop_path x l
    / L of samples. auto: config.json's, or 0."""
    batch_norm: Literal["micro_batch", "step"] = "micro_batch"
    """Samples of batch normalisation, for images: of a micro-batch, or of the whole step
    (synchronised batch norm, one micro-batch a rank)."""
    batch_norm_momentum: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Weight of each step in batch norm's running statistics. auto: 0.1; 0.01 for EfficientNet,
    whose config.json has TensorFlow's 0.99."""
    zero_last_norm: bool = False
    """Initialise the last norm of each residual branch to zero, for images (arXiv:1706.02677)."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the MoE load-balancing loss, for each block and sample (arXiv:2101.03961)."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the MoE router z-loss, for each block (arXiv:2202.08906)."""
    attention: Literal["sdpa", "cudnn", "flash", "fa3"] | Auto = "auto"
    """Attention kernel: sdpa (torch chooses), cudnn, flash, or fa3 (FlashAttention 3). auto:
    flash where it avoids a mask, else sdpa. Event model_ready logs it."""
    compile: bool | Auto = False
    """Compile each block with torch.compile: slower first step, then faster ones. auto: on an
    accelerator if one graph serves all blocks."""


class TaskSettings(OpenSection):
    """Training objective and validation."""

    name: Annotated[str, Field(description=_TASK_WORDS)] = "causal_lm"
    """Training objective: next token, masked tokens, BERT pretraining, pairs of answers, a reward
    model, labels of texts, tokens or images, or a task from an installed package."""
    loss: str | None = None
    """Your own loss as package.module:function of (outputs, batch)
    (docs/tutorials/own-code.md). null: the task's."""
    metrics: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Your own validation metrics, each as package.module:function of (outputs, batch), in addition
    to the task's."""
    lower_is_better: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of task.metrics that are better when lower, for run.target and the best checkpoint."""
    eval_every_steps: Annotated[Count, Field(ge=1)] | None = None
    """Steps between validations. The run always validates at the end."""
    eval_every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Epochs between validations, instead of task.eval_every_steps."""
    prompt: str = "def "
    """Prompt for the generated text; for chat data, the user's message."""
    prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Several prompts instead of task.prompt."""
    generate_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens to generate from each prompt. 0: none."""
    generate_every: Annotated[Count, Field(ge=1)] | Literal["validation", "end"] = "end"
    """When to generate: every so many steps, at each validation, or only at the end of the run,
    which always does."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature of the generated text. 0: greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample each token from this many of the likeliest ones, at a temperature above 0. 0: all."""
    problem_type: Literal["single_label_classification", "regression"] | None = None
    """Kind of labels. null: regression if they are numbers with a fraction."""
    loss_type: Literal["sigmoid", "ipo", "orpo"] = "sigmoid"
    """Loss of a pair of answers: sigmoid (DPO, arXiv:2305.18290), ipo (arXiv:2310.12036), or orpo,
    which needs no reference (arXiv:2403.07691)."""
    beta: PositiveNumber = 0.1
    """Strength of the pull to the reference model, for preference tuning; weight of the odds ratio
    in orpo."""
    center_rewards: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's rewards in a reward model, such as 0.01
    (arXiv:2312.09244)."""
    label_smoothing: Averaging = 0.0
    """Share of each image's label spread over all classes; of pairs of answers, the share that is
    taken to be labelled wrongly. In training only."""


class Optim(Section):
    """Optimizer, schedule and batch."""

    name: OptimizerName = "adamw"
    """Optimizer. Settings that it does not use are rejected."""
    module: str | None = None
    """Your own optimizer, instead of optim.name: package.module:class, or a function of (params,
    lr) (docs/tutorials/own-code.md)."""
    module_settings: Annotated[dict[str, Any], Field(description="its arguments")] = Field(
        default={}
    )
    """Arguments of optim.module, such as {weight_decay: 0.1}."""
    module_states: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """States that optim.module holds in a parameter's shape, for the plan. []: two."""
    lr: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Peak learning rate. auto: by model size, loaded weights and task."""
    betas: Annotated[tuple[Averaging, Averaging], Field(strict=False)] = (0.9, 0.95)
    """Betas: decay rates of the averages of gradient and squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon in the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] | Auto = "auto"
    """Weight decay of matrices, not of norms and biases: decoupled, except for lars."""
    decay_vectors: bool = False
    """Also apply weight decay to norms and biases."""
    momentum: Averaging = 0.0
    """Momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    trust_coefficient: PositiveNumber = 0.001
    """Trust coefficient of LARS: a matrix moves by lr times this share of its norm
    (arXiv:1708.03888)."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average (EMA) of the weights."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm. null: no gradient clipping."""
    schedule: Literal["cosine", "linear", "constant", "poly", "step", "wsd", "inverse_sqrt"] = (
        "cosine"
    )
    """Learning-rate decay after warm-up. poly: a power of what remains; step: at optim.milestones;
    wsd: stable, then a decay; inverse_sqrt: inverse square root of the step."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of optim.decay_steps, at its end, in which schedule wsd decays."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Form of the decay of schedule wsd. 1-sqrt: as arXiv:2405.18392."""
    schedule_module: str | None = None
    """Your own schedule instead: a function of (step, steps) that returns a factor of optim.lr."""
    milestones: Annotated[tuple[PositiveNumber, ...], Field(strict=False)] = ()
    """Epochs at which schedule step lowers the learning rate."""
    milestone_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Learning-rate factor at each milestone."""
    poly_power: PositiveNumber = 0.5
    """Power of schedule poly. 0.5: as LAMB trains BERT; 1: linear."""
    warmup_steps: Annotated[Count, Field(ge=0)] | Auto = "auto"
    """Steps of linear warm-up. auto: 2,000 or a tenth of the run, whichever is less."""
    warmup_share: Fraction | None = None
    """Warm-up as a share of the run, instead of optim.warmup_steps. LAMB's BERT: 0.2843."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Warm-up in epochs, instead of optim.warmup_steps."""
    decay_steps: Annotated[Count, Field(ge=1)] | Auto = "auto"
    """Step at which the decay ends. auto: the run's length at its first attempt."""
    schedule_from: Annotated[int, Field(ge=-1, le=1)] = 1
    """Number of the first step in the schedule: 0 as in Trainer, -1 as in DeepSpeed."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a share of the peak."""
    global_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples per optimizer step over all ranks. auto: by model size."""
    batch_per_device: Annotated[int, Field(ge=1)] | None = None
    """Samples per device and step, instead of optim.global_batch; the batch then scales with the
    devices."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate with the batch of batch_per_device: linearly or by the square root.
    """
    lr_batch: Annotated[int, Field(ge=1)] | None = None
    """Batch size that optim.lr is for, with lr_scaling. null: the batch at the start of the run."""
    micro_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples per pass of a rank. auto: the largest that fits; 1, or more for small models, on
    CPUs and in elastic runs."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 5
    """Steps in a row that may be skipped because the loss or gradient is NaN or infinite."""

    @model_validator(mode="after")
    def _take_published_averages(self) -> Self:
        """Take betas, momentum and schedule as the optimizer was published, unless they are set."""
        row = OPTIMIZERS[self.name]
        schedule = "constant" if row.is_schedule_free and self.module is None else None
        for key, published in (
            ("betas", row.betas), ("momentum", row.momentum), ("schedule", schedule)
        ):  # fmt: skip
            if published is not None and key not in self.model_fields_set:
                self.__dict__[key] = published  # not an assignment: it stays a default
        return self


class Parallel(Section):
    """Parallelism: how model and batch are split over devices."""

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
    """Preset for zero, dp_shard and dp_replicate by its usual name. null: those three settings."""
    zero: Literal[1, 2, 3] | Auto = "auto"
    """State split over dp_shard. 1: optimizer state; 2: also gradients; 3: also parameters. auto:
    3."""
    dp_replicate: Degree | Auto = "auto"
    """Full copies of the model. auto: what the other axes leave."""
    dp_shard: Degree | Auto = "auto"
    """Ranks that share one copy. auto: all; the devices of a node for HYBRID_SHARD."""
    cp: Degree = 1
    """Context parallelism: ranks that split the tokens of each sample."""
    cp_exchange: Literal["keys_values", "heads"] = "keys_values"
    """Data that cp ranks exchange: keys_values (all-gather), or heads (all-to-all of tokens for
    heads)."""
    tp: Degree = 1
    """Tensor parallelism: ranks that split each matrix, and the tokens between matrices."""
    pp: Degree = 1
    """Pipeline parallelism: ranks that each hold some of the blocks."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"] = "1f1b"
    """Pipeline schedule: order of forward and backward passes of the micro-batches."""
    virtual_stages: Degree = 1
    """Stages per pipeline rank: 2 or more for interleaved, 2 for zb-v, any for zero-bubble."""
    ep: Degree = 1
    """Expert parallelism: ranks that split the experts, taken from dp_shard x cp. Above 1 needs
    torch 2.12."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose parameters are gathered in advance."""


class Precision(Section):
    """Number formats. Master weights and updates are always fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8", "auto"] = "auto"
    """Format of matrix products. auto: bf16; fp16 on GPUs without bf16 (V100, T4); fp32 on CPUs."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] = "dynamic"
    """Loss scale for fp16: a fixed factor, or dynamic as in torch's GradScaler."""
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """fp8 scaling: one scale per tensor (fastest) or per row (more accurate)."""
    reduce: Literal["fp32", "bf16", "exact"] = "fp32"
    """Format for summing gradients over ranks. exact: 64-bit integers, so that any number of ranks
    gives the same weights, bit for bit."""
    output: Literal["fp32", "bf16"] | Auto = "auto"
    """Format of the model's output. auto: the compute format."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """Storage format of the optimizer's averages."""


class Memory(Section):
    """Memory savings that cost time."""

    recompute: (
        Literal["none", "full", "selective"]
        | Annotated[int, Field(ge=1)]
        | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
        | Auto
    ) = "none"
    """Activation checkpointing: none, full, selective, every n-th block (n), or named modules.
    auto: the first of none (not in fp8), selective, 4, 3, 2, full that fits."""
    loss_chunk: Literal["none"] | Annotated[int, Field(ge=1)] | Auto = "auto"
    """Tokens per chunk of output head and loss, to save memory. none: all at once; auto: 2048
    where that saves 1 GiB."""
    offload: Literal["none", "params", "optimizer", "activations"] = "none"
    """Offload to host memory: activations until the backward pass; the optimizer's averages; or
    params, which also offloads gradients and weights."""
    offload_depth: Annotated[int, Field(ge=0)] = 1
    """Blocks whose offloaded activations are fetched in advance."""


class Checkpoint(Section):
    """When checkpoints are saved and which are kept."""

    every: Annotated[int, Field(ge=1)] | Auto | WhenElastic = "elastic"
    """Steps between checkpoints; the end and a drain save one. auto: the least expected loss of
    time. elastic: auto where elastic.min_nodes < elastic.max_nodes, else 500."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation result, by the first metric of run.target,
    else by loss."""
    to: str | None = None
    """Also upload checkpoints to s3://bucket/prefix, below run.id, while training continues. A run
    whose folder lacks its newest checkpoint continues from there."""


LeaveOutFor = Literal[
    "xid", "ecc", "slowed", "slow_clock", "silent", "slow_pcie", "throttled", "slow_network",
    "slow_rank",
]  # fmt: skip
"""Verdicts that name a node: of its devices, its processors, its network, its ranks."""


class Elastic(Section):
    """Fault tolerance and elasticity: what happens when processes fail or nodes come and go."""

    min_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Fewest nodes to continue with, also after a node is excluded for three failures in a row.
    auto: cluster.nodes."""
    max_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most nodes to use. auto: cluster.nodes."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts allowed per hour after lost processes. The same failure twice ends the run earlier.
    """
    snapshot_every: Annotated[int, Field(ge=1)] | Auto | WhenElastic | None = "elastic"
    """Steps between snapshots in host memory (room for three), to continue after a lost process.
    auto: the least expected loss of time. elastic: auto where elastic.min_nodes <
    elastic.max_nodes and memory has room, else null."""
    snapshot_neighbour: bool | Auto = "auto"
    """Also keep each snapshot on the next node, in case one is lost; needs room for two more.
    auto: on several nodes."""
    parked: bool | Auto = "auto"
    """Keep a standby worker per device, which replaces a lost one at once; costs memory. auto: with
    model.compile."""
    check_bits_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checks that all ranks compute the same bits of one micro-batch. null: never."""
    leave_out_for: Annotated[tuple[LeaveOutFor, ...], Field(strict=False)] = ()
    """Verdicts after which a node is excluded, at most one an hour and while elastic.min_nodes
    remain; see docs/telemetry.md. slow_rank also works on CPUs."""
    drain_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a drain (SIGTERM, Ctrl-C) may take before processes are killed."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a rank waits for others in a collective before it fails."""
    restart_timeout_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Seconds a node waits for the others at a start or restart. auto: collective_timeout_s plus
    five minutes."""
    hang_steps: Annotated[float, Field(ge=3)] | None = 8.0
    """Step times without progress on any rank that count as a hang. null: no hang detection."""
    hang_min_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Least seconds before a hang is reported. auto: 3.5, at most half of
    elastic.collective_timeout_s."""
    hang_slow_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Seconds before a hang is reported outside steps (start, save, storage). auto: 0.8 of
    collective_timeout_s."""
    start_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds to wait at the start for all of cluster.nodes; then min_nodes are enough."""
    join_interval_s: Annotated[float, Field(ge=0)] = 60.0
    """Least seconds between restarts that take in new nodes."""
    keep_alive_s: Annotated[int, Field(ge=3)] = 15
    """Seconds without a heartbeat after which a node counts as lost, by each node's own clock."""
    rendezvous: str = "tcp"
    """Rendezvous of nodes: tcp (a port of node 0), or etcd://HOST:2379[,...]; with TLS: etcds://...
    """


class Cluster(Section):
    """Machines to train on."""

    nodes: Annotated[int, Field(ge=1)] = 1
    """Number of nodes."""
    instance: str | None = None
    """EC2 instance type, which sets accelerators and their number. null: this machine."""
    file: str | None = None
    """YAML file that describes a node of your own cluster, instead of instance."""
    devices: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Accelerators, or CPU processes, per node. auto: all."""
    device: Annotated[str, Field(pattern=r"^[a-z_]+$", description=_DEVICE_WORDS)] | Auto = "auto"
    """Device type. auto: the cluster's, or this machine's accelerator. xla: plans only, no training
    yet."""
    capacity: Annotated[str, Field(pattern=_CAPACITY, description=_CAPACITY_WORDS)] | None = None
    """Purchase option for a launch. null: that of the scheduler's own nodes."""
    block_ends: str | None = None
    """End of a capacity block, with time zone: 2027-01-31T11:30:00Z. The run drains before it."""
    usd_per_node_hour: Annotated[float, Field(gt=0)] | None = None
    """Your price of a node in dollars an hour. null: from the price table or cluster.file."""


class Recipe(Section):
    """One whole request: everything that training, planning and launching read."""

    run: RunSettings = RunSettings()
    model: Model = Model()
    task: TaskSettings = TaskSettings()
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
    """Consecutive parts of the run: weights are kept, the optimizer restarts; see docs/phases.md.
    """
    secrets: dict[str, str] = Field(default={})
    """Environment variable -> where its value is: env, file:/path and others, never the value
    itself."""

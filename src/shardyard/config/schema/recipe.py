"""Every setting of a recipe: its name, type, bounds, default and one sentence on what it does.

The sections are frozen pydantic models; torch is not needed to read a recipe. ``auto`` is replaced
by ``config/resolve.py``, which also says why. What no type can say is checked in
``config/rules/check.py``; what a layout may be is checked in ``config/rules/layout.py``.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from shardyard.config.optimizers import OptimizerName
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
from shardyard.config.schema.launch import Launch
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
    """First part of the run id; auto: the recipe's file name."""
    id: Annotated[str, Field(pattern=_ID, description=_ID_WORDS)] | None = None
    """The run id itself, instead of <name>-<date>-<time>-<4 hex>."""
    dir: str = "runs"
    """Folder that holds the folders of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, data order and dropout."""
    steps: Annotated[Count, Field(ge=1)] | None = None
    """Length in optimizer steps, such as 5000 or 300k."""
    tokens: Annotated[Count, Field(ge=1)] | None = None
    """Length in tokens read, such as 10B; rounded up to whole steps."""
    samples: Annotated[Count, Field(ge=1)] | None = None
    """Length in samples read, such as 1.2M; rounded up to whole steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in passes over the data; rounded up to whole steps. Without any length: one epoch."""
    target: Annotated[dict[str, PositiveNumber], Field(min_length=1)] | None = None
    """Stop early once an evaluation reaches this: {metric: value}, all of them if there are
    several; the metrics of a task are in docs/verbs/train.md.
    """


class Lora(Section):
    """Adapters next to matrices that are not trained (LoRA)."""

    rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of the adapters, which are then the only trained part; null: no adapters."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scale of an adapter: its output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's input that is dropped."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Matrices that have one, named as in model.frozen or as `q_proj`; []: of blocks all dense."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)."""


class Model(Section):
    """Model to train: a preset, a path, a hub repository or a module."""

    preset: str | None = None
    """Named shape (`shardyard config --presets`); with path or hub: the shape of the model
    there.
    """
    path: str | None = None
    """A Hugging Face folder that the run sees: config.json, and weights if they are loaded."""
    hub: str | None = None
    """A repository on the Hugging Face hub, owner/name."""
    revision: str | None = None
    """Branch, tag or commit of model.hub; null: the default branch. A resume keeps the commit."""
    dir: str | None = None
    """Folder for files from the hub, one folder a commit; null: `models` next to the runs on
    launched nodes, the Hugging Face cache elsewhere.
    """
    config: str | Annotated[dict[str, Any], Field(description="its content")] | None = None
    """A config.json on this machine, which says the shape of a path or hub repository instead."""
    module: str | None = None
    """Your own model as package.module:function (docs/own-module.md); only on data axes."""
    blocks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Lists of modules, or modules, of module that are sharded and activation-checkpointed one
    by one.
    """
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules or parameters that are not trained, by name; `*` matches one step of it."""
    lora: Lora = Lora()
    """Adapters that are trained instead of the model."""
    weights: Literal["auto", "random", "load"] = "auto"
    """Origin of the weights; auto: random for a preset, loaded for path and hub."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Dropout after the embedding and each block's attention and MLP, of images before the head;
    auto: config.json's, or 0."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Stochastic depth for images (arXiv:1603.09382): block l of L, from 0, drops its branch for
    a share of drop_path x l / L of the samples; auto: config.json's, or 0.
    """
    batch_norm: Literal["micro_batch", "step"] = "micro_batch"
    """Samples that batch normalisation covers, for images; step: all samples of a step, on any
    number of ranks (synchronised), each of which computes its own in one micro-batch.
    """
    batch_norm_momentum: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Share of a step in running statistics, for images; auto: 0.1, and 1 - 0.99 for
    EfficientNet, whose config.json has TensorFlow's meaning (transformers passes 0.99 itself
    to torch).
    """
    zero_last_norm: bool = False
    """Start the last norm of each residual branch at zero, for images (arXiv:1706.02677)."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.01
    """Weight of a mixture's load-balance loss, for each block and sample (arXiv:2101.03961)."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.001
    """Weight of a mixture's squared router log-sum-exp, for each block (arXiv:2202.08906)."""
    attention: Literal["sdpa", "cudnn", "flash", "fa3"] | Auto = "auto"
    """Attention kernel. sdpa: torch's choice; cudnn, flash or fa3: only cuDNN's, flash
    attention's or that of FlashAttention 3 (a package of its own). On CUDA, flash and fa3 get
    the starts of documents, with no mask. Event model_ready logs what ran. auto: flash where
    that saves a mask, else sdpa.
    """
    compile: bool | Auto = False
    """Compile each block with torch.compile (slower first step, faster ones on an accelerator).
    auto: on an accelerator, where a block is one graph that serves for all blocks."""


class TaskSettings(OpenSection):
    """Training objective and its evaluation."""

    name: Annotated[str, Field(description=_TASK_WORDS)] = "causal_lm"
    """Training objective: the next token, masked tokens, both masked tokens and pairs of texts
    (BERT), or a task from an installed package.
    """
    eval_every_steps: Annotated[Count, Field(ge=1)] | None = None
    """Evaluate on the held-out split every so many steps; always evaluated at the end."""
    eval_every_epochs: Annotated[float, Field(gt=0)] | None = None
    """Evaluate every so many passes over the data, instead of every so many steps."""
    prompt: str = "def "
    """Start of the text generated at the end of the run; on dialogues, what a user asks then."""
    generate_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens generated from the prompt at the end of the run; 0: none."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Temperature of the generated text; 0: each token is the likeliest (greedy)."""
    label_smoothing: Averaging = 0.0
    """Share of each image's label that is spread over all classes, to learn from and not to judge
    by."""


class Optim(Section):
    """Optimizer, schedule and batch."""

    name: OptimizerName = "adamw"
    """Optimizer of the run. A setting that it does not read is rejected."""
    lr: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Peak learning rate; auto: by model size and whether weights are loaded."""
    betas: Annotated[tuple[Averaging, Averaging], Field(strict=False)] = (0.9, 0.95)
    """Averaging factors of gradient and squared gradient."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] | Auto = "auto"
    """Weight decay, on matrices only (not on norms and biases): decoupled, but of lars coupled."""
    decay_vectors: bool = False
    """Norms and biases decay too, as by an optimizer that is given all parameters alike."""
    momentum: Averaging = 0.0
    """Averaging factor of the gradient."""
    nesterov: bool = False
    """Step along the gradient as the momentum will have moved it (Nesterov)."""
    trust_coefficient: PositiveNumber = 0.001
    """Trust coefficient of lars: a matrix moves by lr times this share of its norm
    (arXiv:1708.03888).
    """
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Average the weights over steps, each keeping this share at the most; evaluations and exports
    take the averages (EMA). null: they take the weights."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down. null: no clipping."""
    schedule: Literal["cosine", "linear", "constant", "poly", "step"] = "cosine"
    """Learning-rate decay after warm-up; poly: a power of the remaining share; step: at
    milestones.
    """
    milestones: Annotated[tuple[PositiveNumber, ...], Field(strict=False)] = ()
    """Epochs at which the learning rate falls, for schedule step."""
    milestone_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of the learning rate at each milestone, for schedule step."""
    poly_power: PositiveNumber = 0.5
    """Power of schedule poly; a half is what LAMB's BERT is trained with, 1 is linear."""
    warmup_steps: Annotated[Count, Field(ge=0)] | Auto = "auto"
    """Steps of linear warm-up; auto: 2,000 or a tenth of the run, whichever is less."""
    warmup_share: Fraction | None = None
    """Warm-up as a share of the run, instead of optim.warmup_steps; LAMB's BERT takes 0.2843."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Warm-up in passes over the data, instead of optim.warmup_steps."""
    decay_steps: Annotated[Count, Field(ge=1)] | Auto = "auto"
    """Step at which the decay ends; auto: the length of the run at its first attempt."""
    schedule_from: Annotated[int, Field(ge=-1, le=1)] = 1
    """The schedule's number of the first step; Trainer has 0, schedulers of DeepSpeed have -1."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    global_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples in one optimizer step, over all ranks; auto: by model size."""
    batch_per_device: Annotated[int, Field(ge=1)] | None = None
    """Samples of each device in a step, instead of optim.global_batch: it follows the devices."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Learning-rate scaling with the batch of batch_per_device: by its ratio, or its square
    root.
    """
    lr_batch: Annotated[int, Field(ge=1)] | None = None
    """With lr_scaling: samples a step that optim.lr is for; null: those the run began with."""
    micro_batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Samples in one forward and backward pass of one rank; auto: the largest that the plan says
    fits the accelerator; on CPUs, and where nodes may come and go, 1, or more for small models."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 5
    """Steps in a row that may be skipped because loss or gradient is not finite."""


class Parallel(Section):
    """Split of model and batch over devices: the degrees of the mesh axes."""

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
    """State split by dp_shard: 1 optimizer state; 2 also gradients; 3 also parameters. auto: 3."""
    dp_replicate: Degree | Auto = "auto"
    """Groups that each hold a full copy; auto: what the other axes leave."""
    dp_shard: Degree | Auto = "auto"
    """Ranks that split one copy; auto: all ranks, or the devices of a node for HYBRID_SHARD."""
    cp: Degree = 1
    """Ranks that split each sample by its tokens (context parallelism)."""
    cp_exchange: Literal["keys_values", "heads"] = "keys_values"
    """Data that cp ranks exchange for attention: all keys and values, or tokens against heads."""
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
    reduce: Literal["fp32", "bf16", "exact"] = "fp32"
    """Format in which gradients are summed over ranks; exact: 64-bit integers, so that any number
    of ranks makes the same weights, bit for bit."""
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
        | Auto
    ) = "none"
    """Activations to recompute: none, full, selective, every n-th block (n), or named modules.
    auto: the first of none (not in fp8), selective, 4, 3, 2 and full that fits as planned."""
    loss_chunk: Literal["none"] | Annotated[int, Field(ge=1)] | Auto = "auto"
    """Tokens whose logits exist at once: the head and its loss are computed in chunks of so many,
    exactly; none: all at once; auto: 2048 where that saves 1 GiB or more."""
    offload: Literal["none", "params", "optimizer", "activations"] = "none"
    """State in host memory: activations until the backward pass, the optimizer's averages until
    the update, or params: these, the gradients, and the weights until they are gathered.
    """
    offload_depth: Annotated[int, Field(ge=0)] = 1
    """Blocks whose activations come back from the host ahead of the block that needs them."""


class Checkpoint(Section):
    """When state is saved and what is kept."""

    every: Annotated[int, Field(ge=1)] | Auto | WhenElastic = "elastic"
    """Steps between checkpoints; one is always written at the end and on a drain. auto: by time, as
    far apart as loses the least, by what a save takes and by the failures so far. elastic: auto
    where elastic.min_nodes < elastic.max_nodes, else 500."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation too, by the first metric of run.target, or by
    loss where there is no target."""


LeaveOutFor = Literal[
    "xid", "ecc", "slowed", "slow_clock", "silent", "slow_pcie", "throttled", "slow_network",
    "slow_rank",
]  # fmt: skip
"""Verdicts that name a node: of its devices, its processors, its network, its ranks."""


class Elastic(Section):
    """Behaviour when processes die or nodes come and go."""

    min_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Fewest nodes that the run continues with, also without one on which three losses in a row
    began; auto: cluster.nodes.
    """
    max_nodes: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most nodes the run uses; auto: cluster.nodes."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts after a lost process within an hour; the same failure twice ends a run before."""
    snapshot_every: Annotated[int, Field(ge=1)] | Auto | WhenElastic | None = "elastic"
    """Steps between copies of the state in host memory, from which a run continues when a
    process dies; they need room for three. auto: as far apart as loses the least time, by
    what a copy takes and by the failures so far. null: none, it continues from the newest
    checkpoint. elastic: auto where elastic.min_nodes < elastic.max_nodes and host memory has
    room, else null.
    """
    snapshot_neighbour: bool | Auto = "auto"
    """Have the next node keep a second copy of each snapshot, which outlives the loss of a node;
    needs room for two more. auto: with elastic.snapshot_every, on more than one node."""
    parked: bool | Auto = "auto"
    """Keep a ready process for each device of a node, which takes over at a loss; costs memory.
    auto: with model.compile."""
    check_bits_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checks that all ranks compute the same bits of one micro-batch; null: never."""
    leave_out_for: Annotated[tuple[LeaveOutFor, ...], Field(strict=False)] = ()
    """Verdicts after which the other nodes continue without the node, while elastic.min_nodes
    are left and one an hour at most: those of telemetry, and on CPUs slow_rank; see
    docs/telemetry.md.
    """
    drain_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a drain (SIGTERM, Ctrl-C) may take before the processes are killed."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a rank waits for the others before it gives up."""
    restart_timeout_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Seconds a node waits for the others at a start or restart; auto: collective_timeout_s and
    five minutes."""
    hang_steps: Annotated[float, Field(ge=3)] | None = 8.0
    """Usual steps in which no rank moves before the run hangs; null: hangs are not looked for."""
    hang_min_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Least seconds for that; auto: 3.5, at most half of elastic.collective_timeout_s."""
    hang_slow_s: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Seconds where no step is usual (start, save, storage); auto: 0.8 of collective_timeout_s."""
    start_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds the first node waits for all of cluster.nodes; then min_nodes of them are enough."""
    join_interval_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds between two restarts at least that take in nodes which came while a run trained."""
    keep_alive_s: Annotated[int, Field(ge=3)] = 15
    """Seconds without a sign of life of a node after which it is gone, by each node's own clock."""
    rendezvous: str = "tcp"
    """Rendezvous of agents: tcp (a port of node 0), or etcd://HOST:2379[,...]; with TLS
    etcds://...
    """


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
    capacity: Annotated[str, Field(pattern=_CAPACITY, description=_CAPACITY_WORDS)] | None = None
    """Purchase option of a launch's instances; null: the option of the scheduler's own nodes."""
    block_ends: str | None = None
    """When a capacity block ends, with time zone: 2027-01-31T11:30:00Z. The run drains before."""
    usd_per_node_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of a node per hour: under a savings plan, in your block, or today's for spot; null:
    by the table of prices, or by cluster.file.
    """


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
    """Parts of the run in order: weights are kept, the optimizer restarts; see docs/phases.md."""
    secrets: dict[str, str] = Field(default={})
    """Environment variable -> where its value is kept: env, file:/path and others, never itself."""

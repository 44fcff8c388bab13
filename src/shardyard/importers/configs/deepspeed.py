"""DeepSpeed's JSON: what its keys become.

Source: the page "DeepSpeed Configuration JSON" and the pydantic models of DeepSpeed 0.19
(runtime/config.py, runtime/constants.py, runtime/zero/config.py). Where the two differ, the code is
followed, and where versions of it differ, the newest is.
"""

from typing import Any

from shardyard.config.optimizers import OPTIMIZERS, optimizer_by_alias
from shardyard.importers.configs.rules import (
    ConfigEntry,
    Rows,
    RuleResult,
    SourceConfig,
    auto,
    choose,
    mapped,
    none,
    nowhere,
    optimizer_of,
    reject,
    reject_if_on,
    rejected,
    same,
    switch,
    to,
    under,
)

MARKS = {
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
    "zero_allow_untested_optimizer",
    "steps_per_print",
}
"""Keys at the top, of which such a file has at least one."""

_BUCKETS = "how much is sent at once follows from the blocks of the model (parallel.prefetch)"
_PROFILE = "is looked at with `shardyard profile` and observe.*"
_IO = "offload to NVMe is not supported, so it needs no tuning"
_SCALER = (
    "a dynamic loss scale moves as torch's GradScaler does: from 2^16, doubled after 2,000 steps "
    "without an overflow, halved at each"
)


DEFAULT_CLIP = 1.0
"""DeepSpeed's default since 0.19.3 (pull request 8068) without ``gradient_clipping``."""
NOTES = {
    "optim.grad_clip": "from 0.19.3 on; older DeepSpeed does not clip then: optim.grad_clip=null"
}
"""Setting -> note on its default value."""

_ALONG = "the optimizer's states wait there too"


def _gradient_clip(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if isinstance(entry.value, bool) or not isinstance(entry.value, int | float):
        return rejected(
            f"={entry.value!r} is not a number. Give optim.grad_clip=...", "optim.grad_clip"
        )
    return mapped({"optim.grad_clip": float(entry.value) or None})


def _precision(name: str) -> Any:
    return auto(switch(mapped({name: True}), same("off", **{name: False})), "precision.compute")


def _loss_scale(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if entry.value in (0, 0.0):
        return same("dynamic")
    if config.get("enabled") in (False, None):
        return none("read only where fp16 is on")
    return to("precision.loss_scale", convert=float)(entry, config)


def _offload(quantity: str) -> Any:
    return choose(
        {
            "cpu": mapped({quantity: True}, _ALONG if quantity == "offload_params" else ""),
            "none": same("off", **{quantity: False}),
            "nvme": rejected(
                "=nvme: offload to NVMe is not supported. Keep it in host memory with "
                "memory.offload=params or =optimizer, or leave it on the devices with "
                "memory.offload=none.",
                "memory.offload",
            ),
        }
    )


def _hierarchical(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if entry.value in (-1, 0, 1):
        return same("off")
    return mapped({"parallel.dp_shard": entry.value})


def _partial(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if entry.value == 1.0:
        return same("all of it")
    return none("memory.offload moves all of the optimizer's states or none")


_ZERO: Rows = {
    "stage": choose(
        {
            0: mapped({"parallel.dp_shard": 1}),
            1: mapped({"parallel.zero": 1}),
            2: mapped({"parallel.zero": 2}),
            3: mapped({"parallel.zero": 3}),
        }
    ),
    "offload_optimizer.device": _offload("offload_optimizer"),
    "offload_param.device": _offload("offload_params"),
    "cpu_offload": switch(
        mapped({"offload_optimizer": True}), same("off", offload_optimizer=False)
    ),
    "cpu_offload_param*": switch(
        mapped({"offload_params": True}), same("off", offload_params=False)
    ),
    "cpu_offload_use_pin_memory": nowhere("host memory of offloading is always pinned"),
    "offload_optimizer.ratio": _partial,
    "offload_*.pin_memory": nowhere("host memory of offloading is always pinned"),
    "offload_*.nvme_path": nowhere(_IO),
    "offload_*.buffer_*": nowhere(_IO),
    "offload_*.max_in_cpu": nowhere(_IO),
    "offload_*.pipeline*": nowhere(_IO),
    "offload_*.fast_init": nowhere(_IO),
    "offload_optimizer": choose({False: same("off"), None: same("off")}),
    "offload_param": choose({False: same("off"), None: same("off")}),
    "mics_shard_size": _hierarchical,
    "mics_hierarchical_params_gather": nowhere("NCCL chooses how a group is gathered"),
    "zero_hpz_partition_size": choose(
        {1: same("off")},
        none("no second copy of parameters is kept in each node; HYBRID_SHARD splits inside it"),
    ),
    "zero_quantized_*": reject_if_on(
        "quantised communication changes the numbers, and is not there. Switch it off, or leave "
        "it out with --without."
    ),
    "zeropp_loco_param*": nowhere("of quantised gradients, which are not there"),
    "overlap_comm": nowhere("communication overlaps wherever the order of work allows"),
    "contiguous_gradients": nowhere("gradients of a block are always contiguous"),
    "reduce_scatter": nowhere("gradients are always reduced by a scatter"),
    "allgather_partitions": nowhere("parameters are always gathered, never broadcast"),
    "use_multi_rank_bucket_allreduce": nowhere(_BUCKETS),
    "*bucket_size": nowhere(_BUCKETS),
    "sub_group_size": nowhere("the update runs over one parameter after the other"),
    "stage3_max_live_parameters": nowhere(_BUCKETS),
    "stage3_max_reuse_distance": nowhere(_BUCKETS),
    "*_persistence_threshold": nowhere("parameters of all sizes are split"),
    "stage3_gather_*": nowhere("`shardyard export` gathers weights from any checkpoint"),
    "gather_16bit_weights_on_model_save": nowhere("`shardyard export` gathers weights"),
    "stage3_module_granularity_threshold": nowhere(_BUCKETS),
    "stage3_use_all_reduce_for_fetch_params": nowhere(_BUCKETS),
    "round_robin_gradients": nowhere("tunes a copy to host memory that is made differently"),
    "ignore_unused_parameters": nowhere("parameters without a gradient are not changed"),
    "elastic_checkpoint": nowhere("every checkpoint loads on any number of devices"),
    "load_from_fp32_weights": nowhere("master weights are always fp32"),
    "legacy_stage1": nowhere("an old way of stage 1"),
    "grad_hooks": nowhere("gradients are always reduced during the backward pass"),
    "memory_efficient_linear": nowhere("matrix products keep what their backward pass needs"),
    "override_module_apply": nowhere("modules are built without their parameters"),
    "pipeline_loading_checkpoint": nowhere("checkpoints load into any layout"),
    "prefetch_bucket_size": nowhere(_BUCKETS),
    "leaf_module.*": nowhere("experts are known from the model's family"),
}


def _optimizer(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    is_coupled = config.get("params.adam_w_mode") is False
    if is_coupled and config.get("params.weight_decay") not in (0, 0.0, None):
        return rejected(
            "with adam_w_mode=false adds weight decay to the gradient; adamw here decays apart "
            "from it. optim.name=adamw takes the other, which is another training.",
            "optim.name",
        )
    return optimizer_of("deepspeed")(entry, config)


_OPTIMIZER: Rows = {
    "type": _optimizer,
    "params.lr": auto(to("optim.lr", convert=float), "optim.lr"),
    "params.betas": auto(
        to("optim.betas", convert=lambda pair: [float(pair[0]), float(pair[1])]), "optim.betas"
    ),
    "params.eps": auto(to("optim.eps", convert=float), "optim.eps"),
    "params.weight_decay": auto(to("optim.weight_decay", convert=float), "optim.weight_decay"),
    "params.momentum": to("optim.momentum", convert=float),
    "params.nesterov": to("optim.nesterov"),
    "params.torch_adam": nowhere("which kernel updates a parameter is not chosen"),
    "params.adam_w_mode": nowhere("weight decay is always apart from the gradient; see type"),
    "params.bias_correction": choose(
        {True: same("always")},
        lambda value: rejected(
            f"={value!r}: averages are always corrected for their beginning. Leave it out with "
            "--without if that may be.",
        ),
    ),
    "params.amsgrad": reject_if_on("AMSGrad is not there. Leave it out with --without."),
    "params.max_coeff": nowhere("lamb's trust ratio has no bounds here"),
    "params.min_coeff": nowhere("lamb's trust ratio has no bounds here"),
    "params.max_grad_norm": auto(_gradient_clip, "optim.grad_clip"),
    "params.fused": nowhere("which kernel updates a parameter is not chosen"),
    "params.freeze_step": nowhere("of 1-bit optimizers, which are not there"),
    "params.cuda_aware": nowhere("of 1-bit optimizers, which are not there"),
    "params.comm_backend_name": nowhere("of 1-bit optimizers, which are not there"),
    "params.coeff_beta": nowhere("of 1-bit optimizers, which are not there"),
    "params.factor_*": nowhere("of 1-bit optimizers, which are not there"),
    "legacy_fusion": nowhere("which kernel updates a parameter is not chosen"),
}


def _schedule(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Rise and fall; the length of the fall is the run's unless total_num_steps says it."""
    known = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    schedule = known.get(str(entry.value).lower())
    if schedule is None:
        return rejected(
            f"={entry.value!r} is not there. Give optim.schedule=cosine, linear, constant, poly, "
            "step, wsd or inverse_sqrt.",
            "optim.schedule",
        )
    # the first step has the least rate, and the second that of the scheduler's own step 0
    values: dict[str, Any] = {"optim.schedule": schedule, "optim.schedule_from": -1}
    if schedule == "linear":
        values["optim.min_lr_ratio"] = 0.0
    is_linear = config.get("params.warmup_type") is not None
    words = "" if is_linear else "their warm-up is logarithmic, ours is linear"
    return mapped(values, words)


def _warmup_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Two at least; with a logarithmic warm-up, these have 0 and the whole rate."""
    is_linear = config.get("params.warmup_type") == "linear"
    return to("optim.warmup_steps", convert=lambda n: max(int(n), 2) if is_linear else int(n))(
        entry, config
    )


_SCHEDULER: Rows = {
    "type": _schedule,
    "params.warmup_max_lr": auto(to("optim.lr", convert=float), "optim.lr"),
    "params.warmup_min_lr": choose(
        {0: same("from 0"), "auto": same("the Trainer fills in 0")},
        none("the warm-up begins at 0"),
    ),
    "params.warmup_min_ratio": choose({0: same("from 0")}, none("the warm-up begins at 0")),
    "params.warmup_num_steps": auto(_warmup_steps, "optim.warmup_steps"),
    "params.total_num_steps": choose(
        {"auto": same("the length of the run")},
        lambda value: mapped({"optim.decay_steps": value}),
    ),
    "params.cos_min_ratio": to("optim.min_lr_ratio", convert=float),
    "params.warmup_type": choose({"linear": same("linear")}, none("the warm-up is linear")),
    "params.last_batch_iteration": nowhere("a resumed run continues at its own step"),
}

ROWS: Rows = {
    "train_batch_size": auto(to("optim.global_batch", convert=int), "optim.global_batch"),
    "train_micro_batch_size_per_gpu": auto(
        to("optim.micro_batch", convert=int), "optim.micro_batch"
    ),
    "gradient_accumulation_steps": auto(
        to("accumulation_steps", convert=int), "optim.global_batch", "optim.micro_batch"
    ),
    "gradient_clipping": auto(_gradient_clip, "optim.grad_clip"),
    **under("zero_optimization", _ZERO),
    "zero_optimization": choose(
        {True: mapped({"parallel.zero": 1}), False: mapped({"parallel.dp_shard": 1})}
    ),
    **under("optimizer", _OPTIMIZER),
    **under("scheduler", _SCHEDULER),
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),
    "bf16.*": nowhere("master weights and sums of gradients are fp32"),
    "fp16.enabled": _precision("fp16"),
    **under("fp16", {"loss_scale": auto(_loss_scale, "precision.loss_scale")}),
    "fp16.initial_scale_power": nowhere(_SCALER),
    "fp16.loss_scale_window": nowhere(_SCALER),
    "fp16.hysteresis": nowhere(_SCALER),
    "fp16.consecutive_hysteresis": nowhere(_SCALER),
    "fp16.min_loss_scale": nowhere(_SCALER),
    "fp16.auto_cast": nowhere("inputs have the format that the model computes in"),
    "fp16.fp16_master_weights_and_grads": reject_if_on(
        "master weights are always fp32. Leave it out with --without."
    ),
    "fp16.fp16_master_weights_and_gradients": reject_if_on(
        "master weights are always fp32. Leave it out with --without."
    ),
    "amp.enabled": reject_if_on(
        "Apex' mixed precision is not there. Give precision.compute=fp16 or bf16.",
        "precision.compute",
    ),
    "amp.*": nowhere("of Apex' mixed precision"),
    "communication_data_type": choose(
        {
            "fp32": mapped({"precision.reduce": "fp32"}),
            "bf16": mapped({"precision.reduce": "bf16"}),
            "bfp16": mapped({"precision.reduce": "bf16"}),
            None: same("fp32 here"),
        },
        lambda value: rejected(
            f"={value!r}: gradients are summed in fp32 or bf16. Give precision.reduce=...",
            "precision.reduce",
        ),
    ),
    "seq_parallel_communication_data_type": nowhere("follows precision.compute"),
    "data_types.grad_accum_dtype": choose(
        {"fp32": same("fp32"), None: same("fp32")},
        none("gradients are accumulated in fp32"),
    ),
    "fp32_allreduce": nowhere("precision.reduce=fp32 sums gradients in fp32 always"),
    "prescale_gradients": nowhere("sums are divided once, by the targets of a step"),
    "gradient_predivide_factor": nowhere("sums are divided once, by the targets of a step"),
    "sparse_gradients": nowhere("gradients of embeddings are dense"),
    "disable_allgather": nowhere("parameters are always gathered"),
    "zero_allow_untested_optimizer": nowhere("all optimizers here are tested with all layouts"),
    "zero_force_ds_cpu_optimizer": nowhere("updates run on the device (memory.offload)"),
    "steps_per_print": nowhere("the loss of every step is in metrics.jsonl"),
    "wall_clock_breakdown": nowhere(f"where a step's time goes {_PROFILE}"),
    "dump_state": nowhere("every setting is in attempts/<n>/resolved.json"),
    "memory_breakdown": nowhere(f"memory {_PROFILE}"),
    "flops_profiler.*": nowhere(f"FLOP {_PROFILE}"),
    "comms_logger.*": nowhere(f"communication {_PROFILE}"),
    "tensorboard.enabled": to("observe.tensorboard"),
    "tensorboard.*": nowhere("its files are in the run's folder"),
    "wandb.enabled": nowhere("observe.wandb.project switches it on"),
    "wandb.project": to("observe.wandb.project"),
    "wandb.*": nowhere("a run is named by run.name"),
    "csv_monitor.*": nowhere("metrics.jsonl has every step"),
    "comet.*": nowhere("is not reported to; see docs/exporters.md"),
    "monitor_config.*": nowhere("metrics.jsonl has every step"),
    "comms_config*": nowhere("DeepSpeed does not read it"),
    "aio.*": nowhere(_IO),
    "activation_checkpointing.*": nowhere(
        "the script says what is recomputed, by calls into DeepSpeed: memory.recompute does here"
    ),
    "checkpoint.*": nowhere("checkpoints load on any number of nodes (checkpoint.*)"),
    "elasticity.enabled": reject_if_on(
        "elastic.min_nodes and elastic.max_nodes say how a run grows and shrinks, and the batch "
        "stays. Give them, and leave it out with --without."
    ),
    "elasticity.*": nowhere("elastic.min_nodes and elastic.max_nodes say it"),
    "autotuning.*": nowhere("`shardyard plan` finds layout and micro-batch"),
    "data_efficiency.*": reject(
        "sampling by difficulty and dropped tokens change what is learnt, and are not there. "
        "Leave it out with --without."
    ),
    "curriculum_learning.enabled": reject_if_on(
        "a length of samples that grows is not there; phases may have one each (docs/phases.md). "
        "Leave it out with --without."
    ),
    "curriculum_learning.*": nowhere("see curriculum_learning.enabled"),
    "progressive_layer_drop.enabled": reject_if_on(
        "dropping blocks while training is not there for text. Leave it out with --without."
    ),
    "progressive_layer_drop.*": nowhere("see progressive_layer_drop.enabled"),
    "compression_training.*": reject(
        "compression while training is not there. Leave it out with --without."
    ),
    "quantize_training.*": reject(
        "quantisation while training is not there. Leave it out with --without."
    ),
    "sparse_attention.*": reject("sparse attention is not there. Leave it out with --without."),
    "eigenvalue.*": nowhere("of quantisation while training"),
    "pipeline.*": nowhere("parallel.pp and parallel.schedule cut a model into stages"),
    "tensor_parallel.autotp_size": to("parallel.tp", convert=int),
    "sequence_parallel_size": to("parallel.cp", convert=int),
    "hybrid_engine.*": nowhere("of generating while training"),
    "compile.*": nowhere("model.compile compiles blocks"),
    "use_data_before_expert_parallel": nowhere("expert ranks are taken from data ranks"),
    "dataloader_drop_last": nowhere("an epoch ends where its last whole step does"),
    "tensor_parallel.*": nowhere("the family of the model says how matrices are split"),
    "timers.*": nowhere("where a step's time goes " + _PROFILE),
    "graph_harvesting": nowhere("model.compile compiles blocks"),
}


def decides(config: SourceConfig) -> dict[str, Any]:
    """Return the values its engine sets against the Trainer's arguments.

    Only the engine clips gradients, and the Trainer fills in no missing key. An optimizer that it
    makes has its own default betas: Adam's are those of the Trainer too, Lion's are not.
    """
    keys = ("gradient_clipping", "optimizer.params.max_grad_norm")
    has_clip = any(config.get(key) is not None for key in keys)
    values: dict[str, Any] = {} if has_clip else {"optim.grad_clip": DEFAULT_CLIP}
    name = optimizer_by_alias("deepspeed", str(config.get("optimizer.type")))
    row = None if name is None else OPTIMIZERS[name]
    betas = None if row is None or "eps" in row.settings else row.betas
    if betas is not None and config.get("optimizer.params.betas") is None:
        values["optim.betas"] = list(betas)
    return values


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return DeepSpeed's defaults for what a file leaves open; Shardyard's may differ."""
    values: dict[str, Any] = {"optim.grad_clip": DEFAULT_CLIP}
    if config.get("optimizer.type") is not None:
        values |= {"optim.weight_decay": 0.0}
        name = optimizer_by_alias("deepspeed", str(config.get("optimizer.type")))
        # Those with an epsilon are of Adam's kind; Lion's betas are the published ones there too.
        if name is None or "eps" in OPTIMIZERS[name].settings:
            values |= {"optim.betas": [0.9, 0.999], "optim.eps": 1e-8}
        decays = config.get("optimizer.params.weight_decay") not in (0, 0.0, None)
        if decays and name is not None and "decay_vectors" in OPTIMIZERS[name].settings:
            values["optim.decay_vectors"] = True  # it is given all parameters in one group
    if config.get("scheduler.type") is None:
        values |= {"optim.schedule": "constant", "optim.warmup_steps": 0}
    else:
        values |= {"optim.warmup_steps": 1000}
        if str(config.get("scheduler.type")).lower() == "warmupcosinelr":
            values |= {"optim.min_lr_ratio": 0.0001}
    if config.get("zero_optimization.stage") is None and config.get("zero_optimization") is None:
        values |= {"parallel.dp_shard": 1}
    return values

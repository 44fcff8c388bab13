"""torchtitan's TOML: what its keys become.

Source: ``JobConfig`` of torchtitan 0.1 and 0.2 (config/job_config.py), with the older places of
some keys. ``-1`` there is what the other degrees leave.
"""

from shlex import join
from typing import Any

from shardyard.importers.configs.rules import (
    ON,
    ConfigEntry,
    Rows,
    RuleResult,
    SourceConfig,
    choose,
    mapped,
    none,
    nowhere,
    optimizer_of,
    reject_if_on,
    rejected,
    same,
    switch,
    to,
)

MARKS = {"training", "parallelism", "lr_scheduler", "activation_checkpoint", "job"}
"""Tables at the top, of which such a file has at least two, model being another."""

_PRESETS = {
    "llama3/8B": "llama3-8b",
    "llama3/70B": "llama3-70b",
    "llama3/405B": "llama3.1-405b",
    "qwen3/8B": "qwen3-8b",
    "qwen3/30B-A3B": "qwen3-30b-a3b",
    "llama2/7B": "llama2-7b",
    "llama2/13B": "llama2-13b",
    "llama2/70B": "llama2-70b",
}
"""``model.name/model.flavor`` -> the preset of the same shape."""

_PROFILE = "`shardyard profile` traces a run"
_SHOWN = "observe.* sets what is shown"
_DATA = "data.source says what is read"
_EVAL = "evaluations cover the whole held-out split (data.eval_fraction)"


def _model(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    name, flavor = str(config.get("model.name")), str(config.get("model.flavor"))
    preset = _PRESETS.get(f"{name}/{flavor}")
    assets = config.get("model.hf_assets_path") or config.get("model.tokenizer_path") or ""
    if preset in ("llama3-8b", "llama3-70b") and "3.1" in str(assets):
        preset = preset.replace("llama3-", "llama3.1-")
    if preset is None:
        return rejected(
            f"={entry.value!r}: no preset has the shape of {name} {flavor}. Give model.preset, "
            "model.hub or model.path.",
            "model.preset",
        )
    return mapped({"model.preset": preset})


def _betas(_: ConfigEntry, config: SourceConfig) -> RuleResult:
    pair = [float(config.get(f"optimizer.{name}", usual)) for name, usual in _USUAL_BETAS]
    return mapped({"optim.betas": pair})


_USUAL_BETAS = (("beta1", 0.9), ("beta2", 0.95))


def _local_batch(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Samples of one rank in a forward pass; a pipeline cuts them into micro-batches."""
    stages = _pipeline(config)
    if stages == 1:
        return mapped({"optim.micro_batch": entry.value})
    size = config.get("parallelism.pipeline_parallel_microbatch_size", 1)
    if entry.value % size:
        return rejected(
            f"={entry.value} is not a multiple of pipeline_parallel_microbatch_size={size}. Fix "
            "one."
        )
    return mapped({"optim.micro_batch": size, "accumulation_steps": entry.value // size})


def _pipeline(config: SourceConfig) -> int:
    for table in ("parallelism", "experimental"):
        stages = config.get(f"{table}.pipeline_parallel_degree")
        if stages is not None:
            return int(stages)
    return 1


def _degree(setting: str) -> Any:
    def rule(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
        if entry.value == -1:
            return same("what the other degrees leave")
        return to(setting, convert=int)(entry, config)

    return rule


def _schedule(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    schedules: dict[str, dict[str, Any]] = {
        "1f1b": {"parallel.schedule": "1f1b"},
        "gpipe": {"parallel.schedule": "gpipe"},
        "interleaved1f1b": {"parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
        "interleavedzerobubble": {
            "parallel.schedule": "zero-bubble",
            "parallel.virtual_stages": 2,
        },
        "zbvzerobubble": {"parallel.schedule": "zb-v", "parallel.virtual_stages": 2},
    }
    says = schedules.get(str(entry.value).lower())
    if _pipeline(config) == 1:
        return none("read only with a pipeline")
    if says is None:
        return rejected(f"={entry.value!r} is not there. Give parallel.schedule.", _PP)
    return mapped(says)


_PP = "parallel.schedule"


def _decay(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("lr_scheduler.decay_ratio") not in (None, 1.0):
        shape = {"sqrt": "1-sqrt"}.get(str(entry.value), str(entry.value))
        return mapped({"optim.decay_shape": shape})
    if str(entry.value) in ("linear", "cosine"):
        return mapped({"optim.schedule": entry.value})
    return rejected(f"={entry.value!r} is not there. Give optim.schedule.", "optim.schedule")


def _recompute(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    mode = str(entry.value)
    if mode in ("none", "full"):
        return mapped({"memory.recompute": mode})
    if mode == "selective":
        option = str(config.get("activation_checkpoint.selective_ac_option", "2"))
        return mapped({"memory.recompute": int(option) if option.isdigit() else "selective"})
    return rejected(
        f"={mode!r} is not supported. Set memory.recompute=full, selective or none.",
        "memory.recompute",
    )


def _selective(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("activation_checkpoint.mode") != "selective":
        return none("read only with mode=selective")
    return _recompute(ConfigEntry(path=entry.path, value="selective"), config)


def _converters(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    names = entry.value if isinstance(entry.value, list) else [entry.value]
    unknown = [name for name in names if name not in ("float8", "")]
    if unknown:
        return rejected(
            f"={names}: only float8 of these is supported. Leave it out with --without."
        )
    return mapped({"precision.compute": "fp8"}) if "float8" in names else same("none")


def _dtype(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if entry.value == "float32":
        return same("master weights are fp32")
    return none("master weights are always fp32; products are by mixed_precision_param")


def _is_on(config: SourceConfig, *names: str) -> bool:
    """Return whether one of the switches is on; each has been renamed once."""
    return any(config.get(name) in ON for name in names)


def _loads(config: SourceConfig) -> bool:
    """Return whether torchtitan loads anything, which it does only if it also saves."""
    return _is_on(config, "checkpoint.enable", "checkpoint.enable_checkpoint")


_NOT_LOADED = "read only with checkpoint.enable"


def _initial_path(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Initial weights: a Hugging Face folder, or a torch.distributed.checkpoint to convert."""
    if entry.value in ("", None):
        return same("none")
    if not _loads(config):
        return none(_NOT_LOADED)
    if _is_on(config, "checkpoint.initial_load_in_hf"):
        return to("model.path")(entry, config)
    like = str(config.get("model.hf_assets_path") or "HF_FOLDER")
    command = join(("shardyard", "import", str(entry.value), "--like", like, "--to", "weights"))
    return rejected(
        f"={entry.value!r} is a checkpoint of torch.distributed.checkpoint. Convert it with "
        f"`{command}`, then give model.path=weights.",
        "model.path",
    )


def _initial_assets(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Without a path, the weights are next to the tokenizer."""
    if entry.value not in ON or config.get("checkpoint.initial_load_path"):
        return same("see initial_load_path")
    if not _loads(config):
        return none(_NOT_LOADED)
    folder = config.get("model.hf_assets_path")
    if not folder:
        return rejected("=true without a folder. Give model.path=FOLDER.", "model.path")
    return mapped({"model.path": folder})


def _initial_state(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if entry.value in ON or not config.get("checkpoint.initial_load_path") or not _loads(config):
        return same("weights only")
    return rejected(
        "=false also loads the optimizer and the step. A recipe starts from weights only: give "
        "true, or leave the key out with --without."
    )


_FORMATS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}

_DEGREES = {
    "data_parallel_replicate_degree": _degree("parallel.dp_replicate"),
    "data_parallel_shard_degree": _degree("parallel.dp_shard"),
    "data_parallel_degree": _degree("parallel.dp_shard"),
    "tensor_parallel_degree": _degree("parallel.tp"),
    "context_parallel_degree": _degree("parallel.cp"),
    "pipeline_parallel_degree": _degree("parallel.pp"),
    "expert_parallel_degree": _degree("parallel.ep"),
    "pipeline_parallel_schedule": _schedule,
    "pipeline_parallel_microbatch_size": nowhere("see local_batch_size"),
    "pipeline_parallel_schedule_csv": choose({"": same("none"), None: same("none")}),
    "pipeline_parallel_*": nowhere("stages are cut by their cost (parallel.virtual_stages)"),
    "module_fqns_per_model_part": nowhere("stages are cut by their cost"),
    "context_parallel_rotate_method": nowhere("parallel.cp_exchange says what is exchanged"),
    "context_parallel_load_balancer": nowhere("parallel.cp_exchange says what is exchanged"),
    "expert_tensor_parallel_degree": choose({1: same("experts are dealt, not split")}),
    "expert_parallel_comm_backend": nowhere("one way of dealing tokens to experts is there"),
    "fsdp_reshard_after_forward": choose(
        {
            "default": same("parameters are split between uses"),
            "always": mapped({"parallel.zero": 3}),
            "never": mapped({"parallel.zero": 2}),
        }
    ),
    "disable_loss_parallel": nowhere("tp ranks always split the loss"),
    "enable_async_tensor_parallel": nowhere("products and their communication are not fused"),
    "enable_compiled_autograd": nowhere("model.compile compiles blocks"),
    "enable_sequence_parallel": nowhere("tp ranks always split the tokens between them"),
}

ROWS: Rows = {
    "job*": nowhere("run.name and run.dir say where a run is"),
    "profiling*": nowhere(_PROFILE),
    "metrics.enable_tensorboard": to("observe.tensorboard"),
    "metrics.log_freq": nowhere("metrics.jsonl has every step"),
    "metrics.enable_wandb": nowhere("observe.wandb.project switches it on"),
    "metrics*": nowhere(_SHOWN),
    "model.name": _model,
    "model.flavor": _model,
    "model.converters": _converters,
    "model.norm_type": nowhere("the preset says which norm"),
    "model.tokenizer_path": nowhere("data.tokenizer says which, the model's own by default"),
    "model.hf_assets_path": nowhere("data.tokenizer says which, the model's own by default"),
    "model.print_after_conversion": nowhere(_SHOWN),
    "model.vocab_size": nowhere("the preset says it"),
    "optimizer.name": optimizer_of("torchtitan"),
    "optimizer.lr": to("optim.lr", convert=float),
    "optimizer.beta1": _betas,
    "optimizer.beta2": _betas,
    "optimizer.eps": to("optim.eps", convert=float),
    "optimizer.weight_decay": to("optim.weight_decay", convert=float),
    "optimizer.implementation": nowhere("which kernel updates a parameter is not chosen"),
    "optimizer.fused": nowhere("which kernel updates a parameter is not chosen"),
    "optimizer.foreach": nowhere("which kernel updates a parameter is not chosen"),
    "optimizer.early_step_in_backward": nowhere("the update waits for the norm of all gradients"),
    "lr_scheduler.warmup_steps": to("optim.warmup_steps", convert=int),
    "lr_scheduler.decay_ratio": choose(
        {None: same("the whole run")},
        lambda value: (
            same("the whole run after the warm-up")
            if value == 1.0
            else mapped(
                {"optim.schedule": "wsd", "optim.decay_share": value},
                "releases of torchtitan begin the decay up to one step later",
            )
        ),
    ),
    "lr_scheduler.decay_type": _decay,
    "lr_scheduler.lr_min": to("optim.min_lr_ratio", convert=float),
    "lr_scheduler.min_lr_factor": to("optim.min_lr_ratio", convert=float),
    "training.local_batch_size": _local_batch,
    "training.batch_size": _local_batch,
    "training.global_batch_size": choose(
        {-1: same("of one micro-batch of each rank")},
        lambda value: mapped({"optim.global_batch": value}),
    ),
    "training.seq_len": to("data.seq_len", convert=int),
    "training.steps": to("run.steps", convert=int),
    "training.warmup_steps": to("optim.warmup_steps", convert=int),
    "training.max_norm": to("optim.grad_clip", convert=lambda value: float(value) or None),
    "training.seed": to("run.seed", convert=int),
    "training.deterministic": nowhere("precision.reduce=exact makes any layout the same bits"),
    "training.enable_cpu_offload": switch(
        mapped({"offload_params": True}), same("off", offload_params=False)
    ),
    "training.mixed_precision_param": to("precision.compute", convert=lambda v: _FORMATS[v]),
    "training.mixed_precision_reduce": to("precision.reduce", convert=lambda v: _FORMATS[v]),
    "training.dtype": _dtype,
    "training.compile": to("model.compile"),
    "training.enable_fp8_linear": switch(mapped({"precision.compute": "fp8"}), same("off")),
    "training.dataset*": nowhere(_DATA),
    "training.data_files*": nowhere(_DATA),
    "training.gc_*": nowhere("Python's garbage is collected when it wants"),
    "training.debug_*": nowhere(_SHOWN),
    **{f"parallelism.{name}": rule for name, rule in _DEGREES.items()},
    **{f"training.{name}": rule for name, rule in _DEGREES.items()},
    **{f"experimental.{name}": rule for name, rule in _DEGREES.items()},
    "experimental.custom_*": choose({"": same("none")}),
    "checkpoint.enable*": switch(
        same("checkpoints are always written"), none("a checkpoint is always written at the end")
    ),
    "checkpoint.interval": to("checkpoint.every", convert=int),
    "checkpoint.interval_type": choose({"steps": same("steps")}),
    "checkpoint.keep_latest_k": choose(
        {0: none("checkpoint.keep_last has to be a number")},
        lambda value: mapped({"checkpoint.keep_last": value}),
    ),
    "checkpoint.initial_load_path": _initial_path,
    "checkpoint.initial_load_in_hf": _initial_assets,
    "checkpoint.initial_load_model_only": _initial_state,
    "checkpoint.initial_load_model_weights_only": _initial_state,
    "checkpoint.*": nowhere("checkpoints are whole, and load into any layout"),
    "activation_checkpoint.mode": _recompute,
    "activation_checkpoint.selective_ac_option": _selective,
    "activation_checkpoint.*": nowhere("memory.recompute says what is recomputed"),
    "float8.recipe_name": choose(
        {
            "tensorwise": mapped({"precision.fp8_scaling": "tensorwise"}),
            "rowwise": mapped({"precision.fp8_scaling": "rowwise"}),
        }
    ),
    "float8.enable_float8_linear": switch(mapped({"precision.compute": "fp8"}), same("off")),
    "float8.emulate": reject_if_on("fp8 is not emulated. Leave it out with --without."),
    "float8.*": nowhere("the family of the model says which products are in fp8"),
    "quantize.*": nowhere("precision.compute=fp8 says it"),
    "mx.*": nowhere("of MXFP8, which is not there"),
    "compile.enable": to("model.compile"),
    "compile.*": nowhere("each block is compiled"),
    "comm.train_timeout_seconds": to("elastic.collective_timeout_s", convert=float),
    "comm.*": nowhere("elastic.* says how long is waited"),
    "memory_estimation.*": nowhere("`shardyard plan` predicts memory"),
    "fault_tolerance.enable": reject_if_on(
        "after the loss of a node a run continues by elastic.*, not by replicas that come and go. "
        "Leave it out with --without."
    ),
    "fault_tolerance.*": nowhere("elastic.* says it"),
    "validation.enable*": nowhere(_EVAL),
    "validation.freq": lambda entry, config: (
        to("task.eval_every_steps", convert=int)(entry, config)
        if _is_on(config, "validation.enable", "validation.enabled")
        else none("read only with enable")
    ),
    "validation.*": nowhere(_EVAL),
}


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return torchtitan's defaults for what a file leaves open; Shardyard's may differ."""
    values: dict[str, Any] = {
        "optim.lr": 8e-4,
        "optim.weight_decay": 0.1,
        "optim.schedule": "linear",
        "optim.min_lr_ratio": 0.0,
        "optim.warmup_steps": 200,
        "run.steps": 10000,
        "data.seq_len": 2048,
        "optim.micro_batch": 8,
        "accumulation_steps": 1,
        "precision.compute": "bf16",
    }
    if config.get("optimizer.weight_decay", 0.1):
        values["optim.decay_vectors"] = True  # its optimizers have one group of parameters
    if config.get("lr_scheduler.warmup_steps", config.get("training.warmup_steps")) == 0:
        values["optim.schedule_from"] = 0  # one step at the peak before the rate falls
    if config.get("training.global_batch_size", -1) != -1:
        del values["accumulation_steps"]
    if _is_on(config, "validation.enable", "validation.enabled"):
        values["task.eval_every_steps"] = 10
    return values

"""Arguments of the Hugging Face Trainer: what they become.

Source: ``TrainingArguments`` of transformers 5 (training_args.py), with the names of 4.x that files
still have.
"""

import re
from typing import Any

from shardyard.config.optimizers import OPTIMIZERS, optimizer_by_alias
from shardyard.importers.configs import deepspeed, fsdp
from shardyard.importers.configs.rules import (
    ConfigEntry,
    OutcomeKind,
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
    under,
)

MARKS = {
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "num_train_epochs",
    "lr_scheduler_type",
    "save_total_limit",
    "warmup_ratio",
    "max_steps",
    "save_strategy",
    "evaluation_strategy",
}
"""Names of which such arguments have at least one."""

_SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
    "cosine": {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0},
    "constant": {"optim.schedule": "constant", "optim.warmup_steps": 0},
    "constant_with_warmup": {"optim.schedule": "constant"},
    "cosine_with_min_lr": {"optim.schedule": "cosine"},
    "inverse_sqrt": {"optim.schedule": "inverse_sqrt"},
    # its decay is a cosine to 0, unless its arguments say otherwise
    "warmup_stable_decay": {
        "optim.schedule": "wsd",
        "optim.decay_shape": "cosine",
        "optim.min_lr_ratio": 0.0,
    },
}

_HUB = "runs are not pushed to a hub: `shardyard export` writes a folder for it"
_LOADER = "the loader reads ahead by data.prefetch_steps, and draws no order from workers"
_LOGS = "metrics.jsonl has every step"
_EVAL = "evaluations cover the whole validation split at any micro-batch"
_DDP = "of torch's DDP wrapper, which is not used"
_TRAINER = "of the Trainer's own workings"


def _is_schedule_free(config: SourceConfig) -> bool:
    """Whether its optimizer does the warm-up itself, and has no decay."""
    name = optimizer_by_alias("trainer", str(config.get("optim")))
    return name is not None and OPTIMIZERS[name].is_schedule_free


def _schedule(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if _is_schedule_free(config):
        if str(entry.value).lower() == "constant":
            return mapped({"optim.schedule": "constant"})
        return rejected(
            f"={entry.value!r} changes the learning rate, and the optimizer averages its steps "
            "instead. Give optim.schedule=constant, which keeps the warm-up.",
            "optim.schedule",
        )
    says = _SCHEDULES.get(str(entry.value).lower())
    if says is None:
        return rejected(
            f"={entry.value!r} is not there. Give optim.schedule=cosine, linear, constant, poly, "
            "step, wsd or inverse_sqrt.",
            "optim.schedule",
        )
    return mapped(says)


def _decay_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Steps of the decay of warmup_stable_decay, which Shardyard takes as a share of the run."""
    steps = config.get("max_steps")
    if not isinstance(steps, int) or steps < 1:
        return rejected(
            f"={entry.value!r} are steps of a run whose length is in epochs. Give "
            "optim.decay_share, such as 0.1.",
            "optim.decay_share",
        )
    return to("optim.decay_share", convert=lambda number: int(number) / steps)(entry, config)


def _timescale(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if entry.value == (config.get("warmup_steps") or 10_000):
        return same("the warm-up, or 10,000 steps without one")
    return rejected(
        f"={entry.value!r}: inverse_sqrt here has the warm-up as its timescale, or 10,000 steps "
        f"without one. Give optim.warmup_steps={entry.value!r}.",
        "optim.warmup_steps",
    )


_ROUNDED = "rounded to whole steps, which the Trainer rounds up"


def _warmup_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if not entry.value and config.get("warmup_ratio"):
        return none("warmup_ratio says the warm-up")
    if isinstance(entry.value, float) and 0 < entry.value < 1:
        return mapped({"optim.warmup_share": entry.value}, _ROUNDED)
    return to("optim.warmup_steps", convert=int)(entry, config)


def _warmup_ratio(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("warmup_steps"):
        return none("warmup_steps says the warm-up, which the Trainer takes first")
    found = to("optim.warmup_share", convert=float)(entry, config)
    return mapped(found.settings, _ROUNDED) if found.kind is OutcomeKind.MAPPED else found


def _epochs(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    steps = config.get("max_steps")
    if steps is not None and str(steps) not in ("-1", "0"):
        return none("max_steps says the length, which the Trainer takes first")
    return to("run.epochs", convert=float)(entry, config)


def _max_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if str(entry.value) in ("-1", "0"):
        return same("num_train_epochs says the length")
    return to("run.steps", convert=int)(entry, config)


def _evaluate(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    match str(entry.value).lower():
        case "no" | "false":
            return same("evaluated only at the end")
        case "epoch":
            return mapped({"task.eval_every_epochs": 1.0})
        case "steps":
            steps = config.get("eval_steps") or config.get("logging_steps") or 500
            return mapped({"task.eval_every_steps": steps})
    return rejected(f"={entry.value!r} is not no, steps or epoch. Fix it.")


def _evaluate_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    strategy = config.get("eval_strategy", config.get("evaluation_strategy", "no"))
    if str(strategy).lower() != "steps":
        return none("read only with eval_strategy=steps")
    if isinstance(entry.value, float) and entry.value < 1:
        return none("a share of the run: give task.eval_every_steps")
    return to("task.eval_every_steps", convert=int)(entry, config)


def _save_steps(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if str(config.get("save_strategy", "steps")).lower() != "steps":
        return none("read only with save_strategy=steps")
    if isinstance(entry.value, float) and entry.value < 1:
        return none("a share of the run: give checkpoint.every")
    return to("checkpoint.every", convert=int)(entry, config)


def _grad_clip(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if _of_deepspeed(config):
        return none("DeepSpeed clips, and its settings have no gradient_clipping")
    try:
        return mapped({"optim.grad_clip": float(entry.value) or None})
    except (TypeError, ValueError):
        return rejected(
            f"={entry.value!r} is not a number. Give optim.grad_clip=...", "optim.grad_clip"
        )


def _of_deepspeed(config: SourceConfig) -> dict[str, Any]:
    """Return the values DeepSpeed's engine sets if its settings are among the arguments."""
    return deepspeed.decides(config.under("deepspeed")) if config.below("deepspeed") else {}


def notes(config: SourceConfig) -> dict[str, str]:
    """DeepSpeed's, where its settings are among the arguments and leave it to its version."""
    return deepspeed.NOTES if _of_deepspeed(config) else {}


def _betas(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Two arguments here are one setting."""
    try:
        pair = [float(config.get("adam_beta1", 0.9)), float(config.get("adam_beta2", 0.999))]
    except (TypeError, ValueError):
        return rejected(f"={entry.value!r} is not a number. Give optim.betas=[a,b]", "optim.betas")
    return mapped({"optim.betas": pair})


def model_name(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """A repository on the hub, or a folder."""
    name = str(entry.value)
    if "$" in name or "{{" in name:
        return rejected(
            f"={name!r} holds what only a shell would know. Give model.hub=owner/name or "
            "model.path=FOLDER.",
            "model.hub",
        )
    if re.fullmatch(r"[A-Za-z0-9][\w-]*/[\w][\w.-]*", name):
        return mapped({"model.hub": name})
    if "/" in name or name.startswith("."):
        return mapped({"model.path": name})
    return rejected(
        f"={name!r} is neither owner/name of the hub nor a path. Give model.hub=owner/name or "
        "model.path=FOLDER.",
        "model.hub",
    )


def _shape_only(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    return none(f"{entry.value!r} is a shape without weights: give model.preset or model.config")


_RECOMPUTE = switch(mapped({"memory.recompute": "full"}), mapped({"memory.recompute": "none"}))

ROWS: Rows = {
    "per_device_train_batch_size": to("optim.micro_batch", convert=int),
    "per_gpu_train_batch_size": to("optim.micro_batch", convert=int),
    "gradient_accumulation_steps": to("accumulation_steps", convert=int),
    "num_train_epochs": _epochs,
    "max_steps": _max_steps,
    "learning_rate": to("optim.lr", convert=float),
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs.min_lr_rate": to("optim.min_lr_ratio", convert=float),
    "lr_scheduler_kwargs.min_lr_ratio": to("optim.min_lr_ratio", convert=float),
    "lr_scheduler_kwargs.num_decay_steps": _decay_steps,
    "lr_scheduler_kwargs.decay_type": to("optim.decay_shape"),
    "lr_scheduler_kwargs.warmup_type": choose({"linear": same("linear")}),
    "lr_scheduler_kwargs.timescale": _timescale,
    "lr_scheduler_kwargs": choose({None: same("none"), "": same("none")}),
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "optim": optimizer_of("trainer"),
    "adafactor": switch(mapped({"optim.name": "adafactor"}), same("off, as here")),
    "weight_decay": to("optim.weight_decay", convert=float),
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "adam_epsilon": to("optim.eps", convert=float),
    "max_grad_norm": _grad_clip,
    "label_smoothing_factor": reject_if_on(
        "labels of text are not smoothed. Leave it out with --without."
    ),
    "bf16": switch(mapped({"bf16": True}), same("off", bf16=False)),
    "fp16": switch(mapped({"fp16": True}), same("off", fp16=False)),
    "tf32": nowhere("fp32 products follow torch's own choice"),
    "bf16_full_eval": nowhere("evaluations compute as the training does"),
    "fp16_full_eval": nowhere("evaluations compute as the training does"),
    "fp16_opt_level": nowhere("of Apex' mixed precision"),
    "fp16_backend": nowhere("one way of mixed precision is there"),
    "half_precision_backend": nowhere("one way of mixed precision is there"),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs*": nowhere("recomputing is always the non-reentrant kind"),
    "activation_checkpointing_kwargs*": nowhere("recomputing is always the non-reentrant kind"),
    "torch_compile": to("model.compile"),
    "torch_compile_*": nowhere("compiled by torch's default"),
    "use_liger_kernel": nowhere("memory.loss_chunk computes the loss without all logits"),
    "liger_kernel_config*": nowhere("of a library that is not used"),
    "neftune_noise_alpha": reject_if_on(
        "noise on embeddings is not there. Leave it out with --without."
    ),
    "average_tokens_across_devices": switch(
        same("a step's loss is divided by all its tokens"),
        none("a step's loss is always divided by all its tokens"),
    ),
    "seed": to("run.seed", convert=int),
    "data_seed": nowhere("run.seed is the seed of everything"),
    "logging_steps": nowhere(_LOGS),
    "logging_*": nowhere(_LOGS),
    "log_*": nowhere(_LOGS),
    "report_to*": nowhere("observe.tensorboard, observe.wandb and observe.mlflow say it"),
    "eval_strategy": _evaluate,
    "evaluation_strategy": _evaluate,
    "evaluate_during_training": nowhere("task.eval_every_steps says it"),
    "eval_steps": _evaluate_steps,
    "per_device_eval_batch_size": nowhere(_EVAL),
    "per_gpu_eval_batch_size": nowhere(_EVAL),
    "eval_*": nowhere(_EVAL),
    "batch_eval_metrics": nowhere(_EVAL),
    "prediction_loss_only": nowhere(_EVAL),
    "include_*": nowhere(_TRAINER),
    "save_strategy": choose(
        {"steps": same("by steps")},
        none("checkpoints are counted in steps; give checkpoint.every"),
    ),
    "save_steps": _save_steps,
    "save_total_limit": to("checkpoint.keep_last", convert=int),
    "save_only_model": nowhere("checkpoints are whole; `shardyard export` writes only weights"),
    "save_safetensors": nowhere("checkpoints are safetensors always"),
    "save_on_each_node": nowhere("a run has one folder"),
    "load_best_model_at_end": nowhere("checkpoint.keep_best keeps it; export takes it"),
    "metric_for_best_model": nowhere("checkpoint.keep_best goes by the loss, or run.target"),
    "greater_is_better": nowhere("each metric knows which way is better"),
    "output_dir": nowhere("a run's folder is below run.dir"),
    "overwrite_output_dir": nowhere("a run never writes over another"),
    "run_name": nowhere("a run is named by run.name"),
    "project": nowhere("observe.wandb.project says it"),
    "trackio_*": nowhere("is not reported to"),
    "resume_from_checkpoint": nowhere("`shardyard resume RUN` continues a run"),
    "ignore_data_skip": nowhere("a resumed run continues at its exact position in the data"),
    "restore_callback_states_from_checkpoint": nowhere(_TRAINER),
    "push_to_hub*": nowhere(_HUB),
    "hub_*": nowhere(_HUB),
    "dataloader_*": nowhere(_LOADER),
    "group_by_length": nowhere("samples have one length"),
    "length_column_name": nowhere("samples have one length"),
    "train_sampling_strategy": nowhere("every sample once an epoch, in an order by run.seed"),
    "remove_unused_columns": nowhere("data.text_key names the one column that is read"),
    "label_names*": nowhere("the task knows its labels"),
    "ddp_timeout": to("elastic.collective_timeout_s", convert=float),
    "ddp_*": nowhere(_DDP),
    "sharded_ddp*": reject_if_on("FairScale is not there. Give parallel.zero=...", "parallel.zero"),
    "no_cuda": nowhere("cluster.device says it"),
    "use_cpu": switch(mapped({"cluster.device": "cpu"}), same("off")),
    "use_mps_device": nowhere("cluster.device says it"),
    "local_rank": nowhere("each process knows its rank"),
    "do_train": switch(same("always"), none("a recipe trains")),
    "do_eval": nowhere("a held-out split is always evaluated at the end"),
    "do_predict": nowhere("predictions are made only in evaluations"),
    "deepspeed": nowhere("names a DeepSpeed file"),
    **under("deepspeed", deepspeed.ROWS),
    "fsdp_config": nowhere("names a file of FSDP's settings"),
    "fsdp_transformer_layer_cls_to_wrap*": nowhere(fsdp.BLOCKS),
    "fsdp_min_num_params": nowhere(fsdp.BLOCKS),
    "fsdp": fsdp.legacy,
    "fsdp.*": fsdp.legacy,
    **under("fsdp_config", fsdp.ROWS),
    "accelerator_config*": nowhere(_TRAINER),
    "parallelism_config": choose({None: same("none")}),
    **under("parallelism_config", fsdp.PARALLELISM),
    "full_determinism": nowhere("precision.reduce=exact makes any layout the same bits"),
    "auto_find_batch_size": nowhere("`shardyard plan` finds the micro-batch that fits"),
    "torch_empty_cache_steps": nowhere("memory is not handed back between steps"),
    "optim_args": nowhere("optim.* says it"),
    "optim_target_modules": nowhere("model.frozen says what is not trained"),
    "enable_jit_checkpoint": nowhere("a drain saves (SIGTERM)"),
    "disable_tqdm": nowhere(_LOGS),
    "debug*": nowhere(_TRAINER),
    "skip_memory_metrics": nowhere("peak memory of each step is in metrics.jsonl"),
    "past_index": nowhere(_TRAINER),
    "jit_mode_eval": nowhere(_TRAINER),
    "use_cache": nowhere("caching is off in training"),
    "use_ipex": nowhere(_TRAINER),
    "mp_parameters*": nowhere("of SageMaker's library: give its JSON"),
    "model_name_or_path": model_name,
    "model_name": model_name,
    "model_id": model_name,
    "config_name": _shape_only,
    "model_type": _shape_only,
    "model_revision": to("model.revision"),
    "torch_dtype": nowhere("master weights are fp32, and precision.compute says the products"),
    "dtype": nowhere("master weights are fp32, and precision.compute says the products"),
    "attn_implementation": nowhere("attention is torch's fused one"),
    "use_flash_attention_2": nowhere("attention is torch's fused one"),
    "chat_template": nowhere("data.chat_template says how dialogues become text"),
    "preprocessing_num_workers": nowhere("data.workers says how many prepare"),
    "dataloader_num_workers": nowhere(_LOADER),
    "tokenizer_name": to("data.tokenizer"),
    "tokenizer_name_or_path": to("data.tokenizer"),
    "max_seq_length": to("data.seq_len", convert=int),
    "max_seq_len": to("data.seq_len", convert=int),
    "model_max_length": to("data.seq_len", convert=int),
    "block_size": to("data.seq_len", convert=int),
    "max_length": to("data.seq_len", convert=int),
    "cutoff_len": to("data.seq_len", convert=int),
    "dataset_name*": nowhere("data.source says what is read"),
    "dataset_config_name*": nowhere("data.source says what is read"),
    "dataset*": nowhere("data.source says what is read"),
    "data_path*": nowhere("data.source says what is read"),
    "train_file*": nowhere("data.source says what is read"),
    "validation_file*": nowhere("data.eval_source names validation data"),
    "validation_split_percentage": nowhere("data.eval_fraction holds documents back"),
}
"""Arguments of the Trainer, and those of its scripts whose meaning is settled."""


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return the Trainer's defaults for what its arguments leave open; Shardyard's may differ."""
    values: dict[str, Any] = {
        "optim.micro_batch": 8,
        "accumulation_steps": 1,
        "optim.lr": 5e-5,
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 1.0,
        "optim.warmup_steps": 0,
        "run.epochs": 3.0,
        "bf16": False,
        "fp16": False,
    }
    flagged = next((key for key in OPTIMIZERS if config.get(key) is True), "adamw_torch")
    name = optimizer_by_alias("trainer", str(config.get("optim", flagged)))
    adam: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8}  # of adam_*, which Lion reads too
    if name is not None:
        read = OPTIMIZERS[name].settings
        values |= {f"optim.{key}": value for key, value in adam.items() if key in read}
    if str(config.get("lr_scheduler_type")).lower() != "constant":
        values["optim.schedule_from"] = 0  # its schedulers are asked before the first step
    if config.get("lr_scheduler_type") is None:
        values |= {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0}
    values |= _of_deepspeed(config)
    if not config.get("fsdp") and not config.get("deepspeed") and not config.below("deepspeed"):
        values |= {"parallel.dp_shard": 1}  # plain DDP
    return values

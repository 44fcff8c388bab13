"""Conversion of the arguments of ``finetuning.py`` of llama-recipes.

Source: ``train_config`` and ``fsdp_config`` of meta-llama/llama-recipes, whose fields are
arguments of the same name; a flag without a value is true.
"""

from typing import Any

from shardyard.importers.configs import fsdp, trainer
from shardyard.importers.configs.rules import (
    OFF,
    ConfigEntry,
    Rows,
    RuleResult,
    SourceConfig,
    choose,
    mapped,
    none,
    nowhere,
    reject_if_on,
    same,
    switch,
    to,
)

MARKS = {"batch_size_training", "enable_fsdp", "low_cpu_fsdp", "batching_strategy"}
"""Names of which such arguments have at least one."""

_CHECKPOINTS = "a checkpoint has its place in the run's folder; `shardyard export` writes weights"


def _max_steps(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if str(entry.value) == "0":
        return same("num_epochs says the length")
    return none("num_epochs says the length too: give run.steps in place of it")


def _grad_clip(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if entry.value in OFF:
        return mapped({"optim.grad_clip": None})
    threshold = config.get("gradient_clipping_threshold", 1.0)
    return mapped({"optim.grad_clip": float(threshold)})


def _gamma(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("num_epochs") in (1, "1"):
        return none("the rate falls behind an epoch, and there is one")
    return to("optim.milestone_factor", convert=float)(entry, config)


def _strategy(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    name = str(entry.value).rpartition(".")[2].lower()
    return fsdp.legacy(ConfigEntry(path="fsdp", value=name, line=entry.line), config)


def _sharded(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if entry.value in OFF:
        return mapped({"parallel.dp_shard": 1})
    if config.get("sharding_strategy") is not None:
        return same("sharding_strategy says how")
    return mapped({"parallel.zero": 3})


ROWS: Rows = {
    "model_name": trainer.model_name,
    "tokenizer_name": to("data.tokenizer"),
    "num_epochs": to("run.epochs", convert=float),
    "max_train_step": _max_steps,
    "max_eval_step": nowhere("evaluations cover the whole held-out split"),
    "batch_size_training": to("optim.micro_batch", convert=int),
    "gradient_accumulation_steps": to("accumulation_steps", convert=int),
    "gradient_clipping": _grad_clip,
    "gradient_clipping_threshold": nowhere("gradient_clipping says whether it is read"),
    "context_length": to("data.seq_len", convert=int),
    "batching_strategy": choose(
        {"packing": same("samples are packed"), "padding": none("give data.pack=whole")}
    ),
    "lr": to("optim.lr", convert=float),
    "weight_decay": to("optim.weight_decay", convert=float),
    "gamma": _gamma,
    "seed": to("run.seed", convert=int),
    "enable_fsdp": _sharded,
    "sharding_strategy": _strategy,
    "hsdp": nowhere("sharding_strategy=HYBRID_SHARD says it"),
    "sharding_group_size": reject_if_on(
        "is parallel.dp_shard of a hybrid layout. Give it and parallel.dp_replicate.",
        "parallel.dp_shard",
    ),
    "replica_group_size": reject_if_on(
        "is parallel.dp_replicate of a hybrid layout. Give it and parallel.dp_shard.",
        "parallel.dp_replicate",
    ),
    "fsdp_activation_checkpointing": switch(
        mapped({"memory.recompute": "full"}), mapped({"memory.recompute": "none"})
    ),
    "fsdp_cpu_offload": switch(mapped({"offload_params": True}), same("off", offload_params=False)),
    "mixed_precision": switch(mapped({"bf16": True}), mapped({"bf16": False})),
    "use_fp16": switch(mapped({"fp16": True, "bf16": False}), same("off", fp16=False)),
    "pure_bf16": switch(
        none("master weights are fp32, and precision.compute=bf16 says the products"), same("off")
    ),
    "optimizer": nowhere("of AdamW and AnyPrecision; optim.name says it"),
    "use_peft": reject_if_on(
        "trains adapters. Give model.lora.rank=8 (the source's own rank).", "model.lora.rank"
    ),
    "peft_method": nowhere("model.lora says adapters"),
    "quantization": reject_if_on("frozen weights are not quantized. Leave it out with --without."),
    "freeze_layers": reject_if_on(
        "leaves the first layers as they are. Give model.frozen, a list of names.", "model.frozen"
    ),
    "num_freeze_layers": nowhere("freeze_layers says whether it is read"),
    "dataset*": nowhere("data.source says what is read"),
    "num_workers_dataloader": nowhere("data.workers says how many prepare"),
    "run_validation": nowhere("a held-out split is always evaluated at the end"),
    "val_batch_size": nowhere("evaluations cover the whole held-out split"),
    "one_gpu": nowhere("cluster.devices says it"),
    "low_cpu_fsdp": nowhere("each rank reads its own part of the weights"),
    "use_fast_kernels": nowhere("attention is torch's fused one"),
    "output_dir": nowhere("a run's folder is below run.dir"),
    "save_*": nowhere(_CHECKPOINTS),
    "dist_checkpoint*": nowhere(_CHECKPOINTS),
    "checkpoint_type": nowhere(_CHECKPOINTS),
    "use_wandb": nowhere("observe.wandb says it"),
    "flop_counter*": nowhere("MFU is in the report"),
    "*profil*": nowhere("observe.profile.at_step says it"),
}
"""Fields of the script's two configurations."""


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return the script's defaults for what its arguments leave open; Shardyard's may differ."""
    values: dict[str, Any] = {
        "optim.micro_batch": 4,
        "accumulation_steps": 1,
        "optim.lr": 1e-4,
        "optim.weight_decay": 0.0,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.grad_clip": None,
        "run.epochs": 3.0,
        "data.seq_len": 4096,
        "bf16": True,
        "fp16": False,
    }
    values |= _falls_after_each_epoch(config.get("num_epochs", 3), config.get("gamma", 0.85))
    if config.get("enable_fsdp") in OFF:
        return values | {"parallel.dp_shard": 1}
    return values | {"memory.recompute": "full"}


def _falls_after_each_epoch(epochs: Any, gamma: Any) -> dict[str, Any]:
    """The rate is held for an epoch, and multiplied by gamma behind it."""
    try:
        ends = [float(end) for end in range(1, int(epochs))]
        factor = float(gamma)
    except (TypeError, ValueError):
        return {}  # what is no number is refused by its own row
    if not ends:
        return {"optim.schedule": "constant", "optim.warmup_steps": 0}
    return {
        "optim.schedule": "step",
        "optim.milestones": ends,
        "optim.milestone_factor": factor,
        "optim.warmup_steps": 0,
    }

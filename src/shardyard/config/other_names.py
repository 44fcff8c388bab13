"""Settings of other trainers, and plain words, by what they mean here.

An unknown key leads to a setting with its value translated, or to words on what there is
instead. The tables of `shardyard import` know more names; they are a lookup of their own, which
``control/request.py`` adds.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardyard.config.optimizers import OPTIMIZERS, Elsewhere, optimizer_by_alias
from shardyard.families.images.registry import IMAGE_PRESETS
from shardyard.families.presets import preset_named


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Meaning of an unknown key."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted setting -> value."""
    words: str = ""
    """Hint in words, for a key without a counterpart."""
    is_translated: bool = False
    """Whether the value is another than the one that was given."""

    @property
    def overrides(self) -> str:
        """The settings as overrides to paste, one after the other."""
        return " ".join(f"{name}={_as_override(value)}" for name, value in self.settings.items())


Translate: TypeAlias = Callable[[Any], Meaning]
Lookup: TypeAlias = Callable[[str, Any, bool], Meaning | None]
"""Name, its value, whether patterns of names count -> meaning, or None where it is not known."""

lookups: list[Lookup] = []
"""Further tables, asked after the one here."""


def meaning_of(name: str, value: Any) -> Meaning | None:
    """Return the meaning of a name of another trainer; None: it is not in the table.

    Args:
        value: As YAML reads it.
    """
    name = _plain(name)
    if name in _SAME:
        return Meaning(settings={_SAME[name]: value})
    if name in _TRANSLATED:
        return _TRANSLATED[name](value)
    return Meaning(words=_WORDS[name]) if name in _WORDS else None


def meaning_in_lookups(name: str, value: Any, *, by_pattern: bool) -> Meaning | None:
    """Return the meaning of a name in further tables."""
    plain = _plain(name)
    return next((found for each in lookups if (found := each(plain, value, by_pattern))), None)


def near_meaning(key: str, value: Any) -> Meaning | None:
    """The meaning of a name in the table that is spelt almost like the key."""
    names = [*_SAME, *_TRANSLATED]
    near = difflib.get_close_matches(_plain(key.rpartition(".")[2]), names, n=1, cutoff=0.8)
    return meaning_of(near[0], value) if near else None


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")


def _as_override(value: Any) -> str:
    """A value as YAML reads it back from the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case list() | tuple():
            return "[" + ",".join(_as_override(each) for each in value) + "]"
        case _:
            return str(value)


def is_on(value: Any) -> bool:
    """Whether a switch is on: one without a value is."""
    return str(value).lower() not in ("false", "no", "off", "0", "none", "null")


def _to(**settings: Any) -> Translate:
    """The meaning with fixed values; ``__`` in a name is a dot."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return lambda _: Meaning(settings=named, is_translated=True)


def _switch(on: Mapping[str, Any], off: Mapping[str, Any] | str) -> Translate:
    """One meaning for on and one for off, which may be words."""

    def choose(value: Any) -> Meaning:
        chosen = on if is_on(value) else off
        if isinstance(chosen, str):
            return Meaning(words=chosen)
        return Meaning(settings=chosen, is_translated=True)

    return choose


def _model(value: Any) -> Meaning:
    """A preset, a folder, or a repository on the hub."""
    if isinstance(value, str) and (value in IMAGE_PRESETS or preset_named(value) is not None):
        return Meaning(settings={"model.preset": value})
    is_path = re.match(r"[./~]", str(value)) or str(value).count("/") > 1
    return Meaning(settings={"model.path" if is_path else "model.hub": value})


INSTANCE_WITH = {
    "v100": "p3dn.24xlarge",
    "a100": "p4d.24xlarge",
    "h100": "p5.48xlarge",
    "h200": "p5en.48xlarge",
    "b200": "p6-b200.48xlarge",
    "b300": "p6-b300.48xlarge",
    "a10g": "g5.48xlarge",
    "l4": "g6.48xlarge",
    "l40s": "g6e.48xlarge",
}
"""Accelerator, in lower case -> an EC2 type with it."""


def _accelerators(value: Any) -> Meaning:
    """A number of devices, a kind of device for torch, or the name of an accelerator."""
    match value:
        case str() if value.lower() in INSTANCE_WITH:
            machine = INSTANCE_WITH[value.lower()]
            return Meaning(settings={"cluster.instance": machine}, is_translated=True)
        case str() if value.lower() in ("gpu", "cuda"):
            return Meaning(settings={"cluster.device": "cuda"}, is_translated=True)
        case str() if value.lower() == "cpu":
            return Meaning(settings={"cluster.device": "cpu"})
        case str() if value != "auto" and not value.isdigit():
            return Meaning(
                words="Name the machine of the accelerator: cluster.instance=p5.48xlarge, or "
                "cluster.file for one of your own (docs/hardware.md)."
            )
        case _:
            return Meaning(settings={"cluster.devices": value})


def _tokens(value: Any) -> Meaning:
    """Axolotl's list of tokens to add, or the length of a run."""
    return Meaning(settings={"data.add_tokens" if isinstance(value, list) else "run.tokens": value})


def _schedule(value: Any) -> Meaning:
    """A schedule by its usual name."""
    names = {
        "polynomial": "poly",
        "constant_with_warmup": "constant",
        "multistep": "step",
        "warmup_stable_decay": "wsd",
    }
    name = str(value).lower()
    known = names.get(name, name)
    return Meaning(settings={"optim.schedule": known}, is_translated=known != value)


def _optimizer(value: Any) -> Meaning:
    """An optimizer by the name that Trainer, DeepSpeed or torchtitan has for it."""
    places: tuple[Elsewhere, ...] = ("trainer", "deepspeed", "torchtitan")
    known = [optimizer_by_alias(place, str(value)) for place in places]
    name = next((each for each in known if each is not None), None)
    if name is None:
        return Meaning(words=f"optim.name is one of {', '.join(OPTIMIZERS)}.")
    return Meaning(settings={"optim.name": name}, is_translated=name != value)


def _attention(value: Any) -> Meaning:
    """A kernel of attention by its name in transformers."""
    names = {"flash_attention_2": "flash", "flash_attention_3": "fa3", "eager": "sdpa"}
    known = names.get(str(value), value)
    return Meaning(settings={"model.attention": known}, is_translated=known != value)


def _report_to(value: Any) -> Meaning:
    """Services that also show a run."""
    names = value if isinstance(value, list) else [value]
    known: dict[str, tuple[str, Any]] = {
        "wandb": ("observe.wandb.project", "NAME"),
        "mlflow": ("observe.mlflow.url", "URL"),
        "tensorboard": ("observe.tensorboard", True),
    }
    found = dict(known[str(name)] for name in names if str(name) in known)
    if found:
        return Meaning(settings=found, is_translated=True)
    return Meaning(words="A run reports to files of its folder, and more: docs/exporters.md.")


def _stage(value: Any) -> Meaning:
    """A stage of ZeRO, or of a training: sft, pt."""
    if str(value) in ("1", "2", "3"):
        return Meaning(settings={"parallel.zero": value})
    names = {"sft": _CHAT, "pt": "Training on text is the default: task.name=causal_lm."}
    return Meaning(words=names.get(str(value).lower(), _PREFERENCES))


def _evals_per_epoch(value: Any) -> Meaning:
    is_number = isinstance(value, int | float) and value > 0
    share = round(1 / value, 6) if is_number else "EPOCHS"
    return Meaning(settings={"task.eval_every_epochs": share}, is_translated=True)


def _adapter(value: Any) -> Meaning:
    if str(value).lower() in ("full", "none", "freeze", "null"):
        return Meaning(
            words="All weights are trained unless model.lora.rank or model.frozen is set."
        )
    return Meaning(settings={"model.lora.rank": "RANK"}, is_translated=True)


def _precision(value: Any) -> Meaning:
    """``bf16-mixed``, ``bfloat16``, ``16``: the format of matrix products."""
    text = {"true": "bf16", "false": "fp32"}.get(str(value).lower(), str(value).lower())
    names = {"bf": "bf16", "fp8": "fp8", "float8": "fp8", "16": "fp16", "32": "fp32", "no": "fp32"}
    names |= {"fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32", "float32": "fp32"}
    found = next((name for start, name in names.items() if text.startswith(start)), None)
    return Meaning(
        settings={"precision.compute": found or value}, is_translated=found not in (None, value)
    )


_SAME = {
    "learning_rate": "optim.lr",
    "peak_lr": "optim.lr",
    "base_lr": "optim.lr",
    "min_lr_rate": "optim.min_lr_ratio",
    "batch": "optim.global_batch",
    "batch_size": "optim.global_batch",
    "train_batch_size": "optim.global_batch",
    "global_batch_size": "optim.global_batch",
    "effective_batch_size": "optim.global_batch",
    "micro_batch_size": "optim.micro_batch",
    "per_gpu_batch_size": "optim.micro_batch",
    "per_device_batch_size": "optim.micro_batch",
    "local_batch_size": "optim.micro_batch",
    "warmup_ratio": "optim.warmup_share",
    "num_warmup_steps": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "adam_eps": "optim.eps",
    "epsilon": "optim.eps",
    "wd": "optim.weight_decay",
    "clip_grad": "optim.grad_clip",
    "grad_clip_norm": "optim.grad_clip",
    "gradient_clip_val": "optim.grad_clip",
    "max_norm": "optim.grad_clip",
    "label_smoothing_factor": "task.label_smoothing",
    "pref_loss": "task.loss_type",
    "pref_beta": "task.beta",
    "rl_beta": "task.beta",
    "dpo_beta": "task.beta",
    "center_rewards_coefficient": "task.center_rewards",
    "smoothing": "task.label_smoothing",
    "steps": "run.steps",
    "train_steps": "run.steps",
    "training_steps": "run.steps",
    "total_steps": "run.steps",
    "num_steps": "run.steps",
    "max_iters": "run.steps",
    "train_iters": "run.steps",
    "iterations": "run.steps",
    "num_epochs": "run.epochs",
    "max_epochs": "run.epochs",
    "n_epochs": "run.epochs",
    "output_dir": "run.dir",
    "save_dir": "run.dir",
    "run_name": "run.name",
    "job_name": "run.name",
    "experiment_name": "run.name",
    "num_gpus": "cluster.devices",
    "n_gpus": "cluster.devices",
    "ngpus": "cluster.devices",
    "gpus_per_node": "cluster.devices",
    "nproc_per_node": "cluster.devices",
    "num_processes": "cluster.devices",
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "num_machines": "cluster.nodes",
    "instance_type": "cluster.instance",
    "walltime": "launch.time_limit",
    "timeout_hours": "launch.time_limit",
    "tp_size": "parallel.tp",
    "tp_degree": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pp_size": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "context_parallel_degree": "parallel.cp",
    "sequence_parallel_degree": "parallel.cp",
    "expert_parallel_size": "parallel.ep",
    "dp_shard_size": "parallel.dp_shard",
    "dp_replicate_size": "parallel.dp_replicate",
    "sequence_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "seq_length": "data.seq_len",
    "max_length": "data.seq_len",
    "context_length": "data.seq_len",
    "ctx_len": "data.seq_len",
    "train_file": "data.source",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "train_data": "data.source",
    "datasets": "data.source",
    "data_path": "data.source",
    "data_dir": "data.source",
    "eval_dataset": "data.eval_source",
    "validation_file": "data.eval_source",
    "val_dataset": "data.eval_source",
    "test_datasets": "data.eval_source",
    "val_set_size": "data.eval_fraction",
    "val_size": "data.eval_fraction",
    "validation_split": "data.eval_fraction",
    "dataset_text_field": "data.text_key",
    "text_column": "data.text_key",
    "template": "data.chat_template",
    "dataset_num_proc": "data.workers",
    "num_proc": "data.workers",
    "preprocessing_num_workers": "data.workers",
    "dataset_processes": "data.workers",
    "prefetch_factor": "data.prefetch_steps",
    "dataloader_prefetch_factor": "data.prefetch_steps",
    "image_size": "data.images.size",
    "img_size": "data.images.size",
    "input_size": "data.images.size",
    "random_erasing": "data.images.erase",
    "reprob": "data.images.erase",
    "drop_path_rate": "model.drop_path",
    "model_ema_decay": "optim.ema_decay",
    "r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "lora_target": "model.lora.targets",
    "lora_target_modules": "model.lora.targets",
    "use_rslora": "model.lora.rslora",
    "modules_to_save": "model.lora.modules_to_save",
    "lora_modules_to_save": "model.lora.modules_to_save",
    "additional_target": "model.lora.modules_to_save",
    "additional_special_tokens": "data.add_special_tokens",
    "freeze": "model.frozen",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_steps": "task.eval_every_steps",
    "eval_interval": "task.eval_every_steps",
    "val_check_interval": "task.eval_every_steps",
    "wandb_project": "observe.wandb.project",
    "wandb_entity": "observe.wandb.entity",
    "logging_steps": "observe.log_every",
    "log_interval": "observe.log_every",
    "log_every_n_steps": "observe.log_every",
    "ddp_timeout": "elastic.collective_timeout_s",
    "early_stopping_patience": "run.patience",
}
"""Name -> setting that takes the same value."""

_WHOLE = _switch(
    {"data.pack": "whole"},
    "Without packing rows are padded. Here data.pack=stream or whole fills each sample.",
)
_ANSWERS = _switch({"data.loss_on": "answers"}, {"data.loss_on": "all"})
_FLASH = _switch({"model.attention": "flash"}, {"model.attention": "sdpa"})

_TRANSLATED: dict[str, Translate] = {
    "stage": _stage,
    "gpus": _accelerators,
    "gpu": _accelerators,
    "gpu_type": _accelerators,
    "gpu_name": _accelerators,
    "accelerator": _accelerators,
    "accelerators": _accelerators,
    "gradient_accumulation_steps": _to(optim__micro_batch="..."),
    "accumulate_grad_batches": _to(optim__micro_batch="..."),
    "grad_accum_steps": _to(optim__micro_batch="..."),
    "accumulate": _to(optim__micro_batch="..."),
    "accumulation_steps": _to(optim__micro_batch="..."),
    "gradient_accumulation": _to(optim__micro_batch="..."),
    "early_stopping": _to(run__patience=3),
    "tokens": _tokens,
    "max_tokens": _tokens,
    "spot": _to(cluster__capacity="spot"),
    "use_spot": _to(cluster__capacity="spot"),
    "optimizer": _optimizer,
    "attn_implementation": _attention,
    "lr_scheduler": _schedule,
    "scheduler": _schedule,
    "lr_decay_style": _schedule,
    "adam_beta1": lambda value: Meaning(
        settings={"optim.betas": [value, 0.999]}, is_translated=True
    ),
    "adam_beta2": lambda value: Meaning(settings={"optim.betas": [0.9, value]}, is_translated=True),
    "precision": _precision,
    "mixed_precision": _precision,
    "dtype": _precision,
    "torch_dtype": _precision,
    "model": _model,
    "base_model": _model,
    "model_name": _model,
    "model_name_or_path": _model,
    "pretrained_model_name_or_path": _model,
    "packing": _WHOLE,
    "sample_packing": _WHOLE,
    "sequence_packing": _WHOLE,
    "neat_packing": _WHOLE,
    "assistant_only_loss": _ANSWERS,
    "completion_only_loss": _ANSWERS,
    "train_on_inputs": _switch({"data.loss_on": "all"}, {"data.loss_on": "answers"}),
    "train_on_prompt": _switch({"data.loss_on": "all"}, {"data.loss_on": "answers"}),
    "adapter": _adapter,
    "finetuning_type": _adapter,
    "use_peft": _adapter,
    "lora": _adapter,
    "flash_attention": _FLASH,
    "flash_attn": _FLASH,
    "use_flash_attention": _FLASH,
    "torch_compile": _switch({"model.compile": True}, {"model.compile": False}),
    "offload_optimizer": _switch({"memory.offload": "optimizer"}, {"memory.offload": "none"}),
    "offload_param": _switch({"memory.offload": "params"}, {"memory.offload": "none"}),
    "cpu_offload": _switch({"memory.offload": "params"}, {"memory.offload": "none"}),
    "fsdp": _to(parallel__zero=3),
    "ddp": _to(parallel__strategy="NO_SHARD"),
    "evals_per_epoch": _evals_per_epoch,
    "report_to": _report_to,
    "tensorboard": _to(observe__tensorboard=True),
    "wandb": _to(observe__wandb__project="NAME"),
    "load_best_model_at_end": _to(checkpoint__keep_best=True),
    "deterministic": _to(precision__reduce="exact"),
    "augment": _to(data__images__rand_augment=2),
    "auto_augment": _to(data__images__rand_augment=2),
    "pretrained": _switch({"model.weights": "load"}, {"model.weights": "random"}),
}
"""Name -> meaning of a value."""

NOT_BUILT = frozenset(
    ("quantization", "quantization_config", "quantization_bit", "load_in_4bit", "load_in_8bit")
) | {"qlora"}
"""Names of a feature that is not built, in any section."""

QLORA = (
    "training adapters on a base in 4 or 8 bit (QLoRA) is not supported. On a base in bf16 it "
    "is: give model.lora.rank, and parallel.zero=3 splits the base over the devices."
)
_CHAT = "Fine-tune on chat data with data.format=chat (docs/chat.md)."
_RESUME = "`shardyard resume RUN` continues a run at its newest checkpoint (docs/verbs/resume.md)."
_EXPORT = "`shardyard export RUN --to FOLDER` writes a Hugging Face folder (docs/verbs/export.md)."
_IMPORT = "`shardyard import FILE` makes a recipe of it (docs/verbs/import.md)."
_PREFERENCES = (
    "Pairs of answers train with task.name=preference data.format=preference_pairs (docs/chat.md); "
    "task.name=reward makes a reward model of them. Training on rewards is not supported."
)

_WORDS = {
    **dict.fromkeys(("sft", "instruct", "instruction_tuning", "chat"), _CHAT),
    **dict.fromkeys(NOT_BUILT, QLORA),
    **dict.fromkeys(("dpo", "ppo", "grpo", "rlhf", "orpo", "kto", "rl"), _PREFERENCES),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint", "auto_resume_from_checkpoints"),
        _RESUME,
    ),
    **dict.fromkeys(
        ("export", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "export_dir"),
        _EXPORT,
    ),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "config_file", "fsdp_config"), _IMPORT),
    **dict.fromkeys(
        ("use_dora", "init_lora_weights", "layers_to_transform", "bias"),
        "Adapters are LoRA or rsLoRA on matrices: model.lora.rank, alpha, targets and rslora.",
    ),
    "task_type": "task.name=causal_lm, masked_lm or image_classification says what is trained.",
    "lora_target_linear": "All linear layers of the blocks get an adapter by default "
    "(model.lora.targets).",
    "padding_free": "Samples are packed without padding (data.pack).",
    "pad_to_sequence_len": "Samples are packed without padding (data.pack).",
    "saves_per_epoch": "Write the steps between checkpoints: checkpoint.every=STEPS.",
    "special_tokens": "The tokenizer's files hold special tokens (data.tokenizer), and "
    "data.add_special_tokens adds others.",
    **dict.fromkeys(
        ("resize_vocab", "resize_token_embeddings_to_32x", "mean_resizing"),
        "Tokens of data.add_tokens and data.add_special_tokens grow the embedding by themselves.",
    ),
    "num_workers": "The loader reads ahead by itself (data.prefetch_steps); data.workers prepares, "
    "and data.module_workers reads your own dataset.",
}
"""Name -> what there is, where no setting states it."""

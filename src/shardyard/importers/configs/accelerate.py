"""accelerate's YAML, and the same options on the line of ``accelerate launch``.

Source: ``ClusterConfig`` and the parser of ``accelerate launch`` in accelerate 1.15;
``num_processes`` there is of all machines together.
"""

from typing import Any

from shardyard.importers.configs import fsdp
from shardyard.importers.configs.rules import (
    ConfigEntry,
    Rows,
    Rule,
    RuleResult,
    SourceConfig,
    auto,
    choose,
    mapped,
    none,
    nowhere,
    reject_if_on,
    rejected,
    same,
    switch,
    to,
    under,
)

MARKS = {"distributed_type", "compute_environment", "mixed_precision", "num_machines"}
"""Keys of which such a file has at least two."""

_MEET = "nodes find each other by themselves"
_TPU = "for TPUs, which are not supported"


def _distributed_type(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    match str(entry.value).upper():
        case "MULTI_GPU" | "MULTI_CPU" | "MULTI_XPU" | "MULTI_HPU" | "MULTI_MLU" as name:
            device = {"MULTI_CPU": "cpu", "MULTI_XPU": "xpu", "MULTI_HPU": "hpu"}.get(name)
            return mapped({"cluster.device": device}) if device else same("copies on all devices")
        case "FSDP":
            return (
                same("its settings say how")
                if config.below("fsdp_config")
                else mapped({"parallel.zero": 3})
            )
        case "DEEPSPEED":
            return same("its settings say how")
        case "NO":
            return same("one process")
    return rejected(
        f"={entry.value!r} is not there. Give the degrees, such as parallel.tp=..., and leave it "
        "out with --without distributed_type."
    )


def _ids(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if str(entry.value) == "all":
        return same("all")
    return none("a run takes the first cluster.devices of a node; CUDA_VISIBLE_DEVICES says others")


_DEEPSPEED: Rows = {
    "zero_stage": choose(
        {
            stage: mapped({"parallel.zero": int(stage)} if int(stage) else {"parallel.dp_shard": 1})
            for stage in (0, 1, 2, 3, "0", "1", "2", "3")
        }
    ),
    "gradient_accumulation_steps": auto(
        to("accumulation_steps", convert=int), "optim.global_batch", "optim.micro_batch"
    ),
    "gradient_clipping": auto(
        to("optim.grad_clip", convert=lambda value: float(value) or None), "optim.grad_clip"
    ),
    "offload_optimizer_device": choose(
        {
            "cpu": mapped({"offload_optimizer": True}),
            "none": same("off", offload_optimizer=False),
            "nvme": rejected(
                "=nvme: offload to NVMe is not supported. Give memory.offload=optimizer, or none.",
                "memory.offload",
            ),
        }
    ),
    "offload_param_device": choose(
        {
            "cpu": mapped({"offload_params": True}),
            "none": same("off", offload_params=False),
            "nvme": rejected(
                "=nvme: offload to NVMe is not supported. Give memory.offload=params, or none.",
                "memory.offload",
            ),
        }
    ),
    "offload_*_nvme_path": nowhere("offload to NVMe is not supported"),
    "zero3_init_flag": nowhere("models are always built without their parameters"),
    "zero3_save_16bit_model": nowhere("`shardyard export` writes weights"),
    "deepspeed_config_file": nowhere("names a DeepSpeed file"),
    "deepspeed_hostfile": nowhere(_MEET),
    "deepspeed_multinode_launcher": nowhere("launchers are Slurm, Kubernetes and AWS Batch"),
    "deepspeed_exclusion_filter": nowhere("launch.slurm.options={exclude: ...} says it"),
    "deepspeed_inclusion_filter": nowhere("launch.slurm.options={nodelist: ...} says it"),
    "deepspeed_moe_layer_cls_names": nowhere("experts are known from the model's family"),
}

_MEGATRON: Rows = {
    "megatron_lm_tp_degree": to("parallel.tp", convert=int),
    "megatron_lm_pp_degree": to("parallel.pp", convert=int),
    "megatron_lm_context_parallel_size": to("parallel.cp", convert=int),
    "megatron_lm_expert_model_parallel_size": to("parallel.ep", convert=int),
    "megatron_lm_gradient_clipping": to(
        "optim.grad_clip", convert=lambda value: float(value) or None
    ),
    "megatron_lm_sequence_parallelism": nowhere("tp ranks always split the tokens between them"),
    "megatron_lm_recompute_activations": switch(
        mapped({"memory.recompute": "selective"}), mapped({"memory.recompute": "none"})
    ),
    "megatron_lm_recompute_granularity": to("memory.recompute"),
    "megatron_lm_use_distributed_optimizer": switch(
        mapped({"parallel.zero": 1}), mapped({"parallel.dp_shard": 1})
    ),
    "megatron_lm_num_micro_batches": to("accumulation_steps", convert=int),
    "megatron_lm_hidden_dropout": to("model.dropout", convert=float),
}


def _only(kind: str, rows: Rows) -> Rows:
    """Return the rows of a part that accelerate reads only with one distributed_type."""

    def guarded(rule: Rule) -> Rule:
        def guard(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
            asked = str(config.whole().get("distributed_type", kind)).upper()
            return rule(entry, config) if asked == kind else none(f"read only with {kind}")

        return guard

    return {pattern: guarded(rule) for pattern, rule in rows.items()}


ROWS: Rows = {
    "compute_environment": choose(
        {
            "local_machine": same("LOCAL_MACHINE"),
            "amazon_sagemaker": rejected(
                "=AMAZON_SAGEMAKER: jobs go to Slurm, Kubernetes or AWS Batch. Leave it out with "
                "--without, and its other keys."
            ),
        }
    ),
    "distributed_type": _distributed_type,
    "num_processes": to("processes", convert=int),
    "num_machines": to("cluster.nodes", convert=int),
    "machine_rank": nowhere("each node knows its place"),
    "mixed_precision": choose(
        {
            "no": mapped({"bf16": False, "fp16": False}),
            "bf16": mapped({"bf16": True, "fp16": False}),
            "fp16": mapped({"bf16": False, "fp16": True}),
            "fp8": mapped({"precision.compute": "fp8"}),
            False: mapped({"bf16": False, "fp16": False}),
            None: same("not said"),
        }
    ),
    "fp16": switch(mapped({"fp16": True}), same("off", fp16=False)),
    "use_cpu": switch(mapped({"cluster.device": "cpu"}), same("off")),
    "gpu_ids": _ids,
    "main_process_ip": nowhere(_MEET),
    "main_process_port": nowhere(_MEET),
    "rdzv_backend": nowhere(_MEET),
    "rdzv_conf*": nowhere(_MEET),
    "max_restarts": to("elastic.max_restarts", convert=int),
    "monitor_interval": nowhere("elastic.* says how soon a loss is noticed"),
    "role": nowhere("there is one role"),
    "tee": nowhere("each rank has a log"),
    "log_dir": nowhere("each rank has a log in the run's folder"),
    "same_network": nowhere(_MEET),
    "main_training_function": nowhere("of notebooks"),
    "enable_cpu_affinity": nowhere("processes are not bound to cores"),
    "num_cpu_threads_per_process": nowhere("launch.env.OMP_NUM_THREADS says it"),
    "debug": nowhere("elastic.check_bits_every compares what ranks compute"),
    "downcast_bf16": nowhere(_TPU),
    "tpu*": nowhere(_TPU),
    "command_file": nowhere(_TPU),
    "commands*": nowhere(_TPU),
    "ipex_config*": nowhere("of a library that is not used"),
    "mpirun_config*": nowhere(_MEET),
    "mps*": nowhere("cluster.device says it"),
    "use_mps_device": nowhere("cluster.device says it"),
    "dynamo_config": choose({None: same("off")}, same("off")),
    "dynamo_config.dynamo_backend": switch(mapped({"model.compile": True}), same("off")),
    "dynamo_config.*": nowhere("compiled by torch's default"),
    "dynamo_backend": choose(
        {"no": same("off"), "inductor": mapped({"model.compile": True}), False: same("off")}
    ),
    "fp8_config.*": nowhere("precision.compute=fp8 and precision.fp8_scaling say it"),
    "fp8_config": choose({}, same("none")),
    "megatron_lm_config": choose({}, same("none")),
    **under("megatron_lm_config", _only("MEGATRON_LM", _MEGATRON)),
    "deepspeed_config": choose({}, same("none")),
    **under("deepspeed_config", _only("DEEPSPEED", _DEEPSPEED)),
    "fsdp_config": choose({}, same("none")),
    **under("fsdp_config", _only("FSDP", fsdp.ROWS)),
    "parallelism_config": choose({}, same("none")),
    **under("parallelism_config", fsdp.PARALLELISM),
    "fsdp": reject_if_on("is not a key of accelerate. See fsdp_config."),
}


def _dynamo(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if str(entry.value).lower() in ("no", "false", "none", ""):
        return same("off")
    return mapped({"model.compile": True})


_SWITCH = "switches on what other options say"

LINE: Rows = {
    **{name: rule for name, rule in ROWS.items() if "." not in name},
    **_DEEPSPEED,
    **fsdp.ROWS,
    **_MEGATRON,
    **fsdp.PARALLELISM,
    "config_file": nowhere("names a file of accelerate"),
    "dynamo_backend": _dynamo,
    "dynamo_*": nowhere("compiled by torch's default"),
    "use_deepspeed": nowhere(_SWITCH),
    "use_fsdp": nowhere(_SWITCH),
    "use_megatron_lm": nowhere(_SWITCH),
    "use_parallelism_config": nowhere(_SWITCH),
    "multi_gpu": nowhere(_SWITCH),
    "module": nowhere("says how the script is started"),
    "no_python": nowhere("says how the script is started"),
    "quiet": nowhere("says what is printed"),
    "cpu": switch(mapped({"cluster.device": "cpu"}), same("off")),
    "gradient_accumulation_steps": to("accumulation_steps", convert=int),
    "gradient_clipping": to("optim.grad_clip", convert=float),
}
"""Options of ``accelerate launch``, by their names with underscores."""

ROWS = {**ROWS, "dynamo_config.dynamo_backend": _dynamo, "dynamo_backend": _dynamo}


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return accelerate's behaviour where a file has no value."""
    values: dict[str, Any] = {}
    if config.get("num_machines") is None:
        values["cluster.nodes"] = 1
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind == "NO":
        values["processes"] = 1
    if kind != "DEEPSPEED":
        values |= {"bf16": False, "fp16": False}
    if kind == "NO" or kind.startswith("MULTI_"):
        values["parallel.dp_shard"] = 1
    return values

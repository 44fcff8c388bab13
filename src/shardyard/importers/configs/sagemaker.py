"""Parameters of SageMaker's model parallel library, versions 1 and 2: what they become.

Source: Amazon SageMaker AI developer guide, "The SageMaker model parallel library v2 reference";
the page on ``distribution`` of the SageMaker Python SDK for version 1.
"""

from shardyard.importers.configs.rules import (
    ConfigEntry,
    Rows,
    RuleResult,
    SourceConfig,
    choose,
    mapped,
    none,
    nowhere,
    rejected,
    same,
    switch,
    to,
    under,
)

MARKS = {
    "hybrid_shard_degree",
    "sm_activation_offloading",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "sharded_data_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "activation_loading_horizon",
    "partitions",
}
"""Parameters of which such a file has at least one."""

_PLACED = "ranks of tp are neighbours, then cp, dp_shard and pp (internals/parallel.md)"
_STAGES = "stages are cut by their cost"


def _hybrid(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """0: as the script says, or the largest degree that there is."""
    if entry.value == 0:
        return same("as many ranks as there are")
    return mapped({"parallel.zero": 3, "parallel.dp_shard": int(entry.value)})


def _sharded(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if entry.value in (0, 1):
        return same("off")
    return mapped({"parallel.zero": 3, "parallel.dp_shard": int(entry.value)})


def _schedule(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    if entry.value == "simple":
        return mapped({"parallel.schedule": "gpipe"})
    if entry.value == "interleaved":
        return same("forward and backward passes alternate: 1f1b")
    return rejected(f"={entry.value!r}: give parallel.schedule.", "parallel.schedule")


def _optimizer_state(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if not entry.value:
        return same("see the sharding of parameters")
    if config.get("sharded_data_parallel_degree", 0) > 1:
        return none("sharded_data_parallel_degree shards more")
    return mapped({"parallel.zero": 1})


_OFFLOAD = switch(mapped({"memory.offload": "activations"}), same("off"))

_PARAMETERS: Rows = {
    "hybrid_shard_degree": _hybrid,
    "sm_activation_offloading": _OFFLOAD,
    "offload_activations": _OFFLOAD,
    "activation_loading_horizon": to("memory.offload_depth", convert=int),
    "fsdp_cache_flush_warnings": nowhere("out-of-memory errors are reported as such"),
    "allow_empty_shards": nowhere("parameters of any size are split"),
    "tensor_parallel_degree": to("parallel.tp", convert=int),
    "context_parallel_degree": to("parallel.cp", convert=int),
    "expert_parallel_degree": to("parallel.ep", convert=int),
    "pipeline_parallel_degree": to("parallel.pp", convert=int),
    "partitions": to("parallel.pp", convert=int),
    "random_seed": to("run.seed", convert=int),
    "moe_*": nowhere("experts are known from the model's family"),
    "microbatches": nowhere(
        "cuts the batch that the script reads, which is not here: give optim.global_batch and "
        "optim.micro_batch"
    ),
    "active_microbatches": nowhere("parallel.schedule says how many are under way"),
    "pipeline": _schedule,
    "optimize": nowhere("tp ranks always split the tokens between them"),
    "placement_strategy": nowhere(_PLACED),
    "auto_partition": nowhere(_STAGES),
    "default_partition": nowhere(_STAGES),
    "memory_weight": nowhere(_STAGES),
    "contiguous": nowhere(_STAGES),
    "deterministic_server": nowhere("all ranks take the same order"),
    "skip_tracing": nowhere("tracing is off"),
    "ddp": nowhere("ranks that the other degrees leave are data-parallel"),
    "ddp_*": nowhere("of torch's DDP wrapper, which is not used"),
    "horovod": nowhere("of Horovod, which is not used"),
    "prescaled_batch": nowhere("tp ranks read the same samples"),
    "fp16": switch(mapped({"fp16": True}), same("off", fp16=False)),
    "bf16": switch(mapped({"bf16": True}), same("off", bf16=False)),
    "fp16_params": switch(mapped({"fp16": True}), same("off", fp16=False)),
    "shard_optimizer_state": _optimizer_state,
    "sharded_data_parallel_degree": _sharded,
    "sdp_gradient_clipping": to("optim.grad_clip", convert=lambda value: float(value) or None),
    "sdp_*": nowhere("what is sent at once follows from the blocks of the model"),
    "delayed_parameter_initialization": nowhere("models are built without their parameters"),
    "delayed_param_initialization": nowhere("models are built without their parameters"),
}

_JOB: Rows = {
    "mpi.enabled": nowhere("processes are not started by MPI"),
    "mpi.processes_per_host": to("cluster.devices", convert=int),
    "mpi.custom_mpi_options": nowhere("processes are not started by MPI"),
    "torch_distributed.enabled": nowhere("a launch starts a process per device"),
    "smdistributed.modelparallel.enabled": choose({True: same("on")}),
    "smdistributed.dataparallel.*": nowhere("NCCL sums gradients"),
}

ROWS: Rows = {
    **_PARAMETERS,
    "enabled": choose({True: same("on")}),
    **under("parameters", _PARAMETERS),
    **_JOB,
    **under("smdistributed.modelparallel.parameters", _PARAMETERS),
    "instance_type": lambda entry, _: mapped(
        {"cluster.instance": str(entry.value).removeprefix("ml.")}
    ),
    "instance_count": to("cluster.nodes", convert=int),
    **{f"distribution.{name}": rule for name, rule in _JOB.items()},
    **under("distribution.smdistributed.modelparallel.parameters", _PARAMETERS),
}

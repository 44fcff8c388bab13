"""FSDP's settings as accelerate and the Trainer spell them, versions 1 and 2.

Source: ``FullyShardedDataParallelPlugin`` and ``ParallelismConfig`` of accelerate 1.15,
``_process_fsdp_args`` of transformers 5. accelerate's own ``to-fsdp2`` leaves out or lets through
keys of version 1; here each has an outcome.
"""

from typing import Any

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
    rejected,
    same,
    switch,
    to,
)

BLOCKS = "blocks are known from the model's family, and each is sharded by itself (model.blocks)"

_STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {"parallel.zero": 3},
    "shard_grad_op": {"parallel.zero": 2},
    "no_shard": {"parallel.dp_shard": 1},
    "hybrid_shard": {"parallel.strategy": "HYBRID_SHARD"},
    "1": {"parallel.zero": 3},
    "2": {"parallel.zero": 2},
    "3": {"parallel.dp_shard": 1},
    "4": {"parallel.strategy": "HYBRID_SHARD"},
    "true": {"parallel.zero": 3},
    "false": {"parallel.zero": 2},
}
"""Name or number of a strategy of FSDP1, or FSDP2's reshard_after_forward -> settings."""


def _strategy(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    name = str(entry.value).lower()
    if name in ("hybrid_shard_zero2", "_hybrid_shard_zero2", "5"):
        return rejected(
            f"={entry.value}: give parallel.zero=2 and parallel.dp_shard=DEVICES_OF_A_NODE.",
            "parallel.zero",
            "parallel.dp_shard",
        )
    if name not in _STRATEGIES:
        return rejected(
            f"={entry.value!r} is not a strategy of FSDP. Give parallel.zero=2 or 3.",
            "parallel.zero",
        )
    return mapped(_STRATEGIES[name])


def _reshard(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Return the verdict; version 1 reads fsdp_sharding_strategy if that is there too."""
    old = any(config.get(name) is not None for name in _OLD)
    if old and str(entry.value).lower() in ("true", "false") and not _is_second(config):
        return none("read by version 2; the strategy of version 1 says it")
    return _strategy(entry, config)


_OLD = ("fsdp_sharding_strategy", "sharding_strategy")


def _is_second(config: SourceConfig) -> bool:
    return str(config.get("fsdp_version", config.get("version", "1"))) == "2"


def _old_strategy(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if _is_second(config) and config.get("fsdp_reshard_after_forward") is not None:
        return none("of version 1; fsdp_reshard_after_forward says it in version 2")
    return _strategy(entry, config)


_RAM = (
    "each rank reads its own part of the weights from their files, without loading twice or "
    "sending from rank 0"
)

_PLAIN: dict[str, Any] = {
    "version": choose(
        {
            "1": none("FSDP2 does what version 1 asks"),
            "2": same("FSDP2"),
            1: none("FSDP2 does what version 1 asks"),
            2: same("FSDP2"),
        }
    ),
    "sharding_strategy": _old_strategy,
    "reshard_after_forward": _reshard,
    "offload_params": switch(mapped({"offload_params": True}), same("off", offload_params=False)),
    "cpu_offload": switch(mapped({"offload_params": True}), same("off", offload_params=False)),
    "auto_wrap_policy": choose(
        {"transformer_based_wrap": same(BLOCKS)},
        none(BLOCKS),
    ),
    "transformer_layer_cls_to_wrap*": nowhere(BLOCKS),
    "transformer_cls_names_to_wrap*": nowhere(BLOCKS),
    "min_num_params": nowhere(BLOCKS),
    "backward_prefetch": nowhere("parallel.prefetch blocks are gathered ahead, in both directions"),
    "backward_prefetch_policy": nowhere("parallel.prefetch blocks are gathered ahead"),
    "forward_prefetch": nowhere("parallel.prefetch blocks are gathered ahead, in both directions"),
    "use_orig_params": nowhere("parameters always keep their own shape and name"),
    "sync_module_states": nowhere(_RAM),
    "cpu_ram_efficient_loading": nowhere(_RAM),
    "state_dict_type": nowhere("checkpoints are sharded, and load on any number of devices"),
    "limit_all_gathers": nowhere("gathered blocks are always limited (parallel.prefetch)"),
    "activation_checkpointing": switch(
        mapped({"memory.recompute": "full"}), mapped({"memory.recompute": "none"})
    ),
    "activation_checkpointing_offload": switch(
        mapped({"memory.offload": "activations"}), same("off")
    ),
    "ignored_modules": nowhere("model.frozen says what is not trained; all of it is sharded"),
    "mixed_precision_policy*": nowhere("precision.* says it"),
    "xla": reject_if_on("XLA devices are not trained on. Leave it out with --without."),
    "xla_*": nowhere("of XLA devices"),
    "enable_fp8*": nowhere("precision.compute=fp8 says it"),
}

ROWS: Rows = {**_PLAIN, **{f"fsdp_{name}": rule for name, rule in _PLAIN.items()}}
"""Keys with the prefix that accelerate writes, and without it."""

PARALLELISM: Rows = {
    f"{prefix}{name}": rule
    for prefix in ("", "parallelism_config_")
    for name, rule in {
        "dp_replicate_size": to("parallel.dp_replicate", convert=int),
        "dp_shard_size": to("parallel.dp_shard", convert=int),
        "tp_size": to("parallel.tp", convert=int),
        "cp_size": to("parallel.cp", convert=int),
        "sp_size": to("parallel.cp", convert=int),
        "cp_comm_strategy": nowhere("parallel.cp_exchange says what is exchanged"),
        "cp_backend": nowhere("parallel.cp_exchange says what is exchanged"),
        "sp_*": nowhere("of DeepSpeed's sequence parallelism; parallel.cp_exchange=heads is its"),
        "tp_*": nowhere("the family of the model says how matrices are split"),
        "cp_*": nowhere("parallel.cp_exchange says what is exchanged"),
    }.items()
}
"""accelerate's ParallelismConfig."""


def legacy(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """The Trainer's ``fsdp``: a switch, or words such as ``full_shard auto_wrap offload``."""
    if entry.value in OFF or entry.value in ([], {}):
        return same("off")
    if entry.value in (True, "true", "True"):
        return (
            mapped({"parallel.zero": 3}) if not _has_strategy(config) else same("see fsdp_config")
        )
    words = entry.value if isinstance(entry.value, list) else str(entry.value).split()
    values: dict[str, Any] = {}
    for word in words:
        match str(word).lower():
            case "auto_wrap":
                continue
            case "offload":
                values["offload_params"] = True
            case name if name in _STRATEGIES:
                values |= _STRATEGIES[name]
            case name:
                return rejected(
                    f"={name!r} is not a known option of FSDP. Give parallel.zero=...",
                    "parallel.zero",
                )
    return mapped(values) if values else same(BLOCKS)


def _has_strategy(config: SourceConfig) -> bool:
    names = ("reshard_after_forward", "sharding_strategy")
    return any(
        config.get(f"fsdp_config.{prefix}{name}") is not None
        for prefix in ("", "fsdp_")
        for name in names
    )

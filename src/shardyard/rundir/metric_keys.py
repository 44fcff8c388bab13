"""Names in a step's line of metrics.jsonl."""

EXPERT_LOAD = "expert_load"
ROUTER_KEYS = (EXPERT_LOAD, "router_aux_loss", "router_z_loss")
"""Visits of the busiest expert of any block as a multiple of the mean, and the two losses before
their weights; null for a model without experts."""

METRIC_KEYS = (
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "loss_scale",
    "lr",
    "tokens",
    "targets",
    "samples",
    "step_time_s",
    "data_wait_s",
    "checkpoint_blocked_s",
    "tokens_per_s",
    "samples_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_memory_bytes",
    *ROUTER_KEYS,
    "attempt",
    "generation",
    "world_size",
    "phase",
)
"""Keys of a step's line, all present; null where one has no meaning."""

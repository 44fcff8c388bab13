"""Arguments of a Megatron checkpoint, compared with the model that its weights become.

An argument that changes what a weight means has a row in ``_MEANING``, and has to agree with the
model of ``--like``. One that cannot change it is in ``_HARMLESS``. Any other that is switched on is
rejected by name: a weight that is read with another meaning looks sound, and its model is another.

Source: ``megatron/training/arguments.py`` of Megatron-LM (core 0.14 and before), and the fields of
``TransformerConfig`` of megatron-core 0.16, which NeMo writes.
"""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from shardyard.families.family import ModuleSpec
from shardyard.families.shape import ModelShape

Args = Mapping[str, Any]
_Rule = Callable[[Any, Args, ModelShape], bool]
"""Whether a value agrees with the model; it is given all arguments, too."""


def differences(
    args: Args, shape: ModelShape, *, without: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Return the arguments that the model contradicts and the unknown ones, as ``name=value``.

    Args:
        without: Names, or patterns of names, to ignore.
    """
    left = {
        name: value
        for name, value in args.items()
        if not any(fnmatchcase(name, pattern) for pattern in without)
    }
    wrong = [
        f"{name}={value!r}"
        for name, value in left.items()
        if name in _MEANING and not _agrees(name, value, args, shape)
    ]
    unknown = [
        f"{name}={_short(value)}"
        for name, value in left.items()
        if name not in _MEANING and not _is_off(value) and not _is_harmless(name)
    ]
    return sorted(wrong), sorted(unknown)


def _agrees(name: str, value: Any, args: Args, shape: ModelShape) -> bool:
    try:
        return _MEANING[name](value, args, shape)
    except (TypeError, ValueError):  # a value of another type than Megatron writes
        return False


def _is_off(value: Any) -> bool:
    """Return whether a value is empty, zero or false."""
    is_plain = isinstance(value, bool | int | float | str | list | dict | tuple)
    return value is None or (is_plain and not value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith(_HARMLESS_BEGINNINGS)


# --- rules ----------------------------------------------------------------------------------------


def _off(value: Any, _args: Args, _shape: ModelShape) -> bool:
    return _is_off(value)


def _on(value: Any, _args: Args, _shape: ModelShape) -> bool:
    return value is True


def _one_of(*words: Any) -> _Rule:
    return lambda value, _args, _shape: value in words


def _is(size: Callable[[ModelShape], float]) -> _Rule:
    """A number of the model; None: Megatron works it out of others."""
    return lambda value, _args, shape: value is None or _same(value, size(shape))


def _is_switch(of: Callable[[ModelShape], bool]) -> _Rule:
    return lambda value, _args, shape: bool(value) == of(shape)


def _same(value: Any, other: float) -> bool:
    return math.isclose(float(value), float(other), rel_tol=1e-6)


def _groups(value: Any, args: Args, shape: ModelShape) -> bool:
    """Groups count only where attention is grouped; else each head has a key of its own."""
    is_grouped = bool(args.get("group_query_attention", True))
    return value is None or not is_grouped or _same(value, shape.num_key_value_heads)


def _grouped(value: Any, _args: Args, shape: ModelShape) -> bool:
    return bool(value) or shape.num_key_value_heads == shape.num_attention_heads


def _vocabulary(value: Any, _args: Args, shape: ModelShape) -> bool:
    """Rows behind the model's vocabulary are let go of as padding: none of them may be a token."""
    return value is None or int(value) <= shape.vocab_size


def _padded_vocabulary(value: Any, _args: Args, shape: ModelShape) -> bool:
    return value is None or int(value) >= shape.vocab_size


def _position_kind(value: Any, args: Args, _shape: ModelShape) -> bool:
    return value == "rope" or bool(args.get("use_rotary_position_embeddings"))


def _llama3_scaling(value: Any, args: Args, shape: ModelShape) -> bool:
    """Megatron's own constants of Llama 3.1; its factor is an argument of its own."""
    scaling = shape.rope_scaling or {}
    if not value:
        return not scaling
    known = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    is_same = all(scaling.get(key) == each for key, each in known.items())
    return is_same and _same(args.get("rope_scaling_factor", 8.0), scaling.get("factor", 0))


def _stretched(value: Any, _args: Args, shape: ModelShape) -> bool:
    """Positions are divided by it."""
    if value in (None, 1):
        return (shape.rope_scaling or {}).get("rope_type") != "linear"
    scaling = shape.rope_scaling or {}
    return scaling.get("rope_type") == "linear" and _same(value, scaling.get("factor", 0))


def _window(value: Any, args: Args, shape: ModelShape) -> bool:
    """Tokens to the left and right of one that it sees; the model counts it itself, too."""
    if value is None:
        return shape.sliding_window is None
    left, right = value
    is_alike = shape.layer_types is None and not args.get("window_attn_skip_freq")
    return is_alike and int(right) in (0, -1) and shape.sliding_window == int(left) + 1


def _score_scale(value: Any, _args: Args, shape: ModelShape) -> bool:
    width = shape.query_pre_attn_scalar or shape.head_width
    scale = width**-0.5 if shape.attention_multiplier is None else shape.attention_multiplier
    return value is None or _same(value, scale)


def _has_query_bias(shape: ModelShape) -> bool:
    row = _row(shape, "self_attn.q_proj")
    return row is not None and row.bias is not None and row.bias(shape)


def _has_output_bias(shape: ModelShape) -> bool:
    """Megatron's add_bias_linear gives every matrix of a block a bias."""
    row = _row(shape, "mlp.down_proj")
    return row is not None and row.bias is not None and row.bias(shape)


def _has_query_norm(shape: ModelShape) -> bool:
    return _row(shape, "self_attn.q_norm") is not None


def _row(shape: ModelShape, module: str) -> ModuleSpec | None:
    return next((row for row in shape.family.block if row.module == module), None)


def _is_tied(shape: ModelShape) -> bool:
    return shape.tie_word_embeddings


_MEANING: dict[str, _Rule] = {
    # sizes, of which the cut into heads and ranks follows
    "num_layers": _is(lambda shape: shape.num_hidden_layers),
    "encoder_num_layers": _is(lambda shape: shape.num_hidden_layers),
    "decoder_num_layers": _is(lambda shape: shape.num_hidden_layers),
    "hidden_size": _is(lambda shape: shape.hidden_size),
    "ffn_hidden_size": _is(lambda shape: shape.intermediate_size),
    "num_attention_heads": _is(lambda shape: shape.num_attention_heads),
    "kv_channels": _is(lambda shape: shape.head_width),
    "group_query_attention": _grouped,
    "num_query_groups": _groups,
    "vocab_size": _vocabulary,
    "padded_vocab_size": _padded_vocabulary,
    "untie_embeddings_and_output_weights": _is_switch(lambda shape: not _is_tied(shape)),
    "share_embeddings_and_output_weights": _is_switch(_is_tied),
    # norms
    "normalization": _one_of("RMSNorm"),
    "norm_epsilon": _is(lambda shape: shape.rms_norm_eps),
    "layernorm_epsilon": _is(lambda shape: shape.rms_norm_eps),
    "apply_layernorm_1p": _off,
    "layernorm_zero_centered_gamma": _off,
    "apply_residual_connection_post_layernorm": _off,
    "qk_layernorm": _is_switch(_has_query_norm),
    "qk_l2_norm": _off,
    # the MLP
    "swiglu": _on,
    "gated_linear_unit": _on,
    "openai_gelu": _off,
    "squared_relu": _off,
    "quick_geglu": _off,
    "geglu": _off,
    "reglu": _off,
    "liglu": _off,
    "glu_activation": _one_of(None, "swiglu"),
    "glu_linear_offset": _off,
    "activation_func_clamp_value": _off,
    # biases
    "add_bias_linear": _is_switch(_has_output_bias),
    "add_qkv_bias": _is_switch(_has_query_bias),
    # positions
    "position_embedding_type": _position_kind,
    "rotary_base": _is(lambda shape: shape.rope_theta),
    "rotary_percent": _is(lambda shape: shape.partial_rotary_factor),
    "rotary_interleaved": _off,
    "rotary_seq_len_interpolation_factor": _stretched,
    "seq_len_interpolation_factor": _stretched,
    "use_rope_scaling": _llama3_scaling,
    "rope_type": _one_of(None, "rope"),
    "no_rope_freq": _off,
    "mrope_section": _off,
    # attention
    "softmax_type": _one_of(None, "vanilla"),
    "softmax_scale": _score_scale,
    "window_size": _window,
    "window_attn_skip_freq": _off,
    "attention_output_gate": _off,
    "multi_latent_attention": _off,
    "experimental_attention_variant": _off,
    "linear_attention_type": _off,
    "linear_attention_freq": _off,
    # other models altogether
    "num_experts": _off,
    "num_moe_experts": _off,
    "mtp_num_layers": _off,
    "is_hybrid_model": _off,
    "hybrid_attention_ratio": _off,
    "hybrid_mlp_ratio": _off,
    "hybrid_override_pattern": _off,
    "heterogeneous_layers_config_path": _off,
    "heterogeneous_layers_config_encoded_json": _off,
    "heterogeneous_block_specs": _off,
    "retro_add_retriever": _off,
    "spec": _one_of(None, ["local"], "local"),
    "virtual_pipeline_model_parallel_size": _off,
    "num_layers_per_virtual_pipeline_stage": _off,
    "num_virtual_stages_per_pipeline_rank": _off,
}  # fmt: skip

_HARMLESS_BEGINNINGS = (
    # training, and what it writes
    "adam_", "adlr_", "app_tag_", "async_", "barrier_", "batch_", "calc_", "check_", "ckpt_",
    "clip_", "config_logger", "cross_entropy_", "cuda_graph_", "data_", "dataloader_", "ddp_",
    "decoupled_", "dist_ckpt_", "distrib_optim_", "distributed_", "emerging_optimizer_",
    "end_weight_", "error_injection_", "eval_", "exit_", "exp_avg_", "external_cuda_", "fsdp_",
    "global_batch_", "grad_", "gradient_", "grpo_", "high_priority_", "inference_",
    "init_method_", "initial_loss_", "inprocess_", "iteration", "langrl_", "load", "log_",
    "logging_", "loss_scale", "lr", "main_", "manual_gc", "memory_", "micro_batch_",
    "microbatch_", "min_l", "muon_", "nccl_", "no_load_", "no_save_", "non_persistent_",
    "one_logger_", "optimizer", "overlap_", "override_opt_", "param", "perform_",
    "phase_transition_", "pin_cpu_", "profile", "recompute_", "replication", "rerun_",
    "result_rejected_", "rl_", "save", "sft", "sgd_", "sharp_", "start_weight_", "straggler",
    "strict_", "tensorboard_", "timing_", "tp_comm_", "train_", "use_checkpoint_", "use_dist",
    "use_mp_args_", "wandb_", "weight_decay", "wgrad_",
    # text, and how it is read
    "create_attention_mask", "mask_", "mid_level_", "multiple_validation_", "num_dataset_",
    "object_storage_", "per_split_", "reset_", "test_", "tiktoken_", "tokenizer_", "valid_",
    # ranks
    "account_for_", "context_parallel_", "cp_", "data_parallel_", "decoder_first_",
    "decoder_last_", "expert_model_", "expert_tensor_", "hierarchical_", "hybrid_context_",
    "pipeline_", "pipeline_model_parallel_", "rank", "tensor_model_parallel_",
    # numbers in which is computed
    "bf16", "cpu_offloading", "fine_grained_", "first_last_layers_", "fp16", "fp32", "fp4",
    "fp8", "kitchen_", "num_layers_at_", "offload_", "te_",
    # of models that a row above rejects
    "bert_", "beta_", "biencoder_", "dino_", "dsa_", "ict_", "img_", "indexer_", "linear_",
    "mamba_", "moe_", "mscale", "mtp_", "original_max_position_", "retriever_", "retro_",
    "swin_", "vision_", "yarn_",
)  # fmt: skip
"""First parts of names of arguments that change no weight's meaning."""

_HARMLESS_NAMES = """
    accumulate_allreduce_grads_in_fp32 add_position_embedding align_grad_reduce
    align_param_gather allow_ambiguous_pad_tokens apply_query_key_layer_scaling
    apply_rope_fusion attention_backend attention_dropout attention_softmax_in_fp32
    auto_detect_ckpt_format batch_invariant_mode bias_activation_fusion bias_dropout_fusion
    bias_gelu_fusion bias_swiglu_fusion block_data_path cache_mla_latents
    calculate_per_token_loss classes_fraction clone_scatter_output_in_embedding
    consumed_train_samples consumed_valid_samples decode_only_cuda_graphs decoder_seq_length
    decrease_batch_size_if_needed defer_embedding_wgrad_compute delay_wgrad_compute
    deprecated_use_mcore_models deterministic_mode disable_bf16_reduced_precision_matmul
    disable_chunked_prefill disable_mamba_mem_eff_path disable_parameter_transpose_cache
    disable_straggler_on_startup disable_symmetric_registration distribute_saved_activations
    do_test do_train do_valid dump_param_to_param_group_map dynamic_loss_scale
    embedding_init_method_std embedding_path empty_unused_memory_level enable_cuda_graph
    enable_experimental enable_ft_package enable_full_sharding_in_hsdp
    enable_gloo_process_groups enable_msc enable_one_logger encoder_seq_length eod_mask_loss
    ep_overlap_early_attn_memory_release evidence_data_path finetune flash_decode
    full_validation head_lr_mult hidden_dropout hysteresis init_model_with_meta_device
    inner_iteration iter_per_epoch keep_fp8_transpose_cache kv_lora_rank lazy_mpu_init
    legacy_tokenizer local_rank make_vocab_size_divisible_by masked_softmax_fusion
    max_position_embeddings max_seqlen_per_dp_cp_rank max_tokens_to_oom
    memory_efficient_layer_norm merge_file min_offloaded_tensor_size mlp_chunks_for_prefill
    mmap_bin_files mock_data model_parallel_size model_type no_persist_layer_norm num_channels
    num_classes num_distributed_optimizer_instances num_workers onnx_safe output_bert_embeddings
    padding patch_dim persist_layer_norm pretrained_checkpoint q_lora_rank qk_clip qk_clip_alpha
    qk_clip_threshold qk_head_dim qk_pos_emb_head_dim query_in_block_prob rampup_batch_size
    record_memory_history relative_attention_max_distance relative_attention_num_buckets
    reuse_grad_buf_for_mxfp8_param_ag rope_scaling_factor rotary_scaling_factor
    run_workload_inspector_server sample_rate scatter_gather_tensors_in_pipeline seed seq_length
    sequence_parallel short_seq_prob skip_train skipped_train_samples split
    standalone_embedding_stage suggested_communication_unit_size symmetric_ar_type
    titles_data_path torch_fsdp2_reshard_after_forward transformer_impl
    transformer_pipeline_model_parallel_size trust_remote_code use_cpu_initialization
    use_flash_attn use_fused_weighted_squared_relu use_inference_optimized_layers
    use_legacy_models use_legacy_static_engine use_mamba_mem_eff_path use_mcore_models
    use_megatron_fsdp use_nccl_ub use_one_sent_docs use_persistent_ckpt_worker
    use_precision_aware_optimizer use_pytorch_profiler use_ring_exchange_p2p
    use_rotary_position_embeddings use_sharp use_te_activation_func use_te_rng_tracker
    use_tokenizer_model_from_checkpoint_args use_torch_fsdp2 use_torch_optimizer_for_cpu_offload
    use_tp_pp_dp_mapping v_head_dim variable_seq_lengths vocab_extra_ids vocab_file warmup
    world_size yaml_cfg
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Arguments that change no weight's meaning, or count only with one that a row above rejects."""

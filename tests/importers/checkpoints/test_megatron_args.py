"""Arguments of a Megatron checkpoint decide what its weights mean, or change nothing."""

from typing import Any

import pytest

from shardyard.families.shape import ModelShape
from shardyard.importers.checkpoints.megatron_args import differences

SHAPE = ModelShape(
    model_type="llama", vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip

SAVED: dict[str, Any] = {
    # what Megatron-LM core 0.14 saves of such a Llama, from its parser's defaults
    "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": None, "hidden_size": 64,
    "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16,
    "group_query_attention": True, "num_query_groups": 2, "softmax_type": "vanilla",
    "window_size": None, "window_attn_skip_freq": None, "max_position_embeddings": 128,
    "position_embedding_type": "rope", "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "use_rotary_position_embeddings": False,
    "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "no_rope_freq": None, "add_position_embedding": True,
    "mrope_section": None, "make_vocab_size_divisible_by": 128, "normalization": "RMSNorm",
    "norm_epsilon": 1e-5, "apply_layernorm_1p": False, "squared_relu": False, "swiglu": True,
    "apply_residual_connection_post_layernorm": False, "openai_gelu": False, "quick_geglu": False,
    "glu_linear_offset": 0.0, "bert_binary_head": True, "multi_latent_attention": False,
    "untie_embeddings_and_output_weights": True, "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1, "straggler_ctrlr_port": 65535, "inprocess_soft_timeout": 60,
    "enable_one_logger": True, "app_tag_run_version": "0.0.0", "timing_log_option": "minmax",
    "tensorboard_queue_size": 1000, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95, "muon_scale_mode": "spectral",
    "rl_sequence_packing_bin_size": 8192, "grpo_group_size": 2, "micro_batch_size": 1,
    "global_batch_size": 256, "check_for_nan_in_loss_and_grad": True, "profile_step_end": 12,
    "profile_ranks": [0], "tp_comm_overlap_ag": True, "tp_comm_bootstrap_backend": "nccl",
    "train_iters": 500, "log_interval": 100, "masked_softmax_fusion": True, "rope_type": None,
    "bias_swiglu_fusion": True, "apply_rope_fusion": True, "cross_entropy_fusion_impl": "native",
    "add_bias_linear": False, "add_qkv_bias": False, "optimizer": "adam", "pin_cpu_grads": True,
    "dataloader_type": "single", "gradient_accumulation_fusion": True, "manual_gc_eval": True,
    "error_injection_type": "transient_error", "rerun_mode": "validate_results", "seed": 1234,
    "init_method_std": 0.02, "lr": 3e-4, "lr_decay_style": "cosine", "min_lr": 3e-5,
    "save": "/checkpoints", "save_interval": 100, "ckpt_format": "torch", "bf16": True,
    "initial_loss_scale": 2**32, "hysteresis": 2, "tensor_model_parallel_size": 2,
    "overlap_p2p_comm": True, "distributed_backend": "nccl", "align_param_gather": True,
    "num_distributed_optimizer_instances": 1, "context_parallel_size": 1, "cp_comm_type": ["p2p"],
    "replication_factor": 2, "eval_iters": 100, "vocab_size": 400, "padded_vocab_size": 512,
    "tokenizer_type": "HuggingFaceTokenizer", "tiktoken_num_special_tokens": 1000,
    "data_path": ["corpus"], "split": "99,1,0", "seq_length": 128, "retriever_seq_length": 256,
    "mask_prob": 0.15, "num_workers": 2, "mid_level_dataset_surplus": 0.005, "num_classes": 1000,
    "img_h": 224, "patch_dim": 16, "vision_backbone_type": "vit", "swin_backbone_type": "tiny",
    "iter_per_epoch": 1250, "dino_head_hidden_size": 2048, "qk_layernorm": False,
    "num_experts": None, "moe_layer_freq": 1, "moe_router_topk": 2, "kv_lora_rank": 32,
    "qk_head_dim": 128, "v_head_dim": 128, "mscale": 1.0, "mamba_state_dim": 128,
    "hybrid_attention_ratio": 0.0, "main_grads_dtype": "fp32", "exp_avg_dtype": "fp32",
    "enable_msc": True, "rank": 0, "world_size": 2, "transformer_impl": "transformer_engine",
    "consumed_train_samples": 1280, "params_dtype": "BF16", "virtual_pipeline_model_parallel_size":
    None, "data_parallel_size": 1, "sft_tokenizer_prompt_format": "nemotron-h-aligned",
    "cuda_graph_scope": "full", "inference_max_seq_length": 2560, "retro_attention_gate": 1,
}  # fmt: skip


def test_arguments_that_agree_with_the_model_are_accepted() -> None:
    assert differences(SAVED, SHAPE) == ([], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_layernorm_1p", True), ("layernorm_zero_centered_gamma", True),
        ("normalization", "LayerNorm"), ("norm_epsilon", 1e-6), ("swiglu", False),
        ("squared_relu", True), ("openai_gelu", True), ("quick_geglu", True),
        ("glu_linear_offset", 1.0), ("add_bias_linear", True), ("add_qkv_bias", True),
        ("position_embedding_type", "learned_absolute"), ("rotary_base", 500000),
        ("rotary_percent", 0.5), ("rotary_interleaved", True), ("rope_type", "yarn"),
        ("rotary_seq_len_interpolation_factor", 4), ("use_rope_scaling", True),
        ("no_rope_freq", 4), ("qk_layernorm", True), ("qk_l2_norm", True),
        ("group_query_attention", False), ("num_query_groups", 4), ("kv_channels", 32),
        ("num_attention_heads", 8), ("num_layers", 4), ("hidden_size", 128),
        ("ffn_hidden_size", 128), ("vocab_size", 401), ("padded_vocab_size", 384),
        ("untie_embeddings_and_output_weights", False), ("window_size", (63, 0)),
        ("softmax_type", "off-by-one"), ("softmax_scale", 1.0), ("num_experts", 8),
        ("multi_latent_attention", True), ("mtp_num_layers", 1), ("is_hybrid_model", True),
        ("apply_residual_connection_post_layernorm", True), ("attention_output_gate", True),
        ("spec", ["megatron.core.models.mamba", "mamba_stack_spec"]), ("kv_channels", "wide"),
    ],
)  # fmt: skip
def test_an_argument_that_gives_weights_another_meaning_is_named(name: str, value: Any) -> None:
    wrong, unknown = differences({**SAVED, name: value}, SHAPE)
    assert wrong == [f"{name}={value!r}"] and not unknown


def test_what_a_model_has_makes_its_own_arguments_right() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    llama31 = ModelShape(**{**SHAPE.to_dict(), "rope_scaling": scaling})
    assert differences({**SAVED, "use_rope_scaling": True}, llama31) == ([], [])
    assert differences(SAVED, llama31)[0] == ["use_rope_scaling=False"]
    qwen2 = ModelShape(**{**SHAPE.to_dict(), "model_type": "qwen2"})
    assert differences({**SAVED, "add_qkv_bias": True}, qwen2) == ([], [])
    qwen3 = ModelShape(**{**SHAPE.to_dict(), "model_type": "qwen3"})
    assert differences({**SAVED, "qk_layernorm": True}, qwen3) == ([], [])
    windowed = ModelShape(**{**SHAPE.to_dict(), "model_type": "mistral", "sliding_window": 64})
    assert differences({**SAVED, "window_size": (63, 0)}, windowed) == ([], [])
    tied = ModelShape(**{**SHAPE.to_dict(), "tie_word_embeddings": True})
    assert differences({**SAVED, "untie_embeddings_and_output_weights": False}, tied) == ([], [])


def test_an_argument_that_is_not_known_is_named_unless_it_is_off() -> None:
    args = {**SAVED, "residual_multiplier": 0.22, "new_norm": False, "other_scale": None}
    assert differences(args, SHAPE) == ([], ["residual_multiplier=0.22"])
    assert differences(args, SHAPE, without=("residual_*",)) == ([], [])

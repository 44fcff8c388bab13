"""What a table row's words mean: number formats, sharding, recompute, and how the step is done.

Rules look at what was run (framework, device, precision, sharding, the words of the notes), never
at who published it. Each rule says where it comes from. Words that no rule knows are an ``Unknown``
with the reason, so that the row is left out and counted.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.planner_shapes import Unknown
from benchmarks.planner_table import Row
from shardyard.config.schema.recipe import Lora, Model
from shardyard.families.shape import ModelShape
from shardyard.planner.trainable_parameters import TrainableElements, trained_of
from shardyard.planner.workload import Formats, Recompute, ShardingPolicy, Techniques

_WORDS = ("framework", "task", "sharding", "act_ckpt", "precision", "notes", "flags")


def has(text: str, pattern: str) -> bool:
    """Whether a text (in lower case) holds a pattern."""
    return re.search(pattern, text) is not None


def words_of(row: Row) -> str:
    """All that a row says in words, in lower case; flags about derived cells included."""
    return row.text(*_WORDS)


def is_megatron(row: Row) -> bool:
    """Megatron and what is built on it."""
    return has(row.text("framework"), r"megatron|nemo(?! ?automodel)|vtrain")


def is_early_megatron(row: Row) -> bool:
    """Megatron of 2020 to 2022: fp16 or the first bf16, on V100 or A100, before FlashAttention.

    Its GPT scripts leave dropout at the default of 0.1, write the matrix of scores to memory and
    reduce gradients after the last backward pass (NVIDIA/Megatron-LM v2.6 and v3.0,
    megatron/arguments.py; bigscience-workshop/bigscience, train/tr11-176B-ml/*.slurm).
    """
    return (
        is_megatron(row)
        and not has(row.text("framework"), r"bridge|core|nemo")
        and has(row.text("gpu"), "v100|a100")
        and (has(row.text("framework"), "deepspeed") or has(row.text("precision"), "fp16"))
    )


# --- what is not training of a whole model


def excluded(row: Row) -> str | None:
    """Why this row is no full training run of the kind that is planned; None if it is one."""
    kind = row.text("task", "precision", "framework", "flags")
    if has(kind, r"\badapter|prompt.?tuning") and not has(kind, r"lora\b"):
        return "adapters of another kind than LoRA"
    if has(row.text("precision"), r"int8-training"):
        return "number format not modelled"
    if has(row.text("task"), r"inference|decod(e|ing)\b|generation|prefill|serving"):
        return "inference"
    if has(row.text("flags"), r"repeat of an earlier"):
        return "repeat of an earlier row"
    if has(row.text("flags"), r"not comparable"):
        return "flagged as not comparable"
    if has(row.text("framework"), "torchao|torchtitan") and has(row.text("gpu"), "^b200"):
        # "power limited B200 GPUs", by how much it does not say (pytorch/torchtitan, docs/mxfp8.md)
        return "device slowed by a power limit that is not given"
    if has(row.text("precision"), r"mxfp4|fp6\b|\bint[48]\b"):
        return "number format not modelled"
    return None


# --- number formats

NF4_BYTES = 0.5 + 4 / 64
"""A parameter of NF4 with an fp32 scale for each 64; doubly quantised, the scale takes 8 bits and
an fp32 one for each 256 of them (arXiv:2305.14314, section 3)."""
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def trained_part_of(row: Row, shape: ModelShape) -> TrainableElements | None:
    """The adapters of a row that trains them; None: it trains the whole model."""
    kind = row.text("task", "precision", "framework", "flags")
    if not has(kind, r"lora\b"):
        return None
    rank, targets = _adapters(row)
    known = {name for row in shape.family.block for name in [row.module.rpartition(".")[2]]}
    named = tuple(target for target in targets if target in known)
    return trained_of(shape, Model(lora=Lora(rank=rank, targets=named, dropout=_lora_dropout(row))))


def _adapters(row: Row) -> tuple[int, tuple[str, ...]]:
    """Rank, and matrices with an adapter; none named: all of the blocks."""
    framework, model = row.text("framework"), row.text("model")
    printed = re.search(r"\brank[ =]?(\d+)|\br=(\d+)", words_of(row))
    stated = int(printed[1] or printed[2]) if printed else None
    if has(framework, "config_hub"):
        # config_hub/finetune/*/lora.yaml: r 32 on queries and values; phi and TinyLlama on all
        if has(model, "phi"):
            return stated or 8, ()
        return stated or 32, () if has(model, "tiny|gemma") else ("q_proj", "v_proj")
    if has(framework, "litgpt"):
        return stated or 8, ("q_proj", "v_proj")  # its defaults (litgpt/finetune/lora.py)
    if has(framework, "torchtune"):
        return stated or 8, ()  # recipes/configs: rank 8, attention and MLP
    # NVIDIA's fine-tuning: adapter_dim 32 on attention_qkv (NVIDIA/NeMo, examples/nlp/
    # language_modeling/tuning/conf/megatron_gpt_finetuning_config.yaml)
    return stated or 32, ("q_proj", "k_proj", "v_proj")


def _lora_dropout(row: Row) -> float:
    return 0.05 if has(row.text("framework"), "litgpt") else 0.0


def frozen_bytes_of(row: Row, shape: ModelShape) -> float | None:
    """Bytes of a frozen parameter on average: tables stay in 16 bit where the rest is NF4."""
    words = row.text("task", "precision", "framework", "flags")
    if not has(words, r"qlora|nf4|bnb|bitsandbytes"):
        return None
    double = has(words, r"nf4-dq|double") or has(row.text("framework"), "config_hub")
    each = NF4_DOUBLE_BYTES if double else NF4_BYTES
    tables = (1 if shape.tie_word_embeddings else 2) * shape.table_parameters
    # bitsandbytes replaces every linear layer, LitGPT's head included; torchtune those of blocks
    wide = shape.table_parameters if has(row.text("framework"), "litgpt") else tables
    return (each * (shape.parameters - wide) + 2 * wide) / shape.parameters


BUFFERED = ShardingPolicy(
    splits_weights_from=3,
    splits_gradients_from=2,
    copies_whole_stage=False,
    has_gradient_buffers=True,
    sums_zero_1_at_end=False,
    sums_each_block=False,
)
"""Megatron-LM, DeepSpeed and what is built on them hold whole weights below ZeRO-3 and whole
gradients below ZeRO-2, in one buffer from the start (megatron/core/distributed,
param_and_grad_buffer.py; deepspeed/runtime/zero/stage_1_and_2.py). So do the others that are not
PyTorch's FSDP, as far as is known."""


def compute_format(row: Row) -> Literal["fp32", "bf16", "fp16", "fp8", "fp4"]:
    """The format of matrix products; where no word says it, what the device was built for."""
    words = row.text("precision")
    # torchao's recipes name the scale alone: "rowwise with bfloat16 all-gather" is float8, too
    recipe = has(row.text("framework"), "torchao") and has(row.text("notes"), r"(row|tensor)wise")
    if has(words, "nvfp4"):
        return "fp4"
    if recipe or has(words, r"fp8|float8|e4m3"):
        return "fp8"
    if has(words, r"bf16|bfloat"):
        return "bf16"
    if has(words, r"fp16|float16|half"):
        return "fp16"
    if has(words, r"fp32|float32|tf32"):
        return "fp32"
    return "fp16" if has(row.text("gpu"), "v100") else "bf16"


def formats_of(row: Row) -> Formats:
    """Bytes of one parameter in each role, by framework.

    ``optimizer_bytes`` counts AdamW's two moments and, where weights are 16 bit, the fp32 copy.
    """
    compute = compute_format(row)
    weight, gradient, optimizer, reduce = _state_bytes(row, compute)
    if has(words_of(row), r"8-?bit adam"):
        optimizer = 2
    if has(words_of(row), r"optimizer (step )?in(to)? backward"):
        gradient = 0  # each gradient is used and freed as it is computed
    return Formats(
        compute=compute,
        weight_bytes=weight,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        reduce_bytes=reduce,
        compute_bytes=4 if compute == "fp32" else 2,
        keeping=ShardingPolicy() if sharding_of(row).is_fsdp else BUFFERED,
    )


def _state_bytes(row: Row, compute: str) -> tuple[float, float, float, float]:
    """Weight, gradient, optimizer, gradient on the wire."""
    framework, words = row.text("framework"), words_of(row)
    if compute == "fp32":
        return 4, 4, 8, 4
    if has(words, r"bf16optimizer|fp32 grad acc"):
        return 2, 6, 12, 4  # DeepSpeed's BF16_Optimizer: bf16 gradients, summed into fp32 ones
    if has(framework, r"nemo(?! ?automodel)|bridge"):
        # their performance recipes set grad_reduce_in_fp32 to False (NVIDIA/NeMo, llm/recipes)
        return 2, 2, 12, 2
    if has(framework, "deepspeed") and compute == "fp16" and sharding_of(row).zero:
        # ZeRO keeps an fp32 gradient of its part beside master and moments: 20 bytes in all
        # (deepspeed/runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups[i].grad). It
        # lives in the step alone, but as one flat tensor, for which the allocator has no gap.
        return 2, 2, 16, 2
    if is_megatron(row) or has(framework, "nanotron"):
        # fp16 keeps gradients in fp16; bf16 accumulates them in fp32 (megatron/arguments.py:
        # accumulate_allreduce_grads_in_fp32; nanotron: accumulate_grad_in_fp32)
        return (2, 2, 12, 2) if compute == "fp16" else (2, 4, 12, 4)
    if has(framework, "picotron"):
        return 2, 4, 4, 4  # bf16 weights and moments, an fp32 bucket of gradients
    if has(framework, "deepspeed|colossal"):
        return 2, 2, 12, 2  # a 16-bit model and fp32 copies of master, both moments
    pure = has(row.text("precision"), "-true|pure bf16")
    if pure or has(framework, "torchtune|automodel|kempner"):
        # the whole model, moments included, is held in 16 bit (kempnerforge/config/training.py)
        return 2, 2, 4, 2
    # Weights stay fp32 and are cast when gathered. Reduction is fp32 in torchtitan
    # (mixed_precision_reduce) and in Composer's DEFAULT, 16 bit in Composer's PURE
    # (composer/trainer/mosaic_fsdp_utils.py) and in fms-fsdp (bfSixteen).
    return 4, 4, 8, 2 if has(words, "mp=pure") or has(framework, "fms") else 4


# --- sharding


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What data ranks split."""

    zero: int
    """0: nothing is split."""
    hybrid: bool = False
    """Split inside a node, copied across nodes."""
    is_fsdp: bool = False
    """By PyTorch's FSDP, which keeps parameters split between steps at every level."""


def sharding_of(row: Row, *, pp: int = 1) -> Sharding:
    """ZeRO level by the words of the row; a framework's default where the cell is empty.

    With a pipeline FSDP2 gathers a stage once a step and reduces its gradients once: zero 1 in our
    words (torchtitan, parallelize_llama.py: no reshard after forward with pp; torch's pipeline
    stage: no gradient sync before the last micro-batch).
    """
    fsdp = r"fsdp|hsdp|full_shard|shard_grad_op|torchtitan|composer|kempner"
    sharding = replace(_zero_of(row), is_fsdp=has(row.text("sharding", "framework"), fsdp))
    whole_stages = pp > 1 and sharding.is_fsdp and sharding.zero == 3
    return replace(sharding, zero=1) if whole_stages else sharding


def _zero_of(row: Row) -> Sharding:
    cell = row.text("sharding")
    hybrid = has(cell, r"hsdp|hybrid.?shard|mics|hpz")
    for text in (cell, row.text("framework"), row.text("notes")):
        stage = re.search(r"zero[-_ ]?(?:stage|dp)?[-_ =]?([0123])(?![\d.])", text)
        if stage:
            return Sharding(zero=int(stage[1]), hybrid=hybrid)
        if has(text, r"shard_grad_op"):
            return Sharding(zero=2, hybrid=hybrid)
        if has(text, r"bf16optimizer|dist(ributed)?[-_ ]?opt|low_level_zero"):
            return Sharding(zero=1, hybrid=hybrid)
        if hybrid or has(text, r"full_shard|fsdp|gemini"):
            return Sharding(zero=3, hybrid=hybrid)
        if has(text, r"\bddp\b|no_shard|^none$"):
            return Sharding(zero=0)
        if has(text, r"zero\b"):
            return Sharding(zero=3)  # ZeRO without a stage: the one that holds least
    modern = is_megatron(row) and not is_early_megatron(row)
    if modern or has(row.text("framework"), r"bridge|nanotron"):
        return Sharding(zero=1)  # their recipes use the distributed optimizer
    if has(row.text("framework"), r"maxtext|kempner|composer"):
        return Sharding(zero=3)  # fully sharded by default
    return Sharding(zero=0)


# --- recompute


def recompute_of(row: Row) -> Recompute | Unknown:
    """What is computed again in the backward pass."""
    cell = row.text("act_ckpt")
    every = re.search(r"every (\d+)|(\d+)(?:st|nd|rd|th) (?:layer|block)", cell)
    if every:
        return int(every[1] or every[2])
    if has(cell, r"selective layer"):
        return 2  # torchtitan's selective_ac_option: every second block
    if has(cell, r"attention|core"):
        return "attention"
    if has(cell, r"select|sac\b|op\b|minimal|save_|partial|norm|mlp|act\b"):
        if is_megatron(row):
            return "attention"  # Megatron's word for it (Korthikanti et al. 2022)
        return _share_of_blocks(row) or "selective"
    if has(cell, r"^(full|yes|true|all|on|1|block|uniform)\b"):
        return "full"
    if has(cell, r"^(none|no|false|off|0)\b"):
        return "none"
    if cell:
        return Unknown("recompute mode not understood")
    asked = row.text("task", "notes")
    return "full" if has(asked, r"(activation|gradient) ?checkpointing|checkpointing$") else "none"


def _share_of_blocks(row: Row) -> Recompute | None:
    """Every n-th block, from the two utilisations that some sources print for one run.

    HFU counts recomputed FLOP and MFU does not: HFU / MFU = 1 + share / 3, whatever the speed.
    """
    printed = re.search(r"hfu (0?\.\d+|\d+)", row.text("notes"))
    mfu = row.quantity("mfu_pct_reported")
    if not printed or not mfu:
        return None
    hfu = float(printed[1]) * (100 if float(printed[1]) <= 1 else 1)
    share = 3 * (hfu / mfu - 1)
    if share < 0.05:
        return None
    every = round(1 / share)
    return every if every > 1 else "full"


# --- how the step is carried out


def techniques_of(row: Row, *, tp: int, pp: int) -> Techniques:
    """Kernels, attention, overlap and schedule."""
    words, early = words_of(row), is_early_megatron(row)
    stages = row.count("vpp")
    schedule = _schedule(words, stages)
    return Techniques(
        attention=_attention(row, early=early),
        kernels=_kernels(row, words),
        sequence_parallel=_sequence_parallel(row, words, early=early),
        overlap_data=not (early or _waits_for_gathers(row)),
        overlap_tensor=_overlap_tensor(row, words, tp=tp),
        # Bridge's recipes dispatch tokens by DeepEP or HybridEP (moe_flex_dispatcher_backend)
        deduplicated_dispatch=has(row.text("framework"), "bridge"),
        # its expert parallelism runs over all ranks of a stage (core/parallel_state.py)
        experts_over_tensor=is_megatron(row) or has(row.text("framework"), "bridge"),
        schedule=schedule,
        virtual_stages=_virtual_stages(schedule, stages),
        balanced_stages=_balanced_stages(row, pp=pp * (stages or 1)),
        offload=_offload(row, words),
        dropout=early,
        fp8_gather=_fp8_gather(row),
        fp8_rows=has(row.text("precision", "notes"), r"row-?wise"),
        selective_products=0.5 if has(row.text("framework"), "torchtitan|automodel") else 1.0,
        bucket_bytes=_bucket_bytes(row),
        logit_bytes=_logit_bytes(row, pp=pp) if early else None,
        loss="fused" if has(row.text("framework"), "llm-foundry") else "torch",
        chunked_loss=has(words, r"chunked|lc-ce|(linear|cut).{0,6}cross|liger"),
    )


def _attention(row: Row, *, early: bool) -> Literal["unfused", "flash", "fused"]:
    if has(row.text("notes"), r"cudnn|flash.?attention.?3|\bfa3\b"):
        return "fused"
    if has(row.text("notes", "framework"), r"flash"):
        return "flash"
    if early or has(row.text("gpu"), "v100"):
        return "unfused"  # FlashAttention 2 needs Ampere or later
    if has(row.text("notes"), r"(math|eager|unfused) attention"):
        return "unfused"
    # Transformer Engine takes cuDNN's attention on Hopper and later; TPUs have kernels of their own
    written_for_it = has(row.text("gpu"), r"h[12]00|h20|b[23]00") and is_megatron(row)
    return "fused" if written_for_it or has(row.text("gpu"), r"tpu|trn|gaudi|\bv[456]") else "flash"


def _kernels(row: Row, words: str) -> Literal["eager", "fused", "compiled"]:
    framework = row.text("framework")
    if has(words, r"compile=false|nocompile|\beager\b"):
        return "eager"
    if has(
        words, r"torch\.compile|compile=true|\+ ?compile\b|\bcompiled?\b|maxtext|\bjax\b|\bxla\b"
    ):
        return "compiled"
    if has(framework, "torchao"):
        return "compiled"  # its float8 is meant to be compiled (pytorch/ao, float8 README)
    if is_megatron(row) or has(framework, "bridge|nanotron|picotron|colossal"):
        return "fused"
    if has(framework, "automodel"):
        return "fused"  # it replaces norms and activations by Liger's kernels unless told not to
    return "eager"


def _sequence_parallel(row: Row, words: str, *, early: bool) -> bool:
    printed = re.search(r"sequence_parallel ?= ?(on|off|true|false)", words)
    if printed:
        return printed[1] in ("on", "true")
    if has(row.text("framework"), "picotron|colossal"):
        return False  # theirs is another technique, or none
    return not early  # it came with Korthikanti et al. 2022


def _overlap_tensor(row: Row, words: str, *, tp: int) -> bool:
    if has(words, r"vanilla tp"):
        return False
    if has(words, r"async[- ]?tp|asynctp|tp_comm_overlap|user ?buffer"):
        return True
    # NVIDIA's recipes overlap tensor parallelism (MegatronCommOverlapCallback, tp_comm_overlap)
    return tp > 1 and has(row.text("framework"), r"nemo(?! ?automodel)|bridge")


def _schedule(
    words: str, stages: int | None
) -> Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]:
    if has(words, r"zero[- ]?bubble|\bzbv?\b"):
        return "zero-bubble"
    if has(words, "interleaved") or (stages or 1) > 1:
        return "interleaved"
    return "gpipe" if has(words, "gpipe") else "1f1b"


def _virtual_stages(schedule: str, stages: int | None) -> int:
    if schedule != "interleaved":
        return 1
    return stages or 2  # torchtitan and torch's schedules: two stages a rank unless more are named


def _balanced_stages(row: Row, *, pp: int) -> bool:
    """Whether stages were cut by cost. Megatron cuts by blocks wherever their number allows it."""
    if has(row.text("notes"), r"rebalanc|balanced|account_for_(embedding|loss)"):
        return True
    layers = row.count("layers")
    return not is_megatron(row) or (layers is not None and layers % pp > 0)


def _offload(row: Row, words: str) -> Literal["none", "params", "optimizer", "activations"]:
    printed = dict(re.findall(r"(opt|par) offl=([yn])", words))
    if printed:
        if printed.get("par") == "y":
            return "params"
        return "optimizer" if printed.get("opt") == "y" else "none"
    if has(words, r"activation[- ](cpu[- ]?)?offload") or has(row.text("act_ckpt"), "offload"):
        return "activations"
    if has(words, r"(param(eter)?s?|weights?)[- ](cpu[- ]?)?offload"):
        return "params"
    if has(words, r"offload"):
        return "optimizer"
    if has(row.text("framework"), "megatron-deepspeed zero"):
        # its ZeRO-3 script keeps split activations in the host's memory: --partition-activations
        # --checkpoint-in-cpu (bigscience-workshop/bigscience, experiments/gpt2-meg-ds-zero)
        return "activations"
    return "none"


def _waits_for_gathers(row: Row) -> bool:
    """Whether ZeRO-3 waits for each gather, as DeepSpeed's did before version 0.6 (2021).

    Version 0.6 gathers on a stream of its own, several parameters at once: a model of 50 B on 64
    A100 then took 116 TFLOP/s a device in place of 68 (deepspeedai/DeepSpeed, pull request 1453).
    """
    return has(row.text("framework"), "deepspeed") and has(row.text("gpu"), "v100")


def _logit_bytes(row: Row, *, pp: int) -> float:
    """Bytes of a logit at the loss of Megatron before 2022: 16 bit, an fp32 copy, its exponential.

    Its loss takes ``output.float()`` and computes the exponential into a tensor of its own
    (megatron/mpu/cross_entropy.py: exp_logits = vocab_parallel_logits.exp()). DeepSpeed's pipeline
    keeps the outputs of its last stage in two buffers (deepspeed/runtime/pipe/engine.py,
    pipe_buffers["outputs"] and num_pipe_buffers).
    """
    has_buffers = pp > 1 and has(row.text("framework"), "deepspeed")
    return 2 + 4 + 4 + (2 if has_buffers else 0)


def _bucket_bytes(row: Row) -> float:
    """DeepSpeed sets 5e8 elements aside for gradients on their way (reduce_bucket_size).

    Not in its BF16_Optimizer, which is no ZeRO stage to it.
    """
    words = row.text("framework", "sharding")
    if not has(words, "deepspeed") or has(words, "bf16optimizer") or not sharding_of(row).zero:
        return 0.0
    return 2 * 5e8 * 2  # one fills while the other is sent


def _fp8_gather(row: Row) -> bool:
    """torchao's float8 with a scale per tensor gathers in fp8 unless the row says otherwise."""
    precision = row.text("precision")
    if has(precision, r"(float8|f8|fp8) all-gather"):
        return True
    other = has(precision, r"bfloat16 all-gather|rowwise|mxfp8|nocompile")
    return has(precision, "float8") and has(row.text("framework"), "torchtitan") and not other

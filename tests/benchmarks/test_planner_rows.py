"""Rows of the table become the runs they describe; each expectation is read off the row by hand."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner_frameworks import BUFFERED
from benchmarks.planner_rows import Case, Skipped, row_to_case, with_cumulative_features
from benchmarks.planner_table import COUNTS, QUANTITIES, Row, read_table
from shardyard.config.layout import Layout
from shardyard.planner.collectives import BETWEEN_SHARE
from shardyard.planner.workload import Formats

TABLE = Path(__file__).parents[2] / "benchmarks" / "groundtruth" / "measured_runs.csv"
ROWS = {row.raw("id"): row for row in read_table(TABLE)}

FSDP = {
    "id": "x", "family": "somebody", "quality": "A", "framework": "torchtitan", "gpu": "H100-80GB",
    "gpus_per_node": "8", "num_gpus": "16", "model": "Llama 3.1 8B", "seq_len": "8192", "dp": "16",
    "tp": "1", "pp": "1", "cp": "1", "sharding": "FSDP2", "act_ckpt": "none", "precision": "bf16",
    "micro_batch_size": "1", "global_batch_size": "16", "outcome": "ok",
    "tokens_per_s_per_gpu": "5000",
}  # fmt: skip


def row(**cells: str) -> Row:
    full = FSDP | cells
    numbers = {name: float(full[name]) for name in (*COUNTS, *QUANTITIES) if full.get(name)}
    return Row(line=2, cells=full, numbers=numbers)


def case(source: Row | str) -> Case:
    answer = row_to_case(ROWS[source] if isinstance(source, str) else source)
    assert isinstance(answer, Case), answer
    return answer


def reason(source: Row | str) -> str:
    answer = row_to_case(ROWS[source] if isinstance(source, str) else source)
    assert isinstance(answer, Skipped), answer
    return answer.reason


# --- runs that the table holds


def test_bloom_is_an_early_megatron_on_jean_zay() -> None:
    run = case("bigscience-tr11-0152")
    load = run.workload
    assert load.layout == Layout(dp_replicate=1, dp_shard=8, tp=4, pp=12, zero=1)
    assert (load.seq_len, load.micro_batch, load.global_batch) == (2048, 2, 2048)
    assert (load.shape.hidden_size, load.shape.num_hidden_layers) == (14336, 70)
    assert load.shape.vocab_size == 250880
    assert load.formats == Formats(
        compute="bf16", weight_bytes=2, gradient_bytes=6, optimizer_bytes=12, reduce_bytes=4,
        keeping=BUFFERED,
    )  # fmt: skip # 20 bytes: a bf16 gradient, and an fp32 one that sums the micro-batches
    assert load.recompute == "full"
    assert (load.techniques.attention, load.techniques.kernels) == ("unfused", "fused")
    assert load.techniques.dropout
    assert not load.techniques.overlap_data
    assert not load.techniques.sequence_parallel
    assert run.cluster.nodes == 48
    # an all-reduce there passes 40.5 Gb/s through a node, its eight devices together
    assert BETWEEN_SHARE * run.cluster.between.bytes_per_s * 8 == pytest.approx(40.5e9 / 8)
    assert run.tokens_per_s_per_device == 107.05
    assert run.memory is not None
    assert (run.memory.number, run.memory.bytes) == ("device", 59 * 2**30)


def test_blocks_that_only_the_size_tells_fill_whole_stages() -> None:
    # 195 B, h = 14,400, V = 250,880: (195e9 - V h) / 12 h^2 = 76.9; 11 stages: 77
    assert case("bigscience-tr11-0021").workload.shape.num_hidden_layers == 77


def test_a_megatron_vocabulary_is_padded() -> None:
    # 50,257 to a multiple of 128 x tp 1
    assert case("vtrain-single-0011").workload.shape.vocab_size == 50304


def test_llm_foundry_shards_fully_and_reduces_in_the_words_of_its_mode() -> None:
    full = case("mosaic-llm-foundry-0010").workload
    assert full.layout == Layout(dp_replicate=1, dp_shard=512, zero=3)
    assert (full.formats.weight_bytes, full.formats.reduce_bytes) == (4, 4)
    assert case("mosaic-llm-foundry-0078").workload.formats.reduce_bytes == 2
    assert case("mosaic-llm-foundry-0016").workload.layout.zero == 2
    assert case("mosaic-llm-foundry-0076").workload.formats.compute == "fp8"


def test_torchtitan_cuts_a_local_batch_into_one_micro_batch_a_stage() -> None:
    plain = case("torchtitan-0013").workload
    assert (plain.micro_batch, plain.micro_batches) == (4, 8)
    assert plain.techniques.schedule == "1f1b"
    assert plain.techniques.overlap_tensor
    # a stage is gathered once a step, though its weights stay split between steps
    assert (plain.layout.zero, plain.formats.keeping.splits_weights_from) == (1, 1)
    looped = case("torchtitan-0014").workload
    assert (looped.techniques.schedule, looped.techniques.virtual_stages) == ("interleaved", 2)
    assert (looped.micro_batch, looped.micro_batches) == (2, 16)


def test_torchtitan_prints_reserved_gib_and_names_its_compiler() -> None:
    eager, compiled, fp8 = (case(f"torchtitan-000{n}") for n in (1, 2, 3))
    assert eager.memory is not None
    assert (eager.memory.number, eager.memory.bytes) == ("reserved", 82.4 * 2**30)
    assert eager.cluster.accelerator.name == "H100 96GB HBM2e"
    assert eager.workload.techniques.kernels == "eager"
    assert compiled.workload.techniques.kernels == "compiled"
    assert (fp8.workload.formats.compute, fp8.workload.techniques.fp8_gather) == ("fp8", True)
    assert eager.workload.recompute == "selective"
    assert case("torchtitan-0036").workload.recompute == 2


def test_asynchronous_tensor_parallelism_is_told_from_the_plain_kind() -> None:
    assert not case("torchtitan-0019").workload.techniques.overlap_tensor
    assert case("torchtitan-0020").workload.techniques.overlap_tensor
    assert case("torchtitan-0023").workload.techniques.fp8_rows


def test_a_recipe_named_by_its_scale_alone_is_fp8() -> None:
    assert case("torchao-0003").workload.formats.compute == "fp8"
    assert case("torchao-0001").workload.formats.compute == "bf16"


def test_hybrid_sharding_stays_in_the_node_and_the_notes_name_the_network() -> None:
    run = case("fms-fsdp-0001")
    assert run.workload.layout == Layout(dp_replicate=16, dp_shard=8, zero=3)
    assert run.cluster.between.bytes_per_s == 400e9 / 8 / 8


def test_utilisations_tell_how_many_blocks_are_recomputed() -> None:
    # HFU 0.74 / MFU 0.55 = 1 + 1.04 / 3: every block; 0.69 / 0.61 = 1 + 0.39 / 3: each third
    assert case("fms-fsdp-0007").workload.recompute == "full"
    assert case("fms-fsdp-0003").workload.recompute == 3


def test_a_degree_that_is_not_printed_follows_from_the_others() -> None:
    assert case("bigscience-v100-0048").workload.layout.tp == 4  # 64 = dp 16 x pp 1 x tp
    assert case("bigscience-v100-0076").workload.layout.dp_shard == 64


def test_offload_stands_in_the_flags() -> None:
    words = {n: case(f"bigscience-v100-00{n}").workload.techniques.offload for n in (81, 82, 84)}
    assert words == {81: "none", 82: "optimizer", 84: "params"}
    # DeepSpeed's ZeRO-3 example keeps activations in the host's memory
    assert case("bigscience-v100-0050").workload.techniques.offload == "activations"


def test_deepspeed_sets_a_bucket_aside_but_not_its_bf16_optimizer() -> None:
    # 5e8 elements of 2 bytes, twice: one fills while the other is sent
    assert case("bigscience-tr11-0064").workload.techniques.bucket_bytes == 2e9
    assert case("bigscience-tr11-0152").workload.techniques.bucket_bytes == 0


def test_torchtitan_keeps_every_second_matrix_product() -> None:
    assert case("torchtitan-0001").workload.techniques.selective_products == 0.5


def test_an_ablation_ladder_keeps_what_was_added_before() -> None:
    steps = {step.raw("id"): step for step in with_cumulative_features(list(ROWS.values()))}
    first, last = case(steps["torchtune-0011"]), case(steps["torchtune-0016"])
    assert first.workload.techniques.kernels == "compiled"
    assert not first.workload.techniques.chunked_loss
    assert last.workload.techniques.kernels == "compiled"
    assert last.workload.techniques.chunked_loss
    assert last.workload.recompute == "full"
    assert last.workload.formats.optimizer_bytes == 2


def test_selective_recompute_means_attention_in_megatron() -> None:
    run = case("korthikanti-0004").workload
    assert run.recompute == "attention"
    assert run.techniques.sequence_parallel
    assert (run.techniques.schedule, run.techniques.virtual_stages) == ("interleaved", 3)


# --- rows that are left out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("litgpt-mem-0027", "adapters of another kind than LoRA"),
        ("bigscience-tr11-0024", "repeat of an earlier row"),
        ("bigscience-v100-0011", "layout does not multiply to the number of devices"),
        ("torchtitan-0033", "layout incomplete"),
        ("torchao-0013", "batch or sequence length not given"),
        ("bigscience-tr11-0007", "nothing measured"),
        ("torchtune-0009", "flagged as not comparable"),
        ("bigscience-v100-0003", "model shape incomplete: hidden size"),
        ("memory-misc-0004", "less memory printed than the states alone take"),
    ],
)
def test_what_cannot_be_compared_says_why(name: str, why: str) -> None:
    assert reason(name) == why


# --- words that other tables use


def test_a_model_is_found_by_any_spelling_of_its_name() -> None:
    names = ("Llama-3.1-8B", "llama3.1 8b", "meta-llama/Llama-3.1-8B-hf", "Llama 3.1 8B FP8 run")
    shapes = [case(row(model=name)).workload.shape for name in names]
    assert {shape.intermediate_size for shape in shapes} == {14336}
    assert {shape.num_key_value_heads for shape in shapes} == {8}


def test_the_row_wins_over_what_is_known_of_its_model() -> None:
    assert case(row(layers="4")).workload.shape.num_hidden_layers == 4


def test_experts_come_from_the_known_model() -> None:
    moe = row(
        framework="Megatron-Bridge", gpu="H100", model="Qwen3 30B-A3B", num_gpus="16", ep="8",
        tp="1", pp="2", dp="8", sharding="", vpp="",
    )  # fmt: skip
    load = case(moe).workload
    assert (load.shape.num_experts, load.shape.num_experts_per_tok) == (128, 8)
    assert load.layout == Layout(dp_replicate=1, dp_shard=8, pp=2, ep=8, zero=1)
    assert load.formats.reduce_bytes == 2
    assert load.techniques.attention == "fused"


def test_experts_that_nobody_tells_leave_a_row_out() -> None:
    assert reason(row(model="OurMoE-12B", hidden="4096", layers="32")) == "experts not given"


@pytest.mark.parametrize("model", ["DeepSeek-V3 671B", "DeepSeek V3", "deepseek-r1"])
def test_latent_attention_has_one_name_for_many(model: str) -> None:
    assert case(row(model=model)).workload.shape.kv_lora_rank == 512


def test_attention_that_is_not_modelled_leaves_a_row_out() -> None:
    answer = reason(row(model="DeepSeekV4 Flash"))
    assert answer == "model not modelled: its sparse attention is not modelled"


def test_a_number_format_that_is_not_modelled_leaves_a_row_out() -> None:
    assert reason(row(precision="MXFP4")) == "number format not modelled"


def test_degrees_of_an_expert_layout_may_be_printed_per_copy() -> None:
    moe = row(framework="NeMo", model="Mixtral 8x7B", num_gpus="64", dp="2", tp="4", ep="8")
    assert case(moe).workload.layout.data_ranks == 16


@pytest.mark.parametrize(
    ("cell", "zero", "shard"),
    [
        ("ZeRO-1", 1, 16), ("zero_stage=2", 2, 16), ("ZeRO-3", 3, 16), ("ZeRO stage 3", 3, 16),
        ("SHARD_GRAD_OP", 2, 16), ("HSDP", 3, 8), ("HYBRID_SHARD", 3, 8), ("DDP", 1, 1),
        ("distributed optimizer", 1, 16), ("Gemini", 3, 16), ("none", 1, 1),
    ],
)  # fmt: skip
def test_sharding_by_the_words_of_many_frameworks(cell: str, zero: int, shard: int) -> None:
    layout = case(row(sharding=cell)).workload.layout
    assert (layout.zero, layout.dp_shard, layout.data_ranks) == (zero, shard, 16)


@pytest.mark.parametrize(
    ("cell", "meaning"),
    [
        ("full", "full"), ("True", "full"), ("none", "none"), ("False", "none"), ("", "none"),
        ("selective op", "selective"), ("minimal", "selective"), ("selective every 4th layer", 4),
        ("core_attn", "attention"),
    ],
)  # fmt: skip
def test_recompute_by_the_words_of_many_frameworks(cell: str, meaning: Any) -> None:
    assert case(row(act_ckpt=cell)).workload.recompute == meaning


def test_a_recompute_mode_nobody_knows_leaves_a_row_out() -> None:
    assert reason(row(act_ckpt="custom")) == "recompute mode not understood"


@pytest.mark.parametrize(
    ("gpu", "memory", "name"),
    [
        ("A100-SXM4-40GB", "", "A100 40GB"), ("NVIDIA A100", "80", "A100 80GB"),
        ("H100", "", "H100 SXM"), ("H100-PCIe", "80", "H100 PCIe"), ("DGX-B200", "", "B200"),
        ("GB200", "", "GB200"), ("TPU v5p", "", "TPU v5p"), ("MI300X", "192", "MI300X"),
        ("V100", "16", "V100 16GB"),
    ],
)  # fmt: skip
def test_devices_by_many_names(gpu: str, memory: str, name: str) -> None:
    run = case(row(gpu=gpu, gpu_mem_gb=memory, num_gpus="4", dp="4", gpus_per_node="4"))
    assert run.cluster.accelerator.name == name


def test_a_device_nobody_knows_leaves_a_row_out() -> None:
    assert reason(row(gpu="Dojo D1")) == "accelerator not in the catalogue: Dojo D1"


def test_a_rack_joined_by_nvlink_counts_as_one_node() -> None:
    run = case(row(gpu="GB200", gpus_per_node="4", num_gpus="128", dp="128"))
    assert (run.cluster.devices_per_node, run.cluster.nodes) == (64, 2)


def test_a_rate_follows_from_the_time_of_a_step() -> None:
    run = case(row(tokens_per_s_per_gpu="", iter_time_s="2"))
    assert run.tokens_per_s_per_device == 16 * 8192 / 2 / 16


def test_a_pipeline_without_a_global_batch_is_compared_by_memory_alone() -> None:
    cells = {"pp": "4", "dp": "4", "global_batch_size": "", "framework": "nanotron"}
    assert reason(row(**cells)) == "batch or sequence length not given"
    run = case(row(**cells, mem_gb="30", mem_kind="max_memory_allocated (GB)"))
    assert run.tokens_per_s_per_device is None
    assert run.memory is not None
    assert (run.memory.number, run.memory.bytes) == ("allocated", 30e9)


def test_a_run_without_memory_is_a_case_without_a_rate() -> None:
    run = case(row(outcome="oom", tokens_per_s_per_gpu=""))
    assert run.is_oom
    assert run.tokens_per_s_per_device is None


def test_an_unknown_quality_counts_as_the_lowest() -> None:
    assert case(row(quality="")).quality == "C"


# --- adapters, quantised weights, mixtures


def test_adapters_are_the_trained_part_on_a_base_of_four_bits() -> None:
    cells = {"framework": "torchtune", "num_gpus": "1", "dp": "1", "global_batch_size": "1"}
    whole, lora, qlora = (
        case(row(task=task, **cells)).workload for task in ("full", "LoRA", "QLoRA")
    )
    assert whole.trained is None and whole.formats.frozen_bytes is None
    assert lora.trained is not None and lora.formats.frozen_bytes is None
    # rank 8 on seven matrices of 32 blocks, by hand
    sizes = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)) + 3 * ((4096, 14336),)
    assert lora.trained.parameters == 32 * 8 * sum(sum(each) for each in sizes)
    assert qlora.trained == lora.trained
    # 4.5 bits, but for two tables of 128,256 x 4,096 in 16 bit
    share = 2 * 128256 * 4096 / 8.03e9
    assert qlora.formats.frozen_bytes == pytest.approx(0.5625 * (1 - share) + 2 * share, rel=0.01)


def test_litgpt_adapts_queries_and_values() -> None:
    run = case("litgpt-mem-0011")
    assert run.workload.trained is not None
    assert run.workload.trained.parameters == 4194304  # as the row prints
    assert case("litgpt-mem-0012").workload.formats.frozen_bytes == pytest.approx(0.59, abs=0.01)


def test_other_adapters_are_left_out() -> None:
    assert reason("litgpt-mem-0027") == "adapters of another kind than LoRA"


def test_lora_at_the_end_of_a_ladder_has_what_came_before() -> None:
    rows = with_cumulative_features(list(ROWS.values()))
    last = next(each for each in rows if each.raw("id") == "torchtune-0017")
    assert last.raw("task").endswith("LoRA") and "Activation" in last.raw("task")


def test_experts_of_megatron_run_over_tensor_ranks_too() -> None:
    moe = {
        "framework": "Megatron-Bridge 26.02", "model": "Qwen3_30B_a3B", "ep": "16", "tp": "2",
        "dp": "8", "precision": "NVFP4",
    }  # fmt: skip
    load = case(row(**moe)).workload
    assert load.techniques.experts_over_tensor and load.techniques.deduplicated_dispatch
    assert load.formats.compute == "fp4"
    ours = case(row(model="Qwen3_30B_a3B", ep="8")).workload.techniques
    assert not ours.experts_over_tensor and not ours.deduplicated_dispatch


def test_latent_attention_is_modelled_and_state_space_blocks_are_not() -> None:
    shape = case(row(framework="Megatron-Bridge 26.02", model="DeepSeekV3")).workload.shape
    assert (shape.model_type, shape.kv_lora_rank, shape.num_experts) == ("deepseek_v3", 512, 256)
    assert "state-space" in reason(row(model="Nemotron_3_Nano"))


def test_an_empty_cell_leaves_recompute_open() -> None:
    assert case(row(act_ckpt="")).recompute_is_open
    assert not case(row(act_ckpt="none")).recompute_is_open
    assert not case(row(act_ckpt="", notes="activation checkpointing")).recompute_is_open


def test_early_megatron_has_an_fp32_loss_and_pipes_of_deepspeed_keep_its_logits_twice() -> None:
    # 16 bit, fp32 copy, exponential; DeepSpeed's pipeline has two buffers of outputs
    early = {"framework": "Megatron-DeepSpeed", "gpu": "V100-32GB", "precision": "fp16"}
    piped = case(row(**early, dp="1", tp="1", pp="8", num_gpus="8")).workload.techniques
    whole = case(row(**early, dp="8", tp="1", pp="1", num_gpus="8")).workload.techniques
    assert (piped.logit_bytes, whole.logit_bytes) == (12, 10)
    assert case("torchtitan-0001").workload.techniques.logit_bytes is None


def test_zero_3_of_2021_waits_for_its_gathers() -> None:
    hf = {"framework": "HF Trainer + DeepSpeed ZeRO", "sharding": "ZeRO-3"}
    old, new = (case(row(**hf, gpu=gpu)).workload.techniques for gpu in ("V100-32GB", "A100-80GB"))
    assert not old.overlap_data and new.overlap_data

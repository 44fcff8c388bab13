"""BERT as others trained it on A100s, explained by the planner: nothing is fitted to these rows.

- NeMo's BERT 4B on 1 to 16 nodes of 8 A100 80 GB, tokens a second (NVIDIA NeMo Framework user
  guide, llms/bert/performance.html). Its settings are those of the launcher's own file.
- MosaicBERT: 79.6 GLUE in 1.13 h on 8 A100 80 GB (Portes et al. 2023, arXiv:2312.17482). How many
  steps that took is not in what we found, so no time can be predicted; what is told is how many the
  planner's rate would make. Of the baseline beside it steps and hours are both published.

They are no rows of ``groundtruth/measured_runs.csv``: what is said of that table does not change.

    python -m benchmarks.planner_bert
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner_frameworks import BUFFERED
from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import default_cluster
from shardyard.planner.estimate import estimate
from shardyard.planner.workload import Formats, Techniques, Workload

BAR = 0.15
"""A rate may be off by this share."""

NEMO_4B = {1: 57287, 2: 108695, 4: 215358, 8: 393167, 16: 728178}
"""Nodes -> tokens a second."""

NEMO_FORMATS = Formats(
    compute="bf16", weight_bytes=2, gradient_bytes=2, optimizer_bytes=12, reduce_bytes=2,
    keeping=BUFFERED,
)  # fmt: skip
"""megatron_amp_O2 and distributed_fused_adam, as other rows of NeMo (planner_frameworks.py)."""

NEMO_TECHNIQUES = Techniques(attention="unfused", kernels="fused", dropout=True, overlap_data=False)
"""dropout 0.1, overlap_grad_sync False; NeMo 22.11, by the name of its chart, is older than
FlashAttention in Megatron-LM."""

BASELINE_STEPS, BASELINE_HOURS = 70_000, 11.5
"""HuggingFace's BERT-Base in MosaicBERT's study (arXiv:2312.17482; mosaicml/examples, README)."""

MOSAIC_BATCH, MOSAIC_TOKENS, MOSAIC_HOURS = 4096, 128, 1.13

BASELINE_MISSING = (
    "its head scores every token, the planner counts hidden ones; autocast of torch 1.13 casts the "
    "weights in every pass; whether evaluations, one every 2,000 steps, are in the time is not said"
)
"""Candidates for what the prediction lacks; none of them was measured."""

MOSAIC_MISSING = (
    "how many steps 1.13 h are is not published in what we found, nor the share of padding that "
    "its unpadding saves"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args(arguments)
    rows, entries = nemo_4b(), mosaic()
    write_result("planner-bert", {"nemo_4b": rows, "mosaic": entries}, args.out)
    for row in rows:
        print(
            f"BERT 4B, {row['nodes']:2} nodes: {row['tokens_per_s']:,} tokens/s, predicted "
            f"{row['predicted_tokens_per_s']:,} ({row['error']:+.1%})"
        )
    for name, entry in entries.items():
        print(f"{name}: {entry}")
    return 0


def nemo_4b() -> list[dict[str, Any]]:
    """Published and predicted rates by nodes.

    NVIDIA/NeMo-Framework-Launcher, launcher_scripts/conf/training/bert/4b.yaml: 48 blocks, hidden
    2,560, 32 heads, 512 tokens, batch 2,048, micro-batch 8, no model parallelism, selective
    recompute. The same batch is taken on every number of nodes.
    """
    shape = _bert(2560, 48, 32, vocabulary=30592)  # padded to a multiple of 128
    rows = []
    for nodes, published in NEMO_4B.items():
        rate = _rate(
            Workload(
                shape=shape,
                layout=Layout(dp_replicate=1, dp_shard=8 * nodes, zero=1),
                seq_len=512,
                micro_batch=8,
                global_batch=2048,
                formats=NEMO_FORMATS,
                recompute="attention",
                techniques=NEMO_TECHNIQUES,
            ),
            nodes=nodes,
        )
        error = rate / published - 1
        rows.append(
            {
                "nodes": nodes,
                "tokens_per_s": published,
                "predicted_tokens_per_s": round(rate),
                "error": round(error, 3),
                "is_within_bar": abs(error) <= BAR,
            }
        )
    return rows


def mosaic() -> dict[str, dict[str, Any]]:
    """The baseline's hours, and how many steps of MosaicBERT 1.13 h would be.

    mosaicml/examples, examples/bert/yamls/main: samples of 128 tokens, batch 4,096, micro-batches
    of 128 (baseline) and 512, bf16, without dropout in attention.
    """
    techniques = Techniques(attention="unfused", kernels="eager", dropout=True)
    baseline = _rate(_base(micro_batch=128, techniques=techniques), nodes=1)
    fast = Techniques(attention="flash", kernels="fused", dropout=True)
    rate = _rate(_base(micro_batch=512, techniques=fast), nodes=1)
    step_tokens = MOSAIC_BATCH * MOSAIC_TOKENS
    hours = BASELINE_STEPS * step_tokens / baseline / 3600
    return {
        "baseline": {
            "hours": BASELINE_HOURS,
            "predicted_hours": round(hours, 2),
            "is_within_bar": abs(hours / BASELINE_HOURS - 1) <= BAR,
            "missing": BASELINE_MISSING,
        },
        "mosaicbert": {
            "hours": MOSAIC_HOURS,
            "predicted_steps": round(MOSAIC_HOURS * 3600 * rate / step_tokens),
            "missing": MOSAIC_MISSING,
        },
    }


def _base(*, micro_batch: int, techniques: Techniques) -> Workload:
    """BERT-Base; MosaicBERT's gated MLP has half as many parameters again and is not counted."""
    return Workload(
        shape=_bert(768, 12, 12, vocabulary=30522),
        layout=Layout(dp_replicate=8, dp_shard=1, zero=1),
        seq_len=MOSAIC_TOKENS,
        micro_batch=micro_batch,
        global_batch=MOSAIC_BATCH,
        formats=Formats(
            compute="bf16", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, reduce_bytes=4,
            keeping=BUFFERED,
        ),
        techniques=techniques,
    )  # fmt: skip


def _bert(width: int, layers: int, queries: int, *, vocabulary: int) -> ModelShape:
    return replace(
        PRESETS["bert-large"].shape, vocab_size=vocabulary, hidden_size=width,
        intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=queries,
        num_key_value_heads=queries,
    )  # fmt: skip


def _rate(workload: Workload, *, nodes: int) -> float:
    """Tokens a second on nodes of 8 A100 80 GB, joined as DGX A100 are."""
    device = instance("p4de.24xlarge").accelerator
    cluster = default_cluster(device, devices_per_node=8, nodes=nodes)
    return estimate(workload, cluster).tokens_per_s_per_device * cluster.devices


if __name__ == "__main__":
    sys.exit(main())

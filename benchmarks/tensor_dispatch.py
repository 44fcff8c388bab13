"""Our own tensor parallelism beside torch's (``parallelize_module``), on the same Llama block.

Both split the same matrices by the same ranks, and tokens between them (sequence parallelism). Ours
computes on the plain tensors that a rank holds; torch's hands DTensors to norms, matrices and the
optimizer, and each operator on one is dispatched in Python. A step is a forward pass, a backward
pass and AdamW. The two live in the same two gloo processes and step alternately (A B, B A, ...), a
barrier before each; their gradients are compared once. CPU time, which a busy neighbour changes
less than wall time, is recorded beside it.

Ours also gathers tokens once more in the backward pass rather than keep them; torch keeps them.

    python -m benchmarks.tensor_dispatch
"""

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import write_result
from benchmarks.step_overhead import StepTimes, summarize
from shardyard.families.registry import family_of
from shardyard.parallel.tensor import shard_tensors, token_share
from tests.distributed.ranks import run_on_ranks

PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """A Llama block and what it computes on."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    samples: int = 2
    tokens: int = 256


BLOCKS = {
    "tiny": Block(width=64, inner=172, heads=4, kv_heads=2),
    "middling": Block(width=768, inner=2048, heads=12, kv_heads=4),
}


def main() -> int:
    """Measure and write the result file."""
    args = _arguments()
    content: dict[str, Any] = {"processes": PROCESSES, "load_average_before": os.getloadavg()}
    for name, block in BLOCKS.items():
        by_rank = run_on_ranks(_measure, PROCESSES, block, args.pairs, timeout_s=3600.0)
        wall_s = {way: np.max([r[0][way] for r in by_rank], axis=0).tolist() for way in WAYS}
        cpu_s = {way: np.sum([r[1][way] for r in by_rank], axis=0).tolist() for way in WAYS}
        wall, cpu = _compared(wall_s), _compared(cpu_s)
        content[name] = {
            "block": asdict(block),
            "largest_difference_of_gradients": max(r[2] for r in by_rank),
            "wall_time": wall,
            "cpu_time": cpu,
            "step_times_s": wall_s,
            "step_cpu_times_s": cpu_s,
        }
        print(f"{name}: torch's / ours: {_line(wall)} wall time, {_line(cpu)} CPU time")
    write_result("tensor-dispatch", content, args.out)
    return 0


def _compared(times: StepTimes) -> dict[str, Any]:
    """Torch's time over ours: how often ours is quicker, by the median of pairs."""
    found = summarize({"shardyard": times["torch"], "bare": times["shardyard"]})
    quartiles = np.percentile(np.array(times["torch"]) / times["shardyard"], [25, 75])
    return {
        "median_step_s": {way: float(np.median(times[way])) for way in WAYS},
        "median_of_pair_ratios": found["median_of_pair_ratios"],
        "median_of_pair_ratios_95": found["median_of_pair_ratios_95"],
        "quartiles_of_pair_ratios": quartiles.tolist(),
    }


def _line(found: dict[str, Any]) -> str:
    low, high = found["median_of_pair_ratios_95"]
    return f"{found['median_of_pair_ratios']:.2f} ({low:.2f} to {high:.2f})"


def _measure(block: Block, pairs: int) -> tuple[StepTimes, StepTimes, float]:
    """On one rank: wall and CPU seconds of steps, and how far the gradients are apart."""
    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(block))
    x_BLD = torch.randn(block.samples, block.tokens, block.width)
    rotary = model.model.rotary_emb(x_BLD, torch.arange(block.tokens)[None])
    share = token_share(torch.arange(block.tokens), mesh)
    steps = {way: make(copy.deepcopy(model), mesh) for way, make in WAYS.items()}
    grads = {way: step(x_BLD[:, share], rotary) for way, step in steps.items()}
    pairs_of_grads = zip(grads["shardyard"], grads["torch"], strict=True)
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs_of_grads)
    wall_s: StepTimes = {way: [] for way in WAYS}
    cpu_s: StepTimes = {way: [] for way in WAYS}
    for pair in range(5 + pairs):
        for way in list(WAYS) if pair % 2 == 0 else list(reversed(WAYS)):
            dist.barrier()
            started, started_cpu = time.perf_counter(), time.process_time()
            steps[way](x_BLD[:, share], rotary)
            if pair >= 5:
                wall_s[way].append(round(time.perf_counter() - started, 6))
                cpu_s[way].append(round(time.process_time() - started_cpu, 6))
    return wall_s, cpu_s, apart


Step = Callable[[Tensor, tuple[Tensor, Tensor]], list[Tensor]]
"""Of a share of the tokens and the rotary tables; returns the local gradients before the update."""


def _ours(model: LlamaForCausalLM, mesh: DeviceMesh) -> Step:
    """As the product does: modules and optimizer see plain tensors."""
    shard_tensors(model, mesh, family_of("llama"))
    block = model.model.layers[0]
    params = list(block.parameters())
    shards = [nn.Parameter(_local(param.detach())) for param in params]
    optimizer = torch.optim.AdamW(shards, lr=1e-3, fused=True)

    def step(share_BlD: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        _backward(block, share_BlD, rotary)
        for param, shard in zip(params, shards, strict=True):
            shard.grad, param.grad = _local(_whole(param)), None
        grads = [shard.grad.clone() for shard in shards if shard.grad is not None]
        optimizer.step()
        return grads

    return step


def _torchs(model: LlamaForCausalLM, mesh: DeviceMesh) -> Step:
    """As torch's tutorial on tensor parallelism does: modules and optimizer see DTensors."""
    block = model.model.layers[0]
    plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)
    params = list(block.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)

    def step(share_BlD: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        _backward(block, share_BlD, rotary)
        for param in params:
            param.grad = _whole(param)
        grads = [_local(param.grad).clone() for param in params if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return grads

    return step


WAYS: dict[str, Callable[[LlamaForCausalLM, DeviceMesh], Step]] = {
    "shardyard": _ours,
    "torch": _torchs,
}


def _backward(block: nn.Module, share_BlD: Tensor, rotary: tuple[Tensor, Tensor]) -> None:
    out = block(share_BlD, position_embeddings=rotary, attention_mask=None)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()


def _whole(param: nn.Parameter) -> Tensor:
    """A gradient placed as its parameter is: what is a sum over ranks is added up."""
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
    grad = param.grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _config(block: Block) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=block.width,
        intermediate_size=block.inner,
        num_hidden_layers=1,
        num_attention_heads=block.heads,
        num_key_value_heads=block.kv_heads,
        max_position_embeddings=block.tokens,
        attn_implementation="sdpa",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="measured pairs of steps")
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

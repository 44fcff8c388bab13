"""Train a tiny Llama on the bytes of a Python module, with Shardyard.

torchrun --nproc-per-node 2 examples/library/with_shardyard.py tp=2
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard

STEPS, BATCH, SEQ_LEN = 20, 8, 64


def read_samples() -> torch.Tensor:
    """Bytes of real text, (samples, tokens)."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return text[: len(text) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN).long()


def main() -> None:
    degrees = dict(word.split("=") for word in sys.argv[1:])
    mesh = shardyard.build_mesh(**{axis: int(degree) for axis, degree in degrees.items()})
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ_LEN,
        )
    )
    model = shardyard.parallelize(model, mesh, seq_len=SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = read_samples()
    rank, ranks = mesh.data_rank, mesh.layout.data_ranks
    for step in range(STEPS):
        tokens = samples[step * BATCH : (step + 1) * BATCH][rank::ranks]
        loss = shardyard.accumulate(model, [{"input_ids": tokens, "labels": tokens}])
        shardyard.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.8f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # the model lets go of its process groups before they end
    dist.destroy_process_group()

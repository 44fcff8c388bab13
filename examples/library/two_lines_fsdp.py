"""Train a tiny Llama on the bytes of a Python module, with FSDP2, in two lines.

torchrun --nproc-per-node 2 examples/library/two_lines_fsdp.py
"""

import argparse
import gc
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
    dist.init_process_group("gloo")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = shardyard.wrap(model, optimizer)
    samples = read_samples()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        tokens = samples[step * BATCH : (step + 1) * BATCH][rank::ranks]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.8f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # the model lets go of its process groups before they end
    dist.destroy_process_group()

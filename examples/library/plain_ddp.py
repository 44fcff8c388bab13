"""Train a tiny Llama on the bytes of a Python module, with plain DistributedDataParallel.

torchrun --nproc-per-node 2 examples/library/plain_ddp.py
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

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
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = read_samples()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        tokens = samples[step * BATCH : (step + 1) * BATCH][rank::ranks]
        total = torch.zeros(())
        for micro in tokens.chunk(2):
            loss = model(input_ids=micro, labels=micro).loss / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {total.item() / ranks:.8f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # the model lets go of its process groups before they end
    dist.destroy_process_group()

"""Train a tiny Llama on the bytes of a Python module, in a loop whose run Shardyard shows.

torchrun --nproc-per-node 2 examples/library/own_run.py
shardyard report bytes
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardyard

SETTINGS = {"steps": 20, "batch": 8, "seq_len": 64, "lr": 3e-3, "hidden": 64}


def read_samples(seq_len: int) -> torch.Tensor:
    """Bytes of real text, (samples, tokens)."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return text[: len(text) // seq_len * seq_len].view(-1, seq_len).long()


def main(steps: int, batch: int, seq_len: int, lr: float, hidden: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=seq_len,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = shardyard.wrap(model, optimizer)
    samples = read_samples(seq_len)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with shardyard.run("bytes", SETTINGS) as run:
        for step in shardyard.steps(steps, run.checkpoints, model, optimizer, every=5):
            tokens = samples[step * batch : (step + 1) * batch][rank::ranks]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach() / ranks
            dist.all_reduce(loss)
            done = step + 1
            run.log(step=done, loss=loss, lr=lr, grad_norm=norm, tokens=done * batch * seq_len)


if __name__ == "__main__":
    main(**SETTINGS)

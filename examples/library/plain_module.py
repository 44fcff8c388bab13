"""Train a module of one's own on the bytes of a Python module, with plain FSDP2.

torchrun --nproc-per-node 2 examples/library/plain_module.py
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

STEPS, BATCH, SEQ_LEN, WIDTH = 20, 8, 64, 64


class Block(nn.Module):
    """A gated mean of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        places = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(value.cumsum(dim=1) / places * gate.sigmoid())


class Model(nn.Module):
    """Bytes in, the next byte's logits out; the table of bytes is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.table.weight, std=0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def read_samples() -> torch.Tensor:
    """Bytes of real text, (samples, tokens)."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return text[: len(text) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN).long()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    samples = read_samples()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        tokens = samples[step * BATCH : (step + 1) * BATCH][rank::ranks]
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.8f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # the model lets go of its process groups before they end
    dist.destroy_process_group()
